"""A real browser for tests of pages, and what every page must hold in it.

playwright drives a chromium of the system, since its own download is not a package: `apt-get install
chromium` on Debian, or CHROMIUM=/path/to/chrome.
"""

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from tests.patience import PATIENCE_S

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = "no browser is installed: apt-get install chromium (Debian), or CHROMIUM=/path/to/chrome"
WIDTHS = (390, 1280)
# Of every text that can be seen: its contrast with what lies behind it, by WCAG 2.
LOW_CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgba = colour => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = ([r, g, b, a], under) => [r, g, b].map((part, i) => part * a + under[i] * (1 - a));
  const luminance = parts => {
    const [r, g, b] = parts.map(part => part / 255).map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = element => element ? over(rgba(getComputedStyle(element).backgroundColor), behind(element.parentElement)) : [255, 255, 255];
  const low = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.textContent.trim(), element = walker.currentNode.parentElement;
    if (!text || !element.checkVisibility({opacityProperty: true, visibilityProperty: true}) || element.closest("script, style, noscript, :disabled")) continue;
    const style = getComputedStyle(element), size = parseFloat(style.fontSize);
    const ground = behind(element), ink = over(rgba(element instanceof SVGElement ? style.fill : style.color), ground);
    const [light, dark] = [luminance(ink), luminance(ground)].sort((a, b) => b - a), ratio = (light + 0.05) / (dark + 0.05);
    const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    if (ratio < (large ? 3 : 4.5)) low.push(`${ratio.toFixed(2)}: ${text.slice(0, 60)}`);
  }
  return low;
}"""
# Controls that a screen reader could not name.
NAMELESS = """() => [...document.querySelectorAll("button, a, input, select, textarea")].filter(one =>
  one.checkVisibility() && !(one.textContent.trim() || one.getAttribute("aria-label") || one.labels?.length)).map(one => one.outerHTML)"""
# What a person without a mouse would not find out.
HOVER = """() => [...document.querySelectorAll("body *")].filter(one => /\\bhover/i.test(
  [...one.childNodes].filter(node => node.nodeType === 3).map(node => node.data).join("")) && !one.closest("script, style")).map(one => one.textContent)"""


def found_browser() -> str | None:
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@pytest.fixture(name="browser", scope="module")
def browser_fixture() -> Iterator[Any]:
    from playwright import sync_api as api

    path = found_browser()
    if path is None:
        pytest.skip(MISSING)
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(name="page")
def page_fixture(browser: Any) -> Iterator[Any]:
    """A page on which nothing may fail."""
    opened = browser.new_page()
    problems = watched(opened)
    yield opened
    opened.close()
    assert not problems


def watched(page: Any) -> list[str]:
    """Errors of a page's script and its console, as they come."""
    page.set_default_timeout(PATIENCE_S * 1000)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))

    def heard(line: Any) -> None:
        refused = "the server responded with a status of 4" in line.text  # what tests ask for
        if line.type in ("error", "warning") and not refused:
            problems.append(line.text)

    page.on("console", heard)
    return problems


def check_page(page: Any, width: int) -> None:
    """What every page must hold at every width, light and dark."""
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "it scrolls sideways"
    for problem in (LOW_CONTRAST, NAMELESS, HOVER):
        found = page.evaluate(problem)
        assert not found, found
    assert page.locator("h1").inner_text().strip()
