"""What pages show to copy, and what they name as proof: it exists and is accepted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache, reduce
from pathlib import Path

import pytest
import yaml

from rose_core.api import GROUP, RolloutLease, ServingPool, TenantPolicy
from tests.chart.rendering import CHART, Object

ROOT = CHART.parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
MODELS = {one.__name__: one for one in (ServingPool, RolloutLease, TenantPolicy)}
BLOCK = re.compile(r"```yaml\n(.*?)```", re.DOTALL)
VALUE = re.compile(r"--set(?:-string)?[ =]'?([A-Za-z][\w.\[\],=:]*)=")
PROOF_FILE = re.compile(r"`(tests/[\w/]+(?:\.py|\.yaml)?)`")
PROOF_TEST = re.compile(r"`(test_\w+)`")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def examples() -> Iterator[tuple[str, Object]]:
    """Every whole object of ours that a page shows."""
    for page in PAGES:
        for block in BLOCK.findall(page.read_text()):
            for shown in yaml.safe_load_all(block):
                if isinstance(shown, dict) and str(shown.get("apiVersion")).startswith(GROUP):
                    yield f"{name(page)}: {shown['kind']} {shown['metadata']['name']}", shown


def test_every_example_of_a_kind_is_one_the_kind_accepts() -> None:
    shown = dict(examples())
    assert {example["kind"] for example in shown.values()} == set(MODELS)
    for place, example in shown.items():
        parsed = MODELS[example["kind"]].model_validate(example)
        assert parsed.as_dict()["metadata"]["name"] == example["metadata"]["name"], place


@cache
def values_schema() -> Object:
    """What the chart says of its values."""
    read: Object = json.loads((CHART / "values.schema.json").read_text())
    return read


def schema_of(path: str) -> Object:
    """What the chart says of a value; nothing where it has none of that name."""
    schema = values_schema()
    for key in re.split(r"\.|(?=\[)", path) if path else []:
        inner = schema.get("items") if key.startswith("[") else None
        schema = inner or schema.get("properties", {}).get(key, {})
    return schema


def known(path: str) -> bool:
    """Whether the chart has this value."""
    return bool(schema_of(path))


def test_every_value_that_a_page_sets_is_one_of_the_chart() -> None:
    notes = CHART / "templates" / "NOTES.txt"
    found = {
        (name(page), path.rpartition(",")[2])
        for page in (*PAGES, notes)
        for path in VALUE.findall(page.read_text())
    }
    assert ("docs/install.md", "lending.enabled") in found
    assert not known("lending.enable")
    assert [one for one in sorted(found) if not known(one[1])] == []


def blocks() -> Iterator[tuple[str, Object]]:
    """Mappings of YAML that pages show and that are no whole object."""
    for page in PAGES:
        for block in BLOCK.findall(page.read_text()):
            for shown in yaml.safe_load_all(block):
                if isinstance(shown, dict) and "apiVersion" not in shown:
                    yield name(page), shown


def test_every_block_of_values_that_a_page_shows_is_one_of_the_chart() -> None:
    own = yaml.safe_load((CHART / "values.yaml").read_text())
    shown = [(page, block) for page, block in blocks() if own.keys() >= block.keys()]
    assert len(shown) >= 8
    assert [(page, block) for page, block in shown if not fits(block, values_schema())] == []


def test_every_part_of_a_spec_that_a_page_shows_is_one_of_a_kind() -> None:
    kinds = [
        yaml.safe_load(path.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        for path in sorted((ROOT / "crds").glob("*.yaml"))
    ]
    shown = [
        (page, block)
        for page, block in blocks()
        if block.keys() == {"spec"} and "containers" not in block["spec"]
    ]
    assert len(shown) >= 5
    missing = [
        (page, block)
        for page, block in shown
        if not any(fits(block["spec"], kind["properties"]["spec"]) for kind in kinds)
    ]
    assert missing == []


def fits(shown: object, schema: Object) -> bool:
    """Whether a schema has every field of what is shown."""
    if isinstance(shown, list):
        return all(fits(one, schema.get("items", {})) for one in shown)
    if not isinstance(shown, dict) or "properties" not in schema:
        return True
    fields = schema["properties"]
    return all(key in fields and fits(value, fields[key]) for key, value in shown.items())


DEFAULTS = re.compile(r"^\| ((?:`[\w.]+`(?:, )?)+) \| ([^|]+) \|", re.MULTILINE)


def test_the_table_of_values_says_their_defaults() -> None:
    page = (ROOT / "docs" / "install.md").read_text()
    section = page.partition("## Values that matter")[2].partition("\n### ")[0]
    own = yaml.safe_load((CHART / "values.yaml").read_text())
    compared = 0
    for names, said in DEFAULTS.findall(section):
        keys, figures = re.findall(r"`([\w.]+)`", names), said.split(", ")
        for key, figure in zip(keys, figures * (len(keys) // len(figures)), strict=True):
            value = reduce(lambda part, word: part[word], key.split("."), own)
            if figure == "none":
                assert not value, key
            elif re.fullmatch(r"`.*`|\d+", figure):
                assert value == yaml.safe_load(figure.strip("`")), key
                compared += 1
    assert compared >= 20


ROOM = re.compile(
    r"^\| [^|]+ \| [^|]+ \| ([^|,]+), ([^|]+) \| (.*?) ?\| `([\w.]+\.resources)` \|$", re.MULTILINE
)


def test_the_table_of_room_says_what_the_pods_ask_for() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    rows = ROOM.findall((ROOT / "docs" / "install.md").read_text())
    assert {path for *_, path in rows} == set(resources(values))
    for cpu, memory, limit, path in rows:
        found = resources(values)[path]
        assert found["requests"] == {"cpu": cpu, "memory": memory}, path
        assert found.get("limits", {}).get("memory", "") == limit, path


def resources(values: Object, before: str = "") -> dict[str, Object]:
    """Every value called ``resources``, by its path."""
    found: dict[str, Object] = {}
    for key, value in values.items():
        if key == "resources":
            found[before + key] = value
        elif isinstance(value, dict):
            found |= resources(value, f"{before}{key}.")
    return found


@cache
def every_test() -> frozenset[str]:
    """Names of every test."""
    texts = (path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    return frozenset(found for text in texts for found in re.findall(r"def (test_\w+)", text))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_what_a_page_names_as_proof_exists(page: Path) -> None:
    text = page.read_text()
    assert [path for path in PROOF_FILE.findall(text) if not (ROOT / path).exists()] == []
    assert sorted(set(PROOF_TEST.findall(text)) - every_test()) == []
