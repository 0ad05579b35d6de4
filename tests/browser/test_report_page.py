"""The page of a run as a browser shows it, at the width of a phone and of a screen, in light and dark."""

from __future__ import annotations

import pytest

from hf_linattn.report.page import save_page
from tests.browser.chromium import FAINT, PHONE, SCREEN
from tests.report.test_page import full
from tests.report.test_tables import report

__all__ = ["full", "report"]
pytestmark = pytest.mark.browser


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, SCREEN])
def test_the_page_is_readable_and_fetches_nothing(browser, full, tmp_path, width, dark):
    opened = browser.open(save_page(full, tmp_path / "page.html"), width, dark=dark)
    assert opened.errors == [] and opened.fetched == []
    assert (opened.look["width"], opened.look["wide"]) == (width, []), "wide tables scroll in a box of their own"
    assert opened.look["unnamed"] == [] and opened.look["broken"] == []
    browser.driver.execute_script("document.querySelectorAll('details').forEach(part => part.open = true)")
    assert browser.driver.execute_script("return document.documentElement.scrollWidth") == width
    assert browser.driver.execute_script(FAINT) == []
    paper = browser.driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") is not dark


def test_what_would_be_wrong_is_seen(browser, tmp_path):
    (tmp_path / "page.html").write_text(
        "<meta name='viewport' content='width=device-width'><body style='margin: 0'><img src='missing.png'>"
        "<div style='width: 500px'>wide</div><p style='color: #bbb'>faint</p><script>missing()</script>"
        "<img src='http://example.org/a.png' alt='far'>"
        "<div style='overflow: auto'><table><td><hr width='1300'></table>"
    )
    opened = browser.open(tmp_path / "page.html", PHONE)
    assert len(opened.errors) >= 2 and opened.fetched == ["http://example.org/a.png"]
    assert opened.look["tables"][0] > 1300
    assert opened.look["width"] == 500 and "wide" in opened.look["wide"][0]
    assert len(opened.look["unnamed"]) == 1 and len(opened.look["broken"]) == 2
    assert "faint" in browser.driver.execute_script(FAINT)[0]
