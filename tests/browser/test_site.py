"""The site as `make docs-site` built it: every page opened from its file, at the width of a phone."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urldefrag, urlparse

import pytest

from tests.browser.chromium import PHONE, SCREEN, Opened

pytestmark = pytest.mark.browser

SITE = Path(__file__).resolve().parents[2] / "build" / "site"
NOT_A_PAGE = ("mailto:", "javascript:")


@pytest.fixture(scope="module")
def opened(browser) -> dict[Path, Opened]:
    """Every page of the site, opened once."""
    pages = sorted(SITE.rglob("*.html"))
    if not pages:
        pytest.fail(f"{SITE} has no page; run `make docs-site` first", pytrace=False)
    return {page: browser.open(page, PHONE) for page in pages if page.name != "404.html"}


def wrong_pages(opened: dict[Path, Opened], find) -> dict[str, object]:
    """Return page -> what is wrong with it, of those with something."""
    found = {page.relative_to(SITE).as_posix(): find(page, seen) for page, seen in opened.items()}
    return {page: wrong for page, wrong in found.items() if wrong}


def test_no_page_says_an_error_or_asks_the_network_for_anything(opened):
    assert len(opened) > 60
    assert wrong_pages(opened, lambda page, seen: [*seen.errors, *seen.fetched]) == {}


def test_no_page_is_wider_than_a_phone(opened):
    assert wrong_pages(opened, lambda page, seen: seen.look["wide"] or max(0, seen.look["width"] - PHONE)) == {}


def test_no_table_is_wider_than_a_screen(browser, opened):
    widths = {page.relative_to(SITE).as_posix(): browser.open(page, SCREEN).look["tables"] for page in opened}
    assert sum(map(len, widths.values())) > 100
    assert {page: max(wide) for page, wide in widths.items() if max(wide, default=0) > SCREEN} == {}


def test_pictures_are_there_and_have_a_text(opened):
    assert wrong_pages(opened, lambda page, seen: seen.look["unnamed"] + seen.look["broken"]) == {}


def test_links_and_their_anchors_lead_somewhere(opened):
    anchors = {page: {*seen.look["anchors"]} for page, seen in opened.items()}

    def dead(page: Path, seen: Opened) -> list[str]:
        links = {link for link in seen.look["links"] if not link.startswith(("http", *NOT_A_PAGE))}
        return sorted(link for link in links if not leads(link))

    def leads(link: str) -> bool:
        address, anchor = urldefrag(link)
        target = Path(unquote(urlparse(address).path))
        known = anchors.get(target, set())
        return target.is_file() and (not anchor or anchor.startswith("__") or unquote(anchor) in known)

    assert sum(len(seen.look["links"]) for seen in opened.values()) > 1000
    assert wrong_pages(opened, dead) == {}


def test_the_search_finds_a_page_without_a_network(browser):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    browser.open(SITE / "index.html", SCREEN)
    browser.driver.find_element(By.CSS_SELECTOR, "input.md-search__input").send_keys("choose_plan")
    found = WebDriverWait(browser.driver, 20).until(
        lambda driver: driver.find_elements(By.CSS_SELECTOR, ".md-search-result__link")
    )
    addresses = [link.get_attribute("href") for link in found]
    assert all(Path(unquote(urlparse(address).path)).is_file() for address in addresses)
    assert any("api.html" in address or "heads.html" in address for address in addresses)
    assert browser.errors() == [] and browser.fetched() == []
