"""Start a headless Chromium for tests of pages: the installed one, or Playwright's own."""

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
    """Return the path of an installed Chromium or Chrome, or None if none is found."""
    paths = [os.environ.get("CHROMIUM")]
    paths += [shutil.which(name) for name in NAMES]
    if MAC.exists():
        paths.append(str(MAC))
    return next((path for path in paths if path), None)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Yield a headless browser.

    Raises:
        RuntimeError: no browser is installed. The message says how to install one.
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
    """Record the requests of a page, and the errors and warnings in its console."""

    def __init__(self, page: Page) -> None:
        self.requests: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", self._record_message)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _record_message(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    @property
    def foreign_requests(self) -> list[str]:
        """The requests that left this machine."""
        local_prefixes = ("file:", "data:", "blob:", "about:", "http://127.0.0.1:")
        return [url for url in self.requests if not url.startswith(local_prefixes)]
