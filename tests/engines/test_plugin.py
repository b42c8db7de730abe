"""The plugin's hooks on a scheduler that only looks like SGLang's."""

import os
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rose_core.delta.safetensors import StoredTensor
from rose_core.identity import WeightVersion
from rose_dev.engine_testing import write_bundle
from rose_engines.errors import UnsupportedEngine
from rose_engines.node.permit import Permit
from rose_engines.process.launch import PERMIT_VARIABLE, SOCKET_VARIABLE
from rose_engines.sglang import loading, plugin, retraction
from rose_engines.sglang.arguments import FALLBACK_VARIABLE
from rose_engines.sglang.checkpoints import Checkpoints
from rose_engines.sglang.plugin import SchedulerPlugin
from rose_engines.tensors.safetensors import read_checkpoint
from rose_engines.weights.calls import Commit, Stage
from rose_engines.weights.control import ControlClient
from rose_engines.weights.session import WeightSession

SCHEDULER = "sglang.srt.managers.scheduler"
REGISTRY = "sglang.srt.plugins.hook_registry"
SILENT = Checkpoints(None, None)


@dataclass
class Request:
    extra_key: str | None = None
    output_ids: list[int] = field(default_factory=list)

    __hash__ = object.__hash__


class Model(torch.nn.Module):
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.inner = torch.nn.ParameterDict(
            {name: torch.nn.Parameter(tensor.clone()) for name, tensor in tensors.items()}
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.inner[name].data.copy_(tensor)

    def named_parameters(self, *_: object, **__: object) -> Iterator[tuple[str, Any]]:
        return ((name.removeprefix("inner."), p) for name, p in super().named_parameters())


class Scheduler:
    """The attributes the plugin reads."""

    tp_size = 1
    enable_overlap = False
    idle_sleeper = None
    chunked_req = None
    page_size = 1
    chunked_prefill_size: int | None = 480

    def __init__(self, folder: Path) -> None:
        tensors = {"norm": torch.arange(64).to(torch.bfloat16)}
        save_file(tensors, folder / "model.safetensors")
        self.server_args = types.SimpleNamespace(
            model_path=str(folder), weight_version="base", device="cpu"
        )
        runner = types.SimpleNamespace(model=Model(tensors))
        self.tp_worker = types.SimpleNamespace(model_runner=runner)
        self.running: list[Request] = []
        self.waiting_queue: list[Request] = []
        self.labels: list[str] = []
        self.grammar_manager = types.SimpleNamespace(grammar_queue=list[Request]())

    def collect_inflight_reqs(self) -> set[Request]:
        return set(self.running)

    def record_weight_version_change(self, new_version: str) -> None:
        self.labels.append(new_version)

    def ingest_requests(self) -> None: ...

    def handle_generate_request(self) -> None: ...

    def pause_generation(self) -> None: ...

    def continue_generation(self) -> None: ...

    def abort_request(self) -> None: ...

    def flush_cache(self) -> None: ...


@pytest.fixture
def scheduler(tmp_path: Path) -> Scheduler:
    (tmp_path / "model").mkdir()
    return Scheduler(tmp_path / "model")


Hooks = list[tuple[str, Callable[..., Any], str]]


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Hooks:
    """SGLang's plugin registry and scheduler module, as far as the plugin looks."""
    placed: Hooks = []
    streamer, _, _ = plugin.STREAM_ACCEPT.rpartition("._")
    packages = ("sglang", "sglang.srt", "sglang.srt.plugins", "sglang.srt.managers")
    for name in (*packages, streamer.rpartition(".")[0]):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    registry = types.ModuleType(REGISTRY)
    registry.HookRegistry = types.SimpleNamespace(  # type: ignore[attr-defined]
        register=lambda *hook: placed.append(hook)
    )
    registry.HookType = types.SimpleNamespace(BEFORE="before", AROUND="around")  # type: ignore[attr-defined]
    module = types.ModuleType(SCHEDULER)
    module.Scheduler = Scheduler  # type: ignore[attr-defined]
    output = types.ModuleType(streamer)
    accumulator = types.SimpleNamespace(accept=lambda: None)
    output._GenerationStreamAccumulator = accumulator  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, streamer, output)
    replies, _, reported = plugin.REPLY_VERSIONS.rpartition(".")
    writing = types.ModuleType(replies)
    setattr(writing, reported, lambda *_: None)
    for name in (replies.rpartition(".")[0], replies):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, replies, writing)
    monkeypatch.setitem(sys.modules, REGISTRY, registry)
    monkeypatch.setitem(sys.modules, SCHEDULER, module)
    monkeypatch.setattr(plugin, "_registered", [])
    for name in (PERMIT_VARIABLE, SOCKET_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    return placed


def test_without_permit_and_socket_nothing_is_hooked(hooks: Hooks) -> None:
    plugin.register()
    assert hooks == []
    assert not plugin.registered()


def test_registering_places_exactly_these_hooks(
    hooks: Hooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PERMIT_VARIABLE, "/permit")
    plugin.register()
    assert [(target, kind) for target, _, kind in hooks] == [
        (plugin.BOUNDARY, "before"),
        (plugin.ADMISSION, "before"),
        (retraction.ABORT, "before"),
        (plugin.STREAM_ACCEPT, "around"),
        (plugin.REPLY_VERSIONS, "before"),
    ]
    assert plugin.registered()


@pytest.mark.parametrize("name", ["ingest_requests", "record_weight_version_change"])
def test_other_builds_are_refused_by_name(
    hooks: Hooks,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    monkeypatch.setenv(PERMIT_VARIABLE, "/permit")
    monkeypatch.delattr(Scheduler, name)
    with pytest.raises(SystemExit):
        plugin.register()
    assert name in capsys.readouterr().err
    assert hooks == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("pp_size", "pp_size 2 is not supported"),
        ("dp_size", "dp_size 2 is not supported"),
        ("enable_overlap", "--disable-overlap-schedule"),
    ],
)
def test_an_engine_with_an_unsupported_setting_ends_and_prints_it(
    tmp_path: Path,
    scheduler: Scheduler,
    capsys: pytest.CaptureFixture[str],
    change: str,
    reason: str,
) -> None:
    vars(scheduler)[change] = True
    vars(scheduler.server_args)[change] = 2
    with pytest.raises(UnsupportedEngine):
        SchedulerPlugin(None, tmp_path / "s", SILENT).before_iteration(scheduler)
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("divisor", "page", "chunk"),
    [(1, 1, 480), (4, 1, 120), (4, 16, 112), (64, 16, 16)],
    ids=["whole", "short", "whole pages", "never nothing"],
)
def test_an_iteration_prefills_what_the_permit_allows(
    scheduler: Scheduler, tmp_path: Path, divisor: int, page: int, chunk: int
) -> None:
    permit = Permit.create(tmp_path / "permit")
    permit.divide_chunks(divisor)
    permit.extend(time.monotonic_ns() + 9_000_000_000)
    scheduler.page_size = page
    made = SchedulerPlugin(tmp_path / "permit", None, SILENT)
    for _ in range(2):
        made.before_iteration(scheduler)
        assert scheduler.chunked_prefill_size == chunk
    permit.divide_chunks(1)
    made.before_iteration(scheduler)
    assert scheduler.chunked_prefill_size == 480


