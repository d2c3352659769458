"""Build and write self-contained HTML pages: inline style, no scripts, no requests.

The run report, the comparison of reprocessed columns and the sample viewer share this frame and
`report.css`, which has light and dark colours. Entry points: `html_page`, `write_whole`.
"""

from __future__ import annotations

import os
from html import escape
from pathlib import Path

FOOTER = "<footer>Written by rlpipe from the records in the store.</footer>"


def html_page(title: str, body: str, *, styles: tuple[str, ...] = ("report.css",)) -> str:
    """Return a page with this title and body; `styles` are files of this folder."""
    folder = Path(__file__).parent
    style = "".join((folder / name).read_text(encoding="utf-8") for name in styles)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n{FOOTER}\n</main>\n</body>\n</html>\n"
    )


def write_whole(path: Path, text: str) -> Path:
    """Write a text file atomically and return its path. Parent folders are created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Readers see the old file or the complete new one: rename replaces it in one step.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    return temporary.replace(path)
