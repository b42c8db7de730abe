"""A record is whole or not there, has one owner, and takes no more room than what changed."""

from __future__ import annotations

import filecmp
import hashlib
import os
import tracemalloc
from pathlib import Path

import msgspec
import pytest

from rose_core.identity import WeightVersion
from rose_weights.errors import Damaged, Fenced, Incomplete, StoreFailed, UnknownVersion
from rose_weights.store import state as states
from rose_weights.store.record_store import place_of
from rose_weights.store.records import OutsideEffect, PublishedTurn, Records, digest_of, mapped
from rose_weights.store.retention import sweep
from rose_weights.store.state import RunState
from rose_weights.store.store import Store
from tests.weights.faulty import Crash, FaultyDisk

SPEC = {"image": "base"}


def turn(
    number: int, *, files: bytes | None = None, processes: bytes | None = None
) -> PublishedTurn:
    return PublishedTurn(number, tuple(range(number * 10)), SPEC, files, processes, ("grpo@1.3",))


def three(store: Store, kept: list[int]) -> None:
    records = Records(store, "grpo")
    owned = records.claim("s", "one")
    for number in (1, 2, 3):
        records.publish(owned, turn(number, files=bytes([number]) * 9000, processes=b"p" * number))
        kept.append(number)


def test_runs_whose_names_begin_alike_hold_sessions_apart(tmp_path: Path) -> None:
    store = Store(tmp_path)
    # The fortieth character of the last one is a dot: what is cut there must name a run too.
    runs = ["a" * 50, "a" * 50 + "b", "a" * 39 + ".b"]
    for run in runs:
        records = Records(store, run)
        assert records.turns("s") == ()
        records.publish(records.claim("s", "one"), turn(1))


def test_a_block_that_is_read_in_pieces_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(10_000)
    records = Records(Store(tmp_path), "grpo")
    records.publish(records.claim("s", "one"), turn(1, processes=data))
    # Linux gives 2 GiB at a time at most.
    read = os.read
    monkeypatch.setattr(os, "read", lambda handle, size: read(handle, min(size, 4096)))
    part = records.read("s").processes
    assert part is not None
    assert records.part(part) == data


def test_a_crash_at_any_operation_leaves_a_whole_record(tmp_path: Path) -> None:
    whole = FaultyDisk()
    three(Store(tmp_path / "count", disk=whole), [])
    assert whole.operations > 20
    for at in range(whole.operations):
        for power_loss in (False, True):
            root, kept = tmp_path / f"{at}{power_loss}", list[int]()
            disk = FaultyDisk(at)
            with pytest.raises(Crash):
                three(Store(root, disk=disk), kept)
            if power_loss:
                disk.lose_power()
            records = Records(Store(root, disk=FaultyDisk()), "grpo")
            there = records.turns("s")
            assert there[: len(kept)] == tuple(kept)
            assert len(there) <= len(kept) + 1  # its answer was lost, the record was not
            for number in there:
                record = records.read("s", number)
                assert record.files is not None
                assert record.processes is not None
                assert records.part(record.files) == bytes([number]) * 9000
                assert records.part(record.processes) == b"p" * number
                assert records.ids(record) == tuple(range(number * 10))


def test_a_full_disk_leaves_the_record_before_and_says_so(tmp_path: Path) -> None:
    store = Store(tmp_path)
    records = Records(store, "grpo")
    records.publish(records.claim("s", "one"), turn(1, files=b"a"))
    full = Records(Store(tmp_path, disk=FaultyDisk(0, full=True)), "grpo")
    with pytest.raises(StoreFailed, match="No space left"):
        full.claim("s", "two")
    assert records.turns("s") == (1,)


def test_a_host_whose_session_was_taken_over_publishes_nothing_more(tmp_path: Path) -> None:
    one, two = Records(Store(tmp_path), "grpo"), Records(Store(tmp_path), "grpo")
    lost = one.claim("s", "host-1")
    one.publish(lost, turn(1, files=b"a"))
    taken = two.claim("s", "host-2")
    assert taken.last is not None
    for stale in (
        lambda: one.check(lost),
        lambda: one.publish(lost, turn(2, files=b"b")),
        lambda: one.back(lost, 1),
        lambda: one.forget(lost),
    ):
        with pytest.raises(Fenced, match="host-2's under fence 2; this host had 1"):
            stale()
    assert two.publish(taken, turn(2)).owner == "host-2"
    assert two.turns("s") == (1, 2)


