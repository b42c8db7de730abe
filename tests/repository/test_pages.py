"""What pages name exists: commands with their flags, metrics, and words of the code."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from rose_cli.main import VERBS
from tests.cli.parsers import parser_of

ROOT = Path(__file__).parents[2]
TRACKED = subprocess.run(
    ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
).stdout.splitlines()
# Decisions and the changelog are history; the rest describes the present.
PAGES = [
    path
    for path in TRACKED
    if path.endswith(".md")
    and path != "CHANGELOG.md"
    and not path.startswith(("docs/decisions/", "tests/"))
]
FENCED = re.compile(r"```.*?```", re.DOTALL)
SPAN = re.compile(r"`([^`]+)`")
COMMAND = re.compile(r"(?:^|(?<=[\s$(/\[]))(?:kubectl[ -])?rose ([a-z][\w-]*[^\n|;#)]*)")
FLAG = re.compile(r"(?<![\w-])(--[a-z][\w-]*)")


def lines(page: str) -> Iterator[str]:
    """What a page shows as code: a line of a block, or a span in the text."""
    fenced = False
    for line in re.sub(r"\\\n\s*", " ", (ROOT / page).read_text()).splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            yield line
    yield from spans(page)


def spans(page: str) -> list[str]:
    text = FENCED.sub("", (ROOT / page).read_text())
    return [re.sub(r"\s+", " ", span) for span in SPAN.findall(text)]


def commands() -> Iterator[tuple[str, tuple[str, ...], set[str]]]:
    """Each ``rose VERB ...`` of a page: the page, the words up to the first flag, the flags."""
    for page in PAGES:
        for line in lines(page):
            for found in COMMAND.findall(line):
                ours = found.partition(" -- ")[0]
                words = tuple(ours.partition(" -")[0].split())
                if words[0] in VERBS:
                    yield page, words, set(FLAG.findall(ours))


def test_every_flag_that_a_page_gives_to_a_verb_is_one_of_that_verb() -> None:
    found = list(commands())
    assert len(found) > 200
    missing = {
        f"{page}: rose {' '.join(words[:2])} {flag}"
        for page, words, flags in found
        for flag in flags - set(parser_of(words)._option_string_actions)
    }
    assert not missing


DEFAULT = re.compile(r"`(--[a-z][\w-]*)`,? \(?([\d,.]+)(?=[);,| ]|$)", re.MULTILINE)


def test_a_figure_beside_a_flag_is_that_flags_default() -> None:
    operator = parser_of(("operator",))
    page = (ROOT / "docs/operator.md").read_text()
    said = {flag: float(figure.rstrip(",.")) for flag, figure in DEFAULT.findall(page)}
    assert len(said) >= 10
    assert said == {flag: operator.get_default(flag[2:].replace("-", "_")) for flag in said}


METRIC = re.compile(r"\brose_[a-z0-9_]+\b(?![./(*])")
ROW = re.compile(r"^\| `(rose_\w+)`", re.MULTILINE)


def test_every_metric_that_a_page_names_is_one_of_ours() -> None:
    ours = set(ROW.findall((ROOT / "docs/metrics.md").read_text()))
    first = {name.rsplit("_", name.count("_") - 1)[0] + "_" for name in ours}
    named = {
        (page, name)
        for page in PAGES
        for span in spans(page)
        for name in METRIC.findall(span)
        if name.startswith(tuple(first)) and not name.endswith("_")
    }
    assert len(named) > 200
    series = re.compile(r"_(?:bucket|sum|count)$")  # of a histogram
    missing = {one for one in named if not {one[1], series.sub("", one[1])} & ours}
    assert not missing


# What others name: kinds of Kubernetes projects, settings of trainers, architectures of models.
THEIRS = re.compile(r"docs/(?:trainers/|atlas\.md|ecosystem\.md|autoscalers\.md)")
OTHERS = frozenset(["SandboxClaim", "SandboxWarmPool"])
CAMEL = re.compile(r"[A-Z][a-z]+[A-Za-z]*|[a-z]+[A-Z]\w*|[a-z]+(?:\.[a-z]+[A-Z]\w*)+")
TEXTS = (".py", ".yaml", ".yml", ".tpl", ".json", ".toml", ".txt")


@cache
def words_of_the_code() -> frozenset[str]:
    """Every word of what is installed, of its chart, and of what builds and measures it."""
    texts = (
        (ROOT / path).read_text(errors="replace")
        for path in TRACKED
        if path.endswith(TEXTS) and not path.startswith("tests/") and (ROOT / path).exists()
    )
    return frozenset(word for text in texts for word in re.findall(r"[A-Za-z_]\w*", text))


def test_every_reason_field_and_value_that_a_page_names_is_a_word_of_the_code() -> None:
    named = {
        (page, span)
        for page in PAGES
        if not THEIRS.match(page)
        for span in spans(page)
        if CAMEL.fullmatch(span) and span not in OTHERS
    }
    assert len(named) > 800
    missing = {one for one in named if not words_of_the_code().issuperset(one[1].split("."))}
    assert not missing
