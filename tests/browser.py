"""A headless Chromium for tests of pages: the one that is installed, or Playwright's own."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, Playwright, sync_playwright
from playwright.sync_api import Error as PlaywrightError

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MAC = Path("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")
REMEDY = (
    "needs Chromium or Chrome: Debian/Ubuntu: sudo apt install chromium; macOS: brew install --cask google-chrome; "
    "or `playwright install chromium`; or name one: export CHROMIUM=/path/to/chromium"
)


def find_chromium() -> str | None:
    """An installed Chromium or Chrome; None where there is none that is known."""
    named = os.environ.get("CHROMIUM")
    found = [named, *map(shutil.which, NAMES), str(MAC) if MAC.exists() else None]
    return next((path for path in found if path), None)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless browser.

    Raises:
        RuntimeError: there is none; says how to get one.
    """
    with sync_playwright() as playwright:
        browser = launch(playwright)
        yield browser
        browser.close()


def launch(playwright: Playwright) -> Browser:
    try:
        return playwright.chromium.launch(executable_path=find_chromium())
    except PlaywrightError as error:
        raise RuntimeError(f"{REMEDY} ({str(error).splitlines()[0]})") from error


class Watch:
    """Requests and complaints of a page, from the moment that it is watched."""

    def __init__(self, page: Page) -> None:
        self.requests: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", self._heard)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    @property
    def left(self) -> list[str]:
        """Requests that left this machine."""
        here = ("file:", "data:", "blob:", "about:", "http://127.0.0.1:")
        return [url for url in self.requests if not url.startswith(here)]
