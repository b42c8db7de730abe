"""The plugin's boundary on an engine core that only looks like vLLM's."""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from rose_engines.node.gate import PermitGate
from rose_engines.node.permit import Permit
from rose_engines.vllm.plugin import CorePlugin
from rose_engines.weights.session import WeightSession
from tests.engines.test_plugin import Slow


@dataclass
class Request:
    """The attributes of one that the plugin reads and writes."""

    cache_salt: str | None = None
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    block_hashes: list[str] = field(default_factory=lambda: ["old"])

    def update_block_hashes(self) -> None:
        self.block_hashes.append(str(self.cache_salt))


class Core:
    """The attributes that a boundary reads."""

    def __init__(self) -> None:
        self.input_queue: queue.Queue[object] = queue.Queue()
        self.scheduler = SimpleNamespace(max_num_scheduled_tokens=512, running=[], requests={})
        self.labels: list[str] = []
        sizes = SimpleNamespace(max_num_seqs=4)
        self.vllm_config = SimpleNamespace(scheduler_config=sizes)
        self.running = True

    def is_running(self) -> bool:
        return self.running

    def set_weight_version(self, version: str) -> None:
        self.labels.append(version)


@pytest.fixture
def permit(tmp_path: Path) -> Permit:
    made = Permit.create(tmp_path / "permit")
    made.extend(time.monotonic_ns() + 9_000_000_000)
    return made


@pytest.fixture
def plugin(permit: Permit, tmp_path: Path) -> CorePlugin:
    """Started already: what it reads of a real core is read in real ones."""
    made = CorePlugin(tmp_path / "permit", None)
    made._gate = PermitGate(tmp_path / "permit")
    made._started = True
    made._own_chunk = 512
    return made


def test_no_iteration_begins_under_a_permit_that_lapsed_at_its_boundary(
    plugin: CorePlugin, permit: Permit
) -> None:
    session = plugin._session = Slow(permit)
    opened = plugin.around_step(lambda: permit.until_ns > 0, Core())
    assert opened
    assert session.iterations == 2


def test_an_engine_that_is_told_to_end_under_a_closed_permit_computes_nothing(
    plugin: CorePlugin, permit: Permit
) -> None:
    permit.close_now()
    core = Core()
    core.running = False

    def compute() -> bool:
        pytest.fail("computed")

    assert not plugin.around_step(compute, core)


def test_a_commit_gives_every_request_without_kv_the_key_of_the_new_weights(
    plugin: CorePlugin,
) -> None:
    """One that waits, or lost its KV, must find nothing that the old weights computed."""
    session = plugin._session = WeightSession({}, "old")
    core = Core()
    running = Request("a", num_computed_tokens=9, num_output_tokens=4)
    preempted, waiting = Request("b", num_output_tokens=2), Request()
    for number, request in enumerate((running, preempted, waiting)):
        plugin.around_add(lambda: None, core, request)
        core.scheduler.requests[str(number)] = request
    assert [one.block_hashes for one in (running, preempted, waiting)] == [
        ["a\nold#0"],
        ["b\nold#0"],
        ["\nold#0"],
    ]
    core.scheduler.running.append(running)
    session._version, session._commits = "new", 1
    assert plugin._set_label(core, "new") == 2
    assert core.labels == ["new"]
    assert running.block_hashes == ["a\nold#0"]
    assert preempted.block_hashes == ["b\nnew#1"]
    assert waiting.block_hashes == ["\nnew#1"]


@pytest.mark.parametrize(("divisor", "chunk"), [(1, 512), (4, 128), (1000, 4)])
def test_prefill_chunks_are_divided_by_what_the_permit_says(
    plugin: CorePlugin, permit: Permit, divisor: int, chunk: int
) -> None:
    """Each request that runs has its token in any case."""
    permit.divide_chunks(divisor)
    core = Core()
    assert plugin.around_step(lambda: True, core)
    assert core.scheduler.max_num_scheduled_tokens == chunk