def test_two_hosts_of_one_name_are_told_apart_by_their_fences(tmp_path: Path) -> None:
    """``--owner`` is this machine's name by default, and two containers may have the same."""
    one, two = Records(Store(tmp_path), "grpo"), Records(Store(tmp_path), "grpo")
    first = one.claim("s", "node")
    one.publish(first, turn(1, files=b"a"))
    second = two.claim("s", "node", one.fence("s"))
    for stale in (
        lambda: one.check(first),
        lambda: one.publish(first, turn(2, files=b"b")),
        lambda: one.forget(first),
        lambda: one.claim("s", "node", first.fence),
    ):
        with pytest.raises(Fenced, match="node's under fence 2; this host had 1"):
            stale()
    assert (two.publish(second, turn(2)).fence, one.turns("s")) == (2, (1, 2))


def test_a_record_needs_only_the_pages_that_changed(tmp_path: Path) -> None:
    records = Records(Store(tmp_path), "grpo")
    owned = records.claim("s", "one")
    memory = os.urandom(1 << 20)
    records.publish(owned, turn(1, processes=memory))
    first = owned.written
    changed = memory[:8192] + os.urandom(4096) + memory[12288:]
    records.publish(owned, turn(2, processes=changed))
    assert owned.written - first < 16_384
    again = Records(Store(tmp_path), "grpo")
    taken = again.claim("s", "two")  # what lay where is read again after the loss of a host
    again.publish(taken, turn(3, processes=memory))
    assert taken.written < 16_384
    for number, data in ((1, memory), (2, changed), (3, memory)):
        part = again.read("s", number).processes
        assert part is not None
        assert again.part(part) == data


def test_a_long_chain_is_stored_whole_again(tmp_path: Path) -> None:
    records = Records(Store(tmp_path), "grpo")
    owned = records.claim("s", "one")
    memory = bytearray(os.urandom(64 * 4096))
    for number in range(1, 40):
        memory[(number * 4096) : (number * 4096) + 4] = os.urandom(4)
        record = records.publish(owned, turn(number, processes=bytes(memory)))
        assert record.processes is not None
        assert len(record.processes.packs) <= 17
        assert records.part(record.processes) == bytes(memory)


def test_going_back_leaves_later_turns_and_an_unknown_turn_is_named(tmp_path: Path) -> None:
    records = Records(Store(tmp_path), "grpo")
    kept = list[int]()
    three(Store(tmp_path), kept)
    owned = records.claim("s", "two")
    assert records.back(owned, 2).turn == 2
    assert records.turns("s") == (1, 2)
    with pytest.raises(UnknownVersion, match="no record of turn 3 of session s; there are: 1, 2"):
        records.back(owned, 3)
    with pytest.raises(UnknownVersion, match="there are: none"):
        records.read("nobody")


def test_a_fork_shares_its_parents_blocks_and_outlives_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    records = Records(store, "grpo")
    owned = records.claim("s", "one")
    record = records.publish(owned, turn(1, files=b"f" * 5000))
    child = records.claim("s-1", "one")
    made = records.adopt(child, record, ("s", 1))
    assert (made.parent, made.session) == (("s", 1), "s-1")
    records.forget(owned)
    sweep(store, grace_seconds=-1)
    assert made.files is not None
    assert records.part(made.files) == b"f" * 5000
    records.forget(child)
    assert sweep(store, grace_seconds=-1) > 0


def test_other_tokens_than_the_records_are_found_out(tmp_path: Path) -> None:
    records = Records(Store(tmp_path), "grpo")
    owned = records.claim("s", "one")
    one = records.publish(owned, turn(1))
    two = records.publish(owned, turn(2))
    assert one.tokens == digest_of(range(10))
    mixed = msgspec.structs.replace(one, ids=two.ids)
    with pytest.raises(Damaged, match="turn 1 of s is bound to other tokens"):
        records.ids(mixed)


def test_a_torn_record_is_found_by_its_name(tmp_path: Path) -> None:
    records = Records(Store(tmp_path), "grpo")
    records.publish(records.claim("s", "one"), turn(1, files=b"f"))
    for path in (tmp_path / "runs" / place_of("grpo", "s") / "manifests").iterdir():
        path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(Damaged, match="is not what the state lists"):
        records.read("s", 1)


