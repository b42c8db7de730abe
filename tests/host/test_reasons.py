"""The host's words: one closed list, the same on the wire, in metrics and in the documents."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from rose_agent.host.enforcement.tree import RunConditions
from rose_core.api.reasons import Reason
from rose_core.devices.mps import MpsRefusal
from rose_core.guard.reasons import GateReason, slot_reason
from rose_core.host_reasons import HOST_MEANING, SHOWN_IN_FULL, TROUBLE, HostReason
from rose_core.telemetry.signal import Doubt
from rose_core.wire.host import EngineStatus, Holder

ROOT = Path(__file__).parents[2]
FRAME = {"slot": {"uid": "u", "generation": 1}, "state": "Failed"}
USES = [
    ROOT / "agent/rose_agent/errors.py",
    *sorted((ROOT / "agent/rose_agent/host").rglob("*.py")),
    *sorted((ROOT / "rose_core/devices").rglob("*.py")),
]


def read(reason: object) -> HostReason:
    frame = msgspec.msgpack.encode(FRAME | {"reason": reason})
    return msgspec.msgpack.decode(frame, type=EngineStatus).reason


def test_every_word_comes_back_equal_and_another_versions_word_is_other() -> None:
    assert [read(word.value) for word in HostReason] == list(HostReason)
    assert read("InventedLater") is HostReason.OTHER
    with pytest.raises(msgspec.ValidationError):
        read(7)


def test_a_status_without_a_word_is_read_as_none() -> None:
    status = msgspec.convert(FRAME, EngineStatus)
    assert status.reason is HostReason.NONE
    assert b"reason" not in msgspec.json.encode(status)


def test_every_word_is_said_somewhere_and_no_text_stands_for_one() -> None:
    text = "\n".join(path.read_text() for path in USES)
    found = {HostReason[name] for name in re.findall(r"HostReason\.([A-Z_]+)", text)}
    found |= {HostReason(refusal) for refusal in MpsRefusal}
    assert found | {HostReason.OTHER} == set(HostReason)
    assert re.findall(r"KILLED\.labels\(.*", text) == ["KILLED.labels(reason=reason.value).inc()"]


def test_what_mps_refuses_and_who_holds_has_a_word_of_its_own() -> None:
    assert HostReason.OTHER not in {HostReason(refusal.value) for refusal in MpsRefusal}
    held = [
        RunConditions(permit_open=True, holders=frozenset({holder})).reason for holder in Holder
    ]
    assert held == [f"HeldBy{holder}" for holder in Holder]


def test_a_word_of_guard_host_and_operator_means_one_thing() -> None:
    """A word that two of the lists have is the same fact: leases repeat their hosts' trouble."""
    shared = {word.value for word in HostReason} & {reason.value for reason in Reason}
    assert shared == {"Other"} | {word.value for word in TROUBLE}
    assert SHOWN_IN_FULL < TROUBLE
    assert not {word.value for word in HostReason} & {reason.value for reason in GateReason}


def test_a_condition_repeats_known_words_only() -> None:
    for word in (*GateReason, *HostReason):
        assert slot_reason(word.value) == word.value
    assert slot_reason("InventedLater") == "Other"


def test_every_word_is_explained_and_the_page_says_so() -> None:
    assert set(HOST_MEANING) | {HostReason.NONE} == set(HostReason)
    page = (ROOT / "docs/engine-host.md").read_text()
    section = page.partition("## Reasons\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", section, flags=re.MULTILINE)
    assert dict(rows) == {word.value: text for word, text in HOST_MEANING.items()}


def test_every_reason_of_a_gate_is_given_somewhere_and_explained_in_the_guards_table() -> None:
    given = "\n".join(
        path.read_text()
        for folder in ("rose_core/guard", "agent/rose_agent/guard")
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "reasons.py"  # it has them all, in sets and tables
    )
    unused = set(GateReason) - {
        GateReason[name] for name in re.findall(r"GateReason\.([A-Z_]+)", given)
    }
    assert {reason.value for reason in unused} <= {doubt.value for doubt in Doubt}
    page = (ROOT / "docs/guard.md").read_text()
    table = page.partition("## When the gate is open\n")[2].partition("\n### ")[0]
    assert set(re.findall(r"`(\w+)`", table)) >= {reason.value for reason in GateReason}
