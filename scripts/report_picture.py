"""Writes docs/report.png, the top of a run's report: ``python scripts/report_picture.py RUN``.

It needs Chromium and the extra browser, as the tests of reports do.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

import flowtrain

TARGET = Path(__file__).parents[1] / "docs" / "report.png"
WIDTH, HEIGHT = 1120, 1150


def take(run: str) -> None:
    page_file = flowtrain.report(run)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        page.goto(page_file.as_uri())
        page.screenshot(path=str(TARGET))
        browser.close()
    print(f"wrote {TARGET}")


if __name__ == "__main__":
    take(sys.argv[1])