def test_states_of_weights_are_kept_as_before() -> None:
    head = WeightVersion("grpo", 1, 0)
    data = states.encode(RunState("grpo", 1, "trainer", head=head))
    assert b"records" not in data
    assert states.decode(data, "here").recorded == ()
    assert (
        hashlib.sha256(data).hexdigest()
        == hashlib.sha256(states.encode(states.decode(data, ""))).hexdigest()
    )


def test_an_effect_is_durable_before_it_happens_and_outlives_going_back(tmp_path: Path) -> None:
    records = Records(Store(tmp_path), "grpo")
    owned = records.claim("s", "one")
    records.publish(owned, turn(1))
    records.publish(owned, turn(2))
    sent = OutsideEffect(3, "POST", "pay.example/orders")
    records.note(owned, sent)
    assert Records(Store(tmp_path), "grpo").claim("s", "two").last == records.read("s", 2)
    assert records.read("s").effects == (sent,)
    again = records.claim("s", "three")
    assert records.back(again, 1, (sent,)).effects == (sent,)
    with pytest.raises(Fenced):
        records.note(owned, sent)


def test_a_large_part_is_saved_and_read_with_little_of_it_in_memory(tmp_path: Path) -> None:
    size = 96 * 1024 * 1024
    made, back = tmp_path / "made", tmp_path / "back"
    with made.open("wb") as out:
        for _ in range(size // (1024 * 1024)):
            out.write(os.urandom(64) * 16384)
    records = Records(Store(tmp_path / "store"), "grpo")
    owned = records.claim("s", "one")
    tracemalloc.start()
    try:
        with mapped(made) as data:
            record = records.publish(owned, PublishedTurn(1, (1,), SPEC, data))
        owned.known.clear()  # where pages lie is an index, and no part of the part
        tracemalloc.reset_peak()
        assert record.files is not None
        records.part_into(record.files, back)
        read_peak = tracemalloc.get_traced_memory()[1]
        # A host that has lost its index reads the part before again, from a file too.
        with mapped(made) as data:
            again = records.publish(owned, PublishedTurn(2, (1,), SPEC, data))
    finally:
        tracemalloc.stop()
    assert read_peak < size / 2
    assert filecmp.cmp(made, back, shallow=False)
    assert again.files is not None
    assert again.files.packs == record.files.packs, "nothing of it is stored twice"


@pytest.mark.parametrize("gone", [True, False])
@pytest.mark.parametrize("back", [True, False])
def test_a_lost_block_that_is_found_while_the_part_before_is_read_is_made_up_for(
    tmp_path: Path, gone: bool, back: bool
) -> None:
    """Who took the session over, or went back, has no index and reads the part before again."""
    records = Records(Store(tmp_path), "grpo")
    first = records.claim("s", "one")
    records.publish(first, turn(1, files=b"f" * 9000, processes=b"p" * 9000))
    again = Records(Store(tmp_path), "grpo")
    owned = again.claim("s", "two")
    if back:
        again.back(owned, 1)
    assert owned.last is not None
    assert owned.last.processes is not None
    (name,) = owned.last.processes.packs.values()
    (path,) = tmp_path.glob(f"record-blocks/grpo/??/{name}")
    if gone:
        path.unlink()
    else:
        path.write_bytes(b"torn")
    whole = turn(2, files=b"F" * 9000, processes=b"P" * 9000)
    with pytest.raises(Incomplete if gone else Damaged):
        again.publish(owned, whole)
    assert owned.lost
    made = again.publish(owned, whole)
    assert made.processes is not None
    assert again.part(made.processes) == b"P" * 9000
    assert not owned.lost


def test_records_and_weights_are_swept_each_in_their_own_place(tmp_path: Path) -> None:
    store = Store(tmp_path)
    records = Records(store, "grpo")
    owned = records.claim("s", "one")
    record = records.publish(owned, turn(1, files=b"f" * 5000))
    assert record.files is not None
    (name,) = record.files.packs.values()
    astray = store.put_block(store.record_blocks("grpo").get(bytes.fromhex(name)))
    assert sweep(store, grace_seconds=-1) > 0
    assert store.blocks.missing([astray]) == [astray]
    assert records.part(record.files) == b"f" * 5000
    records.forget(owned)
    assert sweep(store, grace_seconds=-1) > 0
    assert not list(tmp_path.glob("record-blocks/grpo/??/*"))
