"""One word, one thing: a class that others may name is defined once in what is installed."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = (
    *("rose_core", "wire", "engines", "weights", "operator", "agent", "router", "sandbox"),
    *("trainer", "rewards", "batches", "simulate", "cli"),
)
TWO_ROOMS = "of two rooms that know nothing of each other; qualified by the one that changes next"
SHARED = {
    "each room's exceptions are a tree of their own, caught by room and not by name": """
        Busy Damaged EngineRefused Forbidden NotAllowed NotFound Refused TooLarge
        Unavailable UnknownVersion
    """,
    "the word of a library or protocol that each adapter is written for": """
        Forwarder Publishes RetractingPolicy RoseProvider RoseRuntime Sample
        ToolDefinition
    """,
    "written in users' files: the kinds, and the sections of a scenario": """
        Caller Engine Kind Link Placement Service ServingEngine Sharing Totals
    """,
    TWO_ROOMS: """
        Account Box Channel Conversation Counters History
        Ingest Ledger Limits Listener Part Piece Progress Recorder Release
        Sender Settings Snapshot Splitter Stage Step Target Trace Turn
        Worker
    """,
}


# What a household says; the field has reports, updates, messages, results, replies, callbacks.
HOUSEHOLD = frozenset(
    [
        "said",
        "say",
        "says",
        "saying",
        "told",
        "tell",
        "tells",
        "telling",
        "untold",
        "heard",
        "hear",
        "hears",
        "unheard",
        "unsaid",
    ]
)
KEPT = {
    "HeardLate": "the name of an error on the wire of sandbox hosts",
    "said": "a field of what a worker of rewards sends (VerificationResult)",
    "tell": "of a file",
    "told": "a field of what a sandbox host answers (Restored)",
}
PARTS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def identifiers(path: Path) -> Iterator[str]:
    for node in ast.walk(parsed(path)):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.name


def test_what_is_passed_on_has_the_fields_names() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        for name in set(identifiers(path)) - KEPT.keys()
        if not HOUSEHOLD.isdisjoint(part.lower() for part in PARTS.findall(name))
    }
    assert not found


def test_a_public_class_is_defined_once_or_the_list_says_why() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            for node in parsed(path).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].append(str(path.relative_to(ROOT)))
    named = {name for names in SHARED.values() for name in names.split()}
    twice = {name: at for name, at in found.items() if len(at) > 1 and name not in named}
    assert not twice, f"qualify all but one of {twice} by the field's term for it"
    assert {name for name in named if len(found[name]) < 2} == set(), "no longer shared"
    crowded = {
        name: at
        for name in SHARED[TWO_ROOMS].split()
        if len(at := found[name]) > len({path.split("/")[0] for path in at})
    }
    assert not crowded, f"two of one room: qualify one of {crowded}"
