"""Build and write self-contained HTML pages: inline style and script, no requests.

The run report, the comparison of reprocessed columns and the sample viewer share this frame and
`report.css`, which has light and dark colours. Only the viewer has a script. Entry points:
`html_page`, `navigation`, `write_whole`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from html import escape
from pathlib import Path

FOOTER = "<footer>Written by rlpipe from the records in the store.</footer>"

REPORT_PAGE = "report.html"
SAMPLES_PAGE = "samples.html"
"""Pages in the folder of a run."""
REPORT_TITLE = "Report"
SAMPLES_TITLE = "Samples"
FLOW_RUN_TITLE = "Prefect run (while its server runs)"
"""Titles of links between the pages of a run."""
SCHEMES = ("http://", "https://")
"""Starts of an address outside the run's folder."""


def html_page(title: str, body: str, *, styles: tuple[str, ...] = ("report.css",)) -> str:
    """Return a page with this title and body; `styles` are files of this folder."""
    style = "".join(asset(name) for name in styles)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n{FOOTER}\n</main>\n</body>\n</html>\n"
    )


def asset(name: str) -> str:
    """Return the text of a stylesheet or script of this folder."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def navigation(links: Mapping[str, str]) -> str:
    """Return links to other pages of the run; "" without any.

    `links`: title → address. The Prefect server may have ended, which the tooltip says.
    """
    parts = []
    for title, address in links.items():
        hint = ""
        if address.startswith(SCHEMES):
            hint = ' title="Opens while this Prefect server runs."'
        parts.append(f'<a href="{escape(address)}"{hint}>{escape(title)}</a>')
    return f"<nav>{''.join(parts)}</nav>" if parts else ""


def write_whole(path: Path, text: str) -> Path:
    """Write a text file atomically and return its path. Parent folders are created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Readers see the old file or the complete new one: rename replaces it in one step.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    return temporary.replace(path)
