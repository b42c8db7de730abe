"""Two ranks and one commit: votes, verdicts, undo, and ranks that are late, wrong or gone."""

import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from rose_core.delta.bits import Bits
from rose_core.delta.safetensors import StoredTensor
from rose_core.identity import WeightVersion
from rose_dev.engine_testing import State, write_bundle
from rose_engines.errors import UnsupportedEngine
from rose_engines.tensors.canonical import HostTensor, Live
from rose_engines.tensors.slices import Box, SlicedTensor
from rose_engines.weights.calls import (
    Abort,
    Attest,
    Attested,
    Call,
    Commit,
    Committed,
    Export,
    Refused,
    Stage,
    Staged,
)
from rose_engines.weights.control import ControlServer
from rose_engines.weights.host_memory import HostMemory, Rows
from rose_engines.weights.live import digest_live
from rose_engines.weights.multi_rank import LeaderSession, MemberSession, RankSession
from rose_engines.weights.parts import Part, Ranks, check_parts, parts_of
from rose_engines.weights.rank_board import RankBoard, RankState

V0, V1, V2 = (WeightVersion("run", 1, n) for n in range(3))


def part(name: str, stored: StoredTensor, rank: int) -> SlicedTensor | HostTensor:
    """Columns of the down matrix, rows of the others; every rank holds vectors whole."""
    dtype, shape, bits = stored
    if len(shape) == 1:
        return HostTensor(name, dtype, shape, bits.copy())
    rows, columns = shape
    half = columns // 2 if "down" in name else rows // 2 * columns
    tall = rows if "down" in name else 1
    box = Box("p", rank * half, tall, half, columns if tall > 1 else half, 0, half)
    flat = HostTensor("p", dtype, (box.elements,), np.zeros(box.elements, bits.dtype))
    made = SlicedTensor(name, dtype, shape, (box,), flat)
    where, kept = made.own(slice(0, bits.size))
    made.put(where, bits[kept])
    return made


@dataclass
class Rank:
    """A rank's thread: a boundary, then the leader's broadcast, for ever."""

    session: RankSession
    live: Live
    inbox: "queue.Queue[bool]"
    labels: list[str] = field(default_factory=list)

    def run(self, broadcast: Callable[[], None] | None, ended: threading.Event) -> None:
        while not ended.is_set():
            self.session.on_boundary()
            if broadcast is not None:
                broadcast()
                ended.wait(0.001)
            elif not self.inbox.get():
                return


class Engine:
    def __init__(self, folder: Path, state: State) -> None:
        lives = [{n: part(n, s, rank) for n, s in state.items()} for rank in range(2)]
        parts = tuple(parts_of(live) for live in lives)
        check_parts(parts, {name: s[2].size for name, s in state.items()})
        sockets = tuple(folder / f"r{rank}" for rank in range(2))
        RankBoard.create(folder / "board", 2, len(state))
        barrier = threading.Barrier(2)
        self.ranks: list[Rank] = []
        self.servers: list[ControlServer] = []

        def join(rank: int) -> None:
            board = RankBoard(folder / "board", 2, list(state))
            ranks = Ranks(rank, board, parts, sockets, lambda: self.meet(barrier))
            labels: list[str] = []
            kind = LeaderSession if rank == 0 else MemberSession
            session = kind(lives[rank], str(V0), ranks, lambda label: self.note(labels, label))
            server = ControlServer(sockets[rank], session.handle)
            server.start()
            self.servers.append(server)
            self.ranks.append(Rank(session, lives[rank], queue.Queue(), labels))

        joining = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
        for thread in joining:
            thread.start()
        for thread in joining:
            thread.join(60)
        self.ranks.sort(key=lambda rank: rank.session.status().rank)
        self.ended = threading.Event()
        leader, member = self.ranks
        self.threads = [
            threading.Thread(
                target=leader.run, args=(lambda: member.inbox.put(True), self.ended), daemon=True
            ),
            threading.Thread(target=member.run, args=(None, self.ended), daemon=True),
        ]
        for running in self.threads:
            running.start()

    @staticmethod
    def meet(barrier: threading.Barrier) -> None:
        barrier.wait(60)

    @staticmethod
    def note(labels: list[str], label: str) -> int:
        labels.append(label)
        return 1

    def hurry(self, vote_seconds: float, undo_seconds: float = 30.0) -> None:
        ranks = self.leader._ranks
        self.leader._ranks = replace(ranks, vote_seconds=vote_seconds, undo_seconds=undo_seconds)

    @property
    def leader(self) -> RankSession:
        return self.ranks[0].session

    def commit(self, bundle: Path, version: WeightVersion) -> object:
        staged = self.leader.handle(Stage(str(bundle)))
        assert isinstance(staged, Staged)
        return self.leader.handle(Commit(str(version)))

    def holds(self, state: State) -> bool:
        return all(
            np.array_equal(rank.live[name].all_bits(), part(name, stored, number).all_bits())
            for number, rank in enumerate(self.ranks)
            for name, stored in state.items()
        )

    def end(self) -> None:
        self.ended.set()
        self.ranks[1].inbox.put(False)
        for thread in self.threads:
            thread.join(60)
        for server in self.servers:
            server.close()


