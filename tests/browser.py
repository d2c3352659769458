"""Run a page in Chromium and read what its script draws."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
TIMEOUT_S = 120.0


def browser() -> str | None:
    """Return the path of a Chromium; None if this machine has none.

    Tests with the mark `browser` are then not collected (Debian: apt-get install chromium).
    """
    return next(filter(None, map(shutil.which, NAMES)), None)


def run_in_browser(page: str, script: str, folder: Path) -> Any:
    """Return the JSON value of `script`, the body of a function that runs after the page's own."""
    chromium = browser()
    assert chromium is not None, "the test needs the mark `browser`"
    result = (
        "<script>document.body.innerHTML = '<pre id=result></pre>', "
        "document.getElementById('result').textContent = JSON.stringify(RESULT)</script>"
    )
    path = folder / "page.html"
    path.write_text(
        f"{page}<script>const RESULT = (() => {{ {script} }})();</script>{result}", encoding="utf-8"
    )
    dumped = subprocess.run(
        [chromium, *FLAGS, f"--user-data-dir={folder}/profile", "--dump-dom", f"file://{path}"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    ).stdout
    found = re.search(r'<pre id="result">(.*?)</pre>', dumped, re.S)
    assert found, dumped[-2000:]
    return json.loads(html.unescape(found[1]))
