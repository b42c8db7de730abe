r"""Hook of the documentation's site: ``\|`` in code inside a table is shown as ``|``.

The repository's host wants the backslash there; the site's Markdown, which keeps code together by
itself, would show it. ``mkdocs.yml`` names this file. Next step: ``make docs``.
"""

from __future__ import annotations

import re

_CODE = re.compile(r"`[^`]*`")


def on_page_markdown(markdown: str, **_page: object) -> str:
    """A page as the site's Markdown wants it; called by mkdocs for each page."""
    return "\n".join(_row(line) if line.startswith("|") else line for line in markdown.split("\n"))


def _row(line: str) -> str:
    return _CODE.sub(lambda code: code.group().replace(r"\|", "|"), line)
