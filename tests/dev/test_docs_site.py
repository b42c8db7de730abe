"""The site shows the tables of pages as the repository's host does."""

from pathlib import Path

import yaml

from rose_dev.docs_site import on_page_markdown

ROOT = Path(__file__).parents[2]


def test_a_bar_in_code_inside_a_table_loses_its_backslash_and_nothing_else_does() -> None:
    page = "\n".join([r"| `a\|b` | c \| d `e\|f` |", r"text `a\|b`", ""])
    assert on_page_markdown(page, page=None) == "\n".join(
        ["| `a|b` | c \\| d `e|f` |", r"text `a\|b`", ""]
    )


def test_the_site_uses_the_hook_and_the_style_that_are_there() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert all((ROOT / hook).is_file() for hook in site["hooks"])
    assert all((ROOT / "docs" / sheet).is_file() for sheet in site["extra_css"])
