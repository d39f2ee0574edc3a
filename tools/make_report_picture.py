"""Write docs/report.png: the report of the recorded run that the tests use, as Chromium shows it.

python tools/make_report_picture.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "tests")]

from support.browser import chromium, opened  # noqa: E402 - found through the line above
from support.reported import write_run  # noqa: E402

from controller.reporting import write_report  # noqa: E402
from controller.runfolder import RunFolder  # noqa: E402

TARGET = CHECKOUT / "docs" / "report.png"

WIDTH = 1000
"""Pixels: the page's column and its margins."""


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        run = write_run(Path(folder))
        page = write_report(RunFolder(run.path))
        page.write_text(page.read_text().replace(str(run.path), f"ctl-runs/{run.path.name}"))
        with chromium() as browser, opened(browser, page, width=WIDTH) as seen:
            seen.page.screenshot(path=TARGET, full_page=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