@pytest.fixture
def engine(tmp_path: Path, old: State) -> Iterator[Engine]:
    made = Engine(tmp_path, old)
    yield made
    made.end()


@pytest.fixture
def bundle(tmp_path: Path, old: State, sparse: State) -> Path:
    write_bundle(tmp_path / "bundle", V1, sparse, (V0, old))
    return tmp_path / "bundle"


def test_all_ranks_change_at_one_boundary(
    engine: Engine, bundle: Path, tmp_path: Path, old: State, sparse: State
) -> None:
    committed = engine.commit(bundle, V1)
    assert isinstance(committed, Committed)
    write_bundle(tmp_path / "back", V2, old, (V1, sparse))
    assert isinstance(engine.commit(tmp_path / "back", V2), Committed)
    attested = engine.leader.handle(Attest())
    assert isinstance(attested, Attested)
    whole = {name: HostTensor(name, *stored) for name, stored in old.items()}
    assert attested.digest == str(digest_live(whole))
    assert engine.holds(old)
    for rank in engine.ranks:
        assert rank.labels == [str(V1), str(V2)]
        status = rank.session.status()
        assert (status.version, status.digest, status.commits) == (str(V2), attested.digest, 2)


def test_what_was_staged_is_let_go_of_beside_the_engine_on_every_rank(
    engine: Engine, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unlocking its memory takes a while, in which an engine's thread would not serve."""
    sessions = [rank.session for rank in engine.ranks]
    freed: list[threading.Thread] = []
    ask = engine.leader._ask  # type: ignore[attr-defined]

    def ask_after_the_boundary(rank: int, call: Call, seconds: float) -> object:
        if isinstance(call, Attest):
            before = sessions[1].iterations
            while sessions[1].iterations == before:
                engine.ended.wait(0.001)
        return ask(rank, call, seconds)

    monkeypatch.setattr(engine.leader, "_ask", ask_after_the_boundary)
    assert isinstance(engine.leader.handle(Stage(str(bundle))), Staged)
    for session in sessions:
        weakref.finalize(session._staged, lambda: freed.append(threading.current_thread()))
    assert isinstance(engine.leader.handle(Commit(str(V1))), Committed)
    assert len(freed) == 2
    assert not set(freed) & set(engine.threads)


def test_a_damaged_bundle_is_refused_by_the_rank_that_reads_the_damage(
    engine: Engine, bundle: Path, old: State, flip: Callable[[Path], None]
) -> None:
    for block in (bundle / "blocks").iterdir():
        flip(block)
    refused = engine.leader.handle(Stage(str(bundle)))
    assert isinstance(refused, Refused)
    assert refused.reason == "Corrupt"
    assert engine.holds(old)
    assert engine.leader.status().phase == "Idle"


def test_a_rank_that_lost_what_it_staged_makes_all_undo(
    engine: Engine, bundle: Path, old: State
) -> None:
    engine.leader.handle(Stage(str(bundle)))
    engine.ranks[1].session.handle(Abort())
    refused = engine.leader.handle(Commit(str(V1)))
    assert isinstance(refused, Refused)
    assert refused.reason == "RankFailed"
    assert engine.holds(old)
    assert [rank.labels for rank in engine.ranks] == [[], []]
    assert isinstance(engine.commit(bundle, V1), Committed)


def test_a_wrong_element_on_one_rank_makes_all_undo(
    engine: Engine, bundle: Path, old: State, sparse: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    swap, spoiled = HostMemory.swap, list[bool]()

    def spoil(memory: HostMemory, width: int, rows: Rows, places: Bits, bits: Bits) -> str | None:
        if memory is not engine.ranks[1].session._host or spoiled:
            return swap(memory, width, rows, places, bits)
        spoiled.append(True)
        swap(memory, width, rows, places, bits ^ 1)
        return "a.down_proj.weight"

    monkeypatch.setattr(HostMemory, "swap", spoil)
    refused = engine.commit(bundle, V1)
    assert isinstance(refused, Refused)
    assert refused.reason == "RankFailed"
    assert engine.holds(old)
    monkeypatch.undo()
    assert isinstance(engine.commit(bundle, V1), Committed)
    assert engine.holds(sparse)


def test_what_no_rank_could_see_while_swapping_breaks_the_engine(
    engine: Engine, bundle: Path
) -> None:
    """An element that nobody wrote has changed: the digests of all ranks tell afterwards."""
    staged = engine.leader.handle(Stage(str(bundle)))
    assert isinstance(staged, Staged)
    weights = engine.ranks[1].live["a.norm.weight"]
    weights.put(slice(0, 1), weights.take(slice(0, 1)) ^ 1)
    refused = engine.leader.handle(Commit(str(V1)))
    assert isinstance(refused, Refused)
    assert refused.reason == "Broken"
    assert "different copies of a.norm.weight" in refused.message


def test_copies_that_differ_are_named(engine: Engine, old: State) -> None:
    norm = engine.ranks[1].live["a.norm.weight"]
    norm.put(slice(0, 1), norm.take(slice(0, 1)) ^ 1)
    refused = engine.leader.handle(Attest())
    assert isinstance(refused, Refused)
    assert "ranks 0 and 1 hold different copies of a.norm.weight" in refused.message


def test_a_rank_that_votes_late_makes_all_undo_and_comes_back(
    engine: Engine, bundle: Path, old: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.hurry(vote_seconds=0.05)
    may_vote = threading.Event()
    member = engine.ranks[1].session
    post = member._post

    def late(vote: RankState) -> None:
        if vote is RankState.SCATTERED:
            may_vote.wait(60)
        post(vote)

    monkeypatch.setattr(member, "_post", late)
    threading.Timer(0.5, may_vote.set).start()
    refused = engine.commit(bundle, V1)
    assert isinstance(refused, Refused)
    assert refused.reason == "RankLate"
    assert engine.holds(old)
    monkeypatch.undo()
    engine.hurry(vote_seconds=10.0)
    assert isinstance(engine.commit(bundle, V1), Committed)


def test_a_rank_that_never_answers_ends_the_engine(
    engine: Engine, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.hurry(vote_seconds=0.05, undo_seconds=0.05)
    member, never = engine.ranks[1].session, threading.Event()
    monkeypatch.setattr(member, "_scatter", lambda _: never.wait(60))
    refused = engine.commit(bundle, V1)
    assert isinstance(refused, Refused)
    assert refused.reason == "Broken"
    assert engine.leader.broken
    never.set()


def test_a_withdrawn_commit_does_not_come_late(engine: Engine, bundle: Path, old: State) -> None:
    for _ in range(20):
        engine.leader.handle(Stage(str(bundle)))
        answer = engine.leader.handle(Commit(str(V1), timeout_seconds=0.001))
        attested = engine.leader.handle(Attest())
        assert isinstance(attested, Attested)
        assert attested.version == (str(V1) if isinstance(answer, Committed) else str(V0))
        if isinstance(answer, Committed):
            break
    assert {rank.session.version for rank in engine.ranks} == {engine.leader.version}


def test_a_rank_that_is_gone_refuses_the_stage(engine: Engine, bundle: Path, old: State) -> None:
    engine.servers.sort(key=lambda server: str(server._path))
    engine.servers[1].close()
    refused = engine.leader.handle(Stage(str(bundle)))
    assert isinstance(refused, Refused)
    assert refused.reason == "RankLate"
    assert engine.leader.status().phase == "Idle"


@pytest.mark.parametrize("call", [Commit(str(V1)), Export("/x")])
def test_members_take_no_decisions(engine: Engine, call: Call) -> None:
    refused = engine.ranks[1].session.handle(call)
    assert isinstance(refused, Refused)
    assert refused.reason == "NotLeader"
    refused = engine.leader.handle(Export("/x"))
    assert isinstance(refused, Refused)
    assert refused.reason == "Unsupported"


@pytest.mark.parametrize(
    "parts",
    [
        [((0, 1, 4, 4),), ()],  # half of it
        [((0, 1, 8, 8),), ((0, 1, 4, 4),)],  # half of it twice
    ],
)
def test_ranks_that_do_not_make_up_a_tensor_are_refused(parts: list[Part]) -> None:
    with pytest.raises(UnsupportedEngine, match=r"elements of checkpoint tensor 'w', which has 8"):
        check_parts([{"w": one} for one in parts], {"w": 8})
