"""A headless Chromium that is told nothing of the network, and notes whatever a page says, asks for or opens."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")

LAUNCH_TIMEOUT_MS = 60_000
"""On a machine whose cores are busy."""

PAGE_TIMEOUT_MS = 30_000


@dataclass
class Seen:
    """A page that was opened, and what it did."""

    page: Page
    console: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)

    def colour(self, selector: str, name: str) -> str:
        """Return a computed colour of the first such element."""
        found: str = self.page.eval_on_selector(selector, f"element => getComputedStyle(element).{name}")
        return found


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start the browser of this machine. Skips the test where there is none."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        # In a container its sandbox has no user namespaces to stand on; the pages are our own.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"], timeout=LAUNCH_TIMEOUT_MS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, path: Path, *, scheme: str = "light", width: int = 1100) -> Iterator[Seen]:
    """Open a file with a colour scheme and yield what it did."""
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 800})  # type: ignore[arg-type]
    try:
        seen = Seen(context.new_page())
        seen.page.on("console", lambda message: seen.console.append(message.text))
        seen.page.on("pageerror", lambda error: seen.console.append(str(error)))
        seen.page.on("request", lambda request: seen.requests.append(request.url))
        seen.page.on("dialog", lambda dialog: (seen.dialogs.append(dialog.message), dialog.dismiss()))
        seen.page.goto(path.as_uri(), timeout=PAGE_TIMEOUT_MS)
        yield seen
    finally:
        context.close()
