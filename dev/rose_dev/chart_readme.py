"""The chart's README: every value with its default, from the comments of ``values.yaml``.

People meet a chart in a registry or a catalogue, where its README is all they see. The comment of a
value is the line ``# -- ...`` above it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

_LINE = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z0-9]+):")
_COMMENT = re.compile(r"^ *# -- (?P<text>.+)$")
_LONGEST = 60
"""Characters of a default; a longer one is only called so, its line in values.yaml shows it."""


def page(chart: Path, note: str) -> str:
    """The README of a chart's folder."""
    about: dict[str, Any] = yaml.safe_load((chart / "Chart.yaml").read_text())
    lines = [
        f"# {about['name']}",
        "",
        f"<!-- {note} -->",
        "",
        about["description"],
        "",
        f"The default values observe and lend nothing. How to install, lend and upgrade: "
        f"<{about['home']}install/>.",
        "",
        "```console",
        f"$ helm install rose oci://REGISTRY/charts/{about['name']} --version {about['version']} "
        "--namespace rose-system --create-namespace --wait",
        "```",
        "",
        f"Needs Kubernetes {about['kubeVersion'].removesuffix('-0')}.",
        "",
        "| value | default | |",
        "|---|---|---|",
    ]
    lines += [f"| `{path}` | {_default(value)} | {text} |" for path, value, text in values(chart)]
    return "\n".join([*lines, ""])


def values(chart: Path) -> Iterator[tuple[str, Any, str]]:
    """Path, default and meaning of every value that has a comment, in the file's order."""
    text = (chart / "values.yaml").read_text()
    defaults = yaml.safe_load(text)
    above: list[tuple[int, str]] = []
    comment = ""
    for line in text.splitlines():
        if found := _COMMENT.match(line):
            comment = found["text"]
            continue
        named = _LINE.match(line)
        if named is None:
            continue
        indent = len(named["indent"])
        while above and above[-1][0] >= indent:
            above.pop()
        above.append((indent, named["key"]))
        if comment:
            keys = [key for _, key in above]
            value = defaults
            for key in keys:
                value = value[key]
            yield ".".join(keys), value, comment.replace("|", "\\|")
            comment = ""


def _default(value: object) -> str:
    encoded = json.dumps(value)
    return f"`{encoded}`" if len(encoded) <= _LONGEST else "see values.yaml"
