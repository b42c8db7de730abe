"""Neighbours of the next and the previous version understand each other."""

import msgspec

from rose_core.identity import SlotKey, SlotUid
from rose_core.wire.sync import SlotReport, SlotState, SyncReply, SyncRequest


class _Newer(msgspec.Struct):
    """What a later version might send: one field that this version does not know."""

    node: str = "n1"
    agent_version: str = "9.9"
    highest_term: int = 3
    invented_later: int = 1


def test_unknown_fields_are_ignored() -> None:
    frame = msgspec.msgpack.encode(_Newer())
    assert msgspec.msgpack.decode(frame, type=SyncRequest) == SyncRequest("n1", "9.9", 3)


def test_missing_fields_take_their_defaults() -> None:
    frame = msgspec.msgpack.encode({"term": 1, "complete": True})
    reply = msgspec.msgpack.decode(frame, type=SyncReply)
    assert reply == SyncReply(term=1, complete=True)
    assert reply.sync_period_seconds > 0


def test_a_report_comes_back_equal() -> None:
    report = SlotReport(
        SlotKey(SlotUid("u"), 2), SlotState.RUNNING, version="run@0.1", reclaims={"Stop": 3}
    )
    frame = msgspec.msgpack.encode(report)
    assert msgspec.msgpack.decode(frame, type=SlotReport) == report
