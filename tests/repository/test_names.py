"""One word, one thing: a class that others may name is defined once in what is installed."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = (
    *("rose_core", "wire", "engines", "weights", "operator", "agent", "router", "sandbox"),
    *("trainer", "rewards", "batches", "simulate", "cli"),
)
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
    "of two rooms that know nothing of each other; qualified by the one that changes next": """
        Account Action Answer Attachment Box Channel Conversation Counters History Hosts
        Ingest Ledger Limits Listener Part Piece Progress Recorder Release Residents
        Sender Server Settings Snapshot Splitter Stage Staged Step Target Trace Turn
        Watch Worker
    """,
}


def test_a_public_class_is_defined_once_or_the_list_says_why() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].append(str(path.relative_to(ROOT)))
    named = {name for names in SHARED.values() for name in names.split()}
    twice = {name: at for name, at in found.items() if len(at) > 1 and name not in named}
    assert not twice, f"qualify all but one of {twice} by the field's term for it"
