"""A headless Chromium that opens files, and what it says of them. Nothing is fetched: all names lead nowhere."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
DRIVERS = ("chromedriver", "chromium.chromedriver")
REMEDY = "`apt-get install chromium chromium-driver`, or a Chrome and the chromedriver of its version on the PATH"
PATIENCE = 600  # seconds that a page may take where other things run beside
PHONE, SCREEN = 390, 1280  # pixels
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--disable-background-networking",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)  # fmt: skip
# what a reader at that width meets; pictures without a text are named, links as the browser understands them, and of
# tables how wide they are
LOOK = """
const wide = [...document.querySelectorAll('body *')].filter(element => {
  if (element.getBoundingClientRect().right <= arguments[0] + 1) return false;
  for (let box = element.parentElement; box; box = box.parentElement)
    if (getComputedStyle(box).overflowX !== 'visible') return false;
  return true;
}).slice(0, 3).map(element => element.outerHTML.slice(0, 120));
const hidden = element => element.closest('[aria-hidden=true], a, button, label, .twemoji, .md-icon') !== null;
const text = element =>
  element.alt || element.getAttribute('aria-label') || element.querySelector('title')?.textContent;
return {
  width: document.documentElement.scrollWidth, wide,
  unnamed: [...document.querySelectorAll('img, svg[role], figure svg')].filter(x => !hidden(x) && !text(x)?.trim())
    .map(element => element.outerHTML.slice(0, 120)),
  broken: [...document.images].filter(image => image.complete && !image.naturalWidth).map(image => image.src),
  links: [...document.querySelectorAll('a[href]')].map(link => link.href),
  tables: [...document.querySelectorAll('table')].map(table => table.scrollWidth),
  anchors: [...document.querySelectorAll('[id], a[name]')].map(element => element.id || element.name),
};
"""
# texts whose colour and the one behind it are closer than 4.5 to 1, the least that WCAG 2 takes for readable
FAINT = """
const numbers = colour => {
  const found = colour.match(/-?[\\d.]+(e-?\\d+)?/g).map(Number);
  return colour.startsWith('color(') ? [...found.slice(0, 3), found[3] ?? 1]
    : [...found.slice(0, 3).map(x => x / 255), found[3] ?? 1];
};
const light = colour => {
  const [r, g, b] = numbers(colour).map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const behind = element => {
  for (; element; element = element.parentElement) {
    const colour = getComputedStyle(element).backgroundColor;
    if (numbers(colour)[3] > 0) return colour;
  }
  return 'rgb(255, 255, 255)';
};
return [...document.querySelectorAll('body *')].filter(element => {
  if (![...element.childNodes].some(node => node.nodeType === 3 && node.data.trim())) return false;
  if (!element.checkVisibility() || ['TITLE', 'STYLE'].includes(element.tagName.toUpperCase())) return false;
  const style = getComputedStyle(element), drawn = element.closest('svg');
  const [a, b] = [light(drawn ? style.fill : style.color), light(behind(element))];
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 4.5;
}).map(element => `${element.outerHTML.slice(0, 100)} on ${behind(element)}`).slice(0, 5);
"""


@dataclass(frozen=True)
class Opened:
    """A page as it was met: what the console says, what was asked of the network, and `LOOK`."""

    errors: list[str]
    fetched: list[str]
    look: dict[str, Any] = field(repr=False)


class Browser:
    """Opens pages, one after the other."""

    def __init__(self, driver: Any):
        self.driver = driver

    def open(self, page: Path, width: int, *, dark: bool = False) -> Opened:
        """Open a file at a width, in light or dark."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        metrics = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width == PHONE}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get(page.resolve().as_uri())
        look = self.driver.execute_script(LOOK, width)
        return Opened(self.errors(), self.fetched(), look)

    def errors(self) -> list[str]:
        """Return what the console says since it was asked last."""
        return [f"{entry['level']}: {entry['message']}" for entry in self.driver.get_log("browser")]

    def fetched(self) -> list[str]:
        """Return what was asked of the network since this was asked last; files and data are not of it."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        asked = [x["params"]["request"]["url"] for x in events if x["method"] == "Network.requestWillBeSent"]
        return [url for url in asked if not url.startswith(("file:", "data:", "blob:", "about:"))]


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start a headless Chromium; a test that has none fails and says what to install."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = _found("Chromium", CHROMIUMS)
    service = Service(_found("chromedriver", DRIVERS))
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=service)
    driver.command_executor.client_config.timeout = PATIENCE
    try:
        yield Browser(driver)
    finally:
        driver.quit()


def _found(what: str, names: tuple[str, ...]) -> str:
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.fail(f"{what} is missing: none of {', '.join(names)} is on the PATH; {REMEDY}", pytrace=False)
    return path