class Slow(WeightSession):
    """A boundary that takes long: the permit lapses meanwhile, and is given again later."""

    def __init__(self, permit: Permit) -> None:
        super().__init__({}, "base")
        self.permit = permit
        self.given: threading.Timer | None = None

    def on_boundary(self) -> None:
        super().on_boundary()
        if self.given is None:
            self.permit.close_now()
            until = time.monotonic_ns() + 9_000_000_000
            self.given = threading.Timer(0.05, lambda: self.permit.extend(until))
            self.given.start()


def test_no_iteration_begins_under_a_permit_that_lapsed_at_its_boundary(
    scheduler: Scheduler, tmp_path: Path
) -> None:
    permit = Permit.create(tmp_path / "permit")
    permit.extend(time.monotonic_ns() + 9_000_000_000)
    made = SchedulerPlugin(tmp_path / "permit", None, SILENT)
    made.before_iteration(scheduler)
    session = made._session = Slow(permit)
    made._wake = os.eventfd(0, os.EFD_NONBLOCK)
    made.before_iteration(scheduler)
    assert permit.until_ns > 0
    assert session.iterations == 2


def test_no_permit_no_engine(
    tmp_path: Path, scheduler: Scheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(FileNotFoundError):
        SchedulerPlugin(tmp_path / "permit", None, SILENT).before_iteration(scheduler)
    assert "permit" in capsys.readouterr().err


async def test_commit_moves_labels_and_cache_keys(tmp_path: Path, scheduler: Scheduler) -> None:
    """Running requests keep their key, waiting and new ones get the new weights' key."""
    hooks = SchedulerPlugin(None, tmp_path / "plugin.sock", SILENT)
    hooks.before_iteration(scheduler)
    running, waiting, compiling = Request("lora"), Request(), Request()
    for request in (running, waiting, compiling):
        hooks.before_request(scheduler, request)
    assert running.extra_key == "lora\nbase#0"
    running.output_ids = [1, 2, 3]
    scheduler.running, scheduler.waiting_queue = [running], [waiting]
    scheduler.grammar_manager.grammar_queue = [compiling]

    old = read_checkpoint(tmp_path / "model")
    new = {name: StoredTensor(dtype, shape, bits ^ 1) for name, (dtype, shape, bits) in old.items()}
    versions = [WeightVersion("run", 1, n) for n in range(2)]
    write_bundle(tmp_path / "bundle", versions[1], new, (versions[0], old))
    session = hooks._session
    assert session is not None
    session.handle(Stage(str(tmp_path / "bundle")))
    orders: list[object] = []
    thread = threading.Thread(
        target=lambda: orders.append(session.handle(Commit("run@1.1"))), daemon=True
    )
    thread.start()
    while thread.is_alive():
        hooks.before_iteration(scheduler)
    assert scheduler.labels == ["run@1.1"]
    assert running.extra_key == "lora\nbase#0"
    assert waiting.extra_key == compiling.extra_key == "\nrun@1.1#1"
    late = Request("lora")
    hooks.before_request(scheduler, late)
    assert late.extra_key == "lora\nrun@1.1#1"

    async with await ControlClient.connect(tmp_path / "plugin.sock") as control:
        status = await control.status()
        assert (status.version, status.commits, status.permit_open) == ("run@1.1", 1, None)
    parameter = dict(scheduler.tp_worker.model_runner.model.named_parameters())["norm"]
    expected = torch.arange(64).to(torch.bfloat16).view(torch.int16) ^ 1
    assert torch.equal(parameter.detach().view(torch.int16), expected)


def test_nothing_is_shared_of_weights_that_nobody_has_confirmed(
    tmp_path: Path, scheduler: Scheduler
) -> None:
    hooks = SchedulerPlugin(None, tmp_path / "plugin.sock", SILENT)
    hooks.before_iteration(scheduler)
    hooks._stores = True
    request = Request("turn")
    session = hooks._session
    assert isinstance(session, WeightSession)
    hooks.before_request(scheduler, request)
    key = request.extra_key or ""
    assert key == f"turn\nbase@{session.digest}"
    assert hooks.shares(key)
    session._confirmed = False
    assert not hooks.shares(key)


def test_a_refused_layout_says_how_to_fall_back_and_does_when_told(
    tmp_path: Path,
    scheduler: Scheduler,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*_: object) -> None:
        raise UnsupportedEngine("loader computes 'norm'")

    monkeypatch.setattr(loading, "read_live", refuse)
    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)
    with pytest.raises(UnsupportedEngine, match="ROSE_LAYOUT_FALLBACK=disk"):
        SchedulerPlugin(None, tmp_path / "s", SILENT).before_iteration(scheduler)
    assert "loader computes 'norm'" in capsys.readouterr().err
    monkeypatch.setenv(FALLBACK_VARIABLE, "disk")
    with pytest.raises(UnsupportedEngine, match="no update_weights_from_disk"):
        SchedulerPlugin(None, tmp_path / "s", SILENT).before_iteration(scheduler)
    updater = types.SimpleNamespace(update_weights_from_disk=lambda _: None)
    scheduler.weight_updater = updater  # type: ignore[attr-defined]
    hooks = SchedulerPlugin(None, tmp_path / "s", SILENT)
    hooks.before_iteration(scheduler)
    assert isinstance(hooks._session, WeightSession)
    assert hooks._session.status().attests == "Copy"
