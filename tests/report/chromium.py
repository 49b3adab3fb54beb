"""A page in headless Chromium, Debian's package: quiet, of its width, accessible."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

HOW = "needs Chromium and playwright: apt-get install chromium && pip install -c constraints.txt -e '.[browser]'"
WIDTHS = (1280, 390)
SCHEMES = ("light", "dark")
BACKGROUNDS = {"light": "rgb(247, 247, 245)", "dark": "rgb(19, 22, 25)"}


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser; without one the test is skipped, and says how to install it."""
    playwright = pytest.importorskip("playwright.sync_api", reason=HOW)
    pytest.importorskip("axe_playwright_python.sync_playwright", reason=HOW)
    names = (os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome")
    path = next((found for name in names if name and (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(HOW)
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def opened(context: Any, file: Path) -> tuple[Any, list[str]]:
    """The page, and what it complained of or asked for."""
    page, faults = context.new_page(), []
    page.on("console", lambda message: faults.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: faults.append(f"error: {error}"))
    page.on("dialog", lambda dialog: (faults.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("requestfailed", lambda request: faults.append(f"refused: {request.failure}"))
    page.on("request", lambda request: faults.append(request.url) if request.url != file.as_uri() else None)
    page.goto(file.as_uri())
    page.wait_for_load_state("load")
    return page, [fault for fault in faults if not fault.startswith("data:image/jpeg;")]


def check_page(browser: Any, file: Path, width: int, scheme: str, name: str) -> None:
    """A page runs nothing, asks for nothing, has its style, fits its width, and axe finds no fault in it.

    name: of its screenshot, which is kept in the directory REPORT_SCREENSHOTS, to look at.
    """
    from axe_playwright_python.sync_playwright import Axe

    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page, faults = opened(context, file)
    assert faults == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
    assert page.evaluate("document.scripts.length") == 0
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == BACKGROUNDS[scheme], "it has its style"
    boxes = [chart.bounding_box() for chart in page.query_selector_all("svg.chart")]
    assert boxes and all(box["width"] > 200 and box["height"] > 100 for box in boxes)
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= width for box in boxes)
    found = Axe().run(page)
    assert found.response["violations"] == [], found.generate_report()
    if where := os.environ.get("REPORT_SCREENSHOTS"):
        page.screenshot(path=str(Path(where) / f"{name}-{width}-{scheme}.png"), full_page=True)
    context.close()
