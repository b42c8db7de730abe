"""What users may import is what the page for them says, and it is there."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/rl-team.md").read_text()
TABLE = PAGE.split("## What you may import", 1)[1].split("\n## ", 1)[0]
ROWS = {
    module: set(re.findall(r"`(\w+)`", names))
    for module, names in re.findall(r"^\| `([\w.]+)` \| (.+?) \|", TABLE, re.MULTILINE)
}


def source(module: str) -> ast.Module:
    (found,) = ROOT.glob(f"*/{module.replace('.', '/')}.py")
    return ast.parse(found.read_text())


def loaded(module: str) -> ModuleType | None:
    """The module; None where it needs a harness or a trainer that is not installed here."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if str(error.name).startswith("rose_"):
            raise
        return None


def exported(tree: ast.Module) -> set[str]:
    (listed,) = [
        set(ast.literal_eval(node.value))
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return listed


def defined(tree: ast.Module) -> set[str]:
    """Names of classes and functions, also of those made only where a harness is installed."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


@pytest.mark.parametrize("module", sorted(ROWS))
def test_every_name_that_the_page_lets_users_import_is_there(module: str) -> None:
    found = loaded(module)
    there = (
        defined(source(module)) if found is None else {*dir(found), *getattr(found, "__all__", ())}
    )
    assert ROWS[module]
    assert ROWS[module] - there == set()


@pytest.mark.parametrize(
    "module", sorted(name for name in ROWS if name.startswith(("rose_trainer.", "rose_sandbox.")))
)
def test_the_page_names_what_the_module_exports(module: str) -> None:
    names = exported(source(module))
    assert names == ROWS[module]


def test_the_page_names_what_the_trainers_package_exports() -> None:
    assert set(importlib.import_module("rose_trainer").__all__) == ROWS["rose_trainer"]


def test_every_module_with_names_for_users_is_on_the_page() -> None:
    here = [*ROOT.glob("trainer/rose_trainer/**/*.py"), *ROOT.glob("sandbox/rose_sandbox/**/*.py")]
    marked = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts[1:]).removesuffix(".__init__")
        for path in here
        if "\n__all__ = " in path.read_text()
    }
    assert marked <= set(ROWS)
