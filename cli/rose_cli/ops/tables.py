"""Rows -> text for people, JSON or CSV for programs."""

from __future__ import annotations

import argparse
import csv
import io
import json
from collections.abc import Mapping, Sequence

Row = Mapping[str, object]
_SMALL = 0.1
"""Below it two decimals would hide a price."""


def output_flag(parser: argparse.ArgumentParser, *, one_table: bool = True) -> None:
    """``-o``; a verb whose answer is no single table has no CSV."""
    parser.add_argument(
        "-o",
        "--output",
        choices=["table", "json", *(["csv"] if one_table else [])],
        default="table",
        help="for people, for a program" + (", for a spreadsheet" if one_table else ""),
    )


def shown(rows: Sequence[Row], how: str, empty: str = "none") -> str:
    """Rows as a table, JSON or CSV; ``empty`` is what a table without rows says."""
    if how == "json":
        return json.dumps([dict(row) for row in rows], indent=2) + "\n"
    return _csv(rows) if how == "csv" else table(rows, empty)


def table(rows: Sequence[Row], empty: str = "none") -> str:
    """Columns as wide as their widest cell; numbers to the right."""
    if not rows:
        return f"{empty}\n"
    names = list(rows[0])
    cells = [[name.upper() for name in names]]
    cells += [[_text(row[name]) for name in names] for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    right = [all(isinstance(row[name], int | float) for row in rows) for name in names]
    return "".join(_line(line, widths, right) for line in cells)


def _line(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    padded = [
        cell.rjust(width) if to_right else cell.ljust(width)
        for cell, width, to_right in zip(cells, widths, right, strict=True)
    ]
    return "  ".join(padded).rstrip() + "\n"


def _text(value: object) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, float):
        return f"{value:.2g}" if 0 < abs(value) < _SMALL else f"{value:.2f}"
    return str(value)


def _csv(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
