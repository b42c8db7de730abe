"""Real engines for tests: stock SGLang on CPU with a tiny model, ROSE's plugin inside.

``real_engine`` is shared by every test that is marked ``engine``: whoever closes its permit opens
it again, and nobody counts on a certain weight version (a full bundle can always be committed).
``start_engine`` gives a test an engine of its own, for half a minute of its time.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from rose_core.delta.build import Builder, TensorSpec, table
from rose_core.delta.codec import name_of
from rose_core.delta.manifest import Manifest
from rose_core.delta.safetensors import StoredTensor
from rose_core.identity import WeightVersion
from rose_core.rollouts.engines.kv_store import KvPoolSpec
from rose_core.wire.sync import EngineSpec
from rose_dev.engine_environment import engine_python, is_ready
from rose_dev.engine_template import (
    ROSE,
    SGLANG,
    Channel,
    ProcessHandle,
    Stock,
    Template,
    join,
)
from rose_dev.lanes import wanted
from rose_dev.models import Recipe, make_model, make_named, tensors
from rose_dev.shell import ending_with_us
from rose_engines.node.permit import Permit
from rose_engines.process.launch import Launch
from rose_engines.sglang.arguments import command, environment
from rose_wire.ports import free_port

READY_SECONDS = 240.0
_SHARED = "ROSE_TEMPLATE_OF_"
_ANY = Launch(python=Path(), model=Path(), port=0, plugin_socket=Path())
"""What no import of SGLang depends on."""


class PermitHolder:
    """Plays the guard: keeps a permit open by extending it, until told to stop."""

    def __init__(self, path: Path) -> None:
        self.permit = Permit.create(path)
        self._open = threading.Event()
        self._end = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def open(self) -> None:
        """Allow computing from now on."""
        self._open.set()
        self._extend()

    def close(self) -> None:
        """Forbid computing at once."""
        with self._lock:
            self._open.clear()
            self.permit.close_now()

    def end(self) -> None:
        """Close and stop extending for good."""
        self.close()
        self._end.set()
        self._thread.join(10)

    def _extend(self) -> None:
        with self._lock:
            if self._open.is_set():
                # Longer than in production: a test machine may stall this thread.
                self.permit.extend(time.monotonic_ns() + 5_000_000_000)

    def _run(self) -> None:
        while not self._end.wait(0.5):
            self._extend()


@dataclass
class RealEngine:
    """A running SGLang or vLLM.

    Attributes:
        folder: its run folder: permit, plugin.sock, engine.log.
    """

    url: str
    model: Path
    folder: Path
    process: ProcessHandle
    holder: PermitHolder = field(repr=False)

    @property
    def control(self) -> Path:
        """Control socket of the plugin."""
        return self.folder / "plugin.sock"

    def log_tail(self) -> str:
        """End of the engine's log, for messages of failing tests."""
        return (self.folder / "engine.log").read_text(errors="replace")[-4000:]


@contextmanager
def start_engine(
    folder: Path,
    model: str | Recipe | Path = "tiny-peaked",
    spec: EngineSpec | None = None,
    version: str = "base",
    *,
    opened: bool = True,
    ranks: int = 1,
    device: str = "cpu",
    python: Path | None = None,
    more: Sequence[str] = (),
    apart: bool = False,
    program: Path | None = None,
    kv_store: Path | None = None,
    kv_pool: KvPoolSpec | None = None,
) -> Iterator[RealEngine]:
    """Start SGLang under a permit that is held open; end its whole process group afterwards.

    Args:
        folder: where permit, control socket and log go.
        model: a name in ``rose_dev.models.RECIPES``, a recipe, or a folder.
        spec: the engine's specification; small sizes by default.
        version: weight label at the start.
        opened: False starts the engine under a closed permit, as the engine host does.
        ranks: tensor-parallel ranks.
        device: ``cpu`` or ``cuda``.
        python: of the environment that has SGLang; None = the one that ``make engine`` sets up.
        more: further arguments of SGLang.
        apart: import SGLang anew, as in production: in this network namespace and its own memory.
        program: a test's own, in the place of ROSE's launcher, which it has to run.
        kv_store: folder of keys that it shares with others; None = none.
        kv_pool: where engines of other nodes find its keys; None = nowhere.
    """
    spec, launch, holder = prepare(
        *(folder, model, spec, version, python or engine_python()),
        opened=opened,
        kv_store=kv_store,
    )
    launch = replace(launch, device=device, ranks=ranks, kv_pool=kv_pool)
    line, variables = [*command(spec, launch), *more], environment(launch, os.environ)
    alone = apart or device != "cpu" or python is not None
    with (folder / "engine.log").open("wb") as log:
        process: ProcessHandle
        if alone:
            line = [line[0], str(program), *line[3:]] if program else line
            process = start_program(line, variables, log.fileno())
        else:
            process = fork_or_start(SGLANG, line, variables, log.fileno(), program)
    with until_ended(folder, launch, process, holder) as engine:
        yield engine


def start_beside_engines(
    program: Path, argv: Sequence[str], log: Path, ranks: int = 1
) -> ProcessHandle:
    """A test's program where SGLang has been imported, and no plugin of ROSE's.

    Args:
        program: a file.
        argv: its arguments.
        log: a new file for its output.
        ranks: of which it is one.
    """
    python, folder = engine_python(), log.parent
    launch = Launch(python=python, model=folder, port=0, plugin_socket=folder, ranks=ranks)
    variables = environment(launch, os.environ) | {"SGLANG_PLUGINS": "none"}
    line = [str(python), "-m", SGLANG.launcher, *argv]
    with log.open("wb") as file:
        return fork_or_start(SGLANG, line, variables, file.fileno(), program)


def ended_well(processes: Mapping[Path, ProcessHandle], seconds: float) -> None:
    """Wait for the end of programs, none of which fails; none is left.

    Args:
        processes: by their logs.
        seconds: for each of them.
    """
    try:
        for log, process in processes.items():
            if process.wait(seconds):
                pytest.fail(log.read_text(errors="replace")[-4000:])
    finally:
        for process in processes.values():
            if process.poll() is None:
                _end_group(process)


def prepare(
    folder: Path,
    model: str | Recipe | Path,
    spec: EngineSpec | None,
    version: str,
    python: Path,
    *,
    opened: bool,
    kv_store: Path | None = None,
) -> tuple[EngineSpec, Launch, PermitHolder]:
    """What an engine of either kind is started with; ``start_engine`` says what the words mean."""
    if isinstance(model, Path):
        path = model
    else:
        path = make_named(model) if isinstance(model, str) else make_model(model)
    holder = PermitHolder(folder / "permit")
    if opened:
        holder.open()
    name = model if isinstance(model, str) else model.name
    spec = spec or EngineSpec(engine_class="test", model=name, kv_tokens=8192, max_running=4)
    launch = Launch(
        python=python,
        model=path,
        port=free_port(),
        version=version,
        permit=folder / "permit",
        plugin_socket=folder / "plugin.sock",
        kv_policy=spec.kv_policy,
        adapter=spec.adapter,
        drafts=spec.drafts,
        kv_store=kv_store,
        kv_store_bytes=spec.kv_store_bytes,
    )
    return spec, launch, holder


def start_program(
    line: Sequence[str], variables: Mapping[str, str], log: int
) -> subprocess.Popen[bytes]:
    """An engine in a session of its own, its output in an open file."""
    # A test that is killed ends nothing: its engine goes with it.
    return subprocess.Popen(
        ending_with_us(line),
        env=variables,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


@contextmanager
def until_ended(
    folder: Path, launch: Launch, process: ProcessHandle, holder: PermitHolder
) -> Iterator[RealEngine]:
    """Wait until it is ready; end its whole process group, and its permit, afterwards."""
    url = f"http://127.0.0.1:{launch.port}"
    engine = RealEngine(url, launch.model, folder, process, holder)
    try:
        _wait_ready(engine)
        yield engine
    finally:
        _end_group(process)
        holder.end()


_templates: dict[Stock, Channel] = {}
_making = threading.Lock()


def fork_or_start(
    stock: Stock,
    line: Sequence[str],
    variables: Mapping[str, str],
    log: int,
    program: Path | None = None,
) -> ProcessHandle:
    """An engine of the session's template, or a new one where its environment is another.

    Args:
        stock: which engine.
        line: Python, ``-m``, ROSE's launcher, and the engine's arguments.
        variables: its whole environment.
        log: open file of its output.
        program: in the launcher's place.
    """
    python, option, module, *argv = line
    if (option, module) != ("-m", stock.launcher):
        message = f"the template runs -m {stock.launcher}, not: {python} {option} {module}"
        raise ValueError(message)
    template = template_of(stock, Path(python), variables)
    if template is not None:
        return template.start(argv, variables, log, program)
    return start_program([python, str(program), *argv] if program else line, variables, log)


def template_of(
    stock: Stock,
    python: Path,
    variables: Mapping[str, str],
    first: Mapping[str, str] | None = None,
) -> Channel | None:
    """The session's template, made by its first engine; None where another environment is asked.

    Args:
        stock: which engine.
        python: of its environment.
        variables: the whole environment of what is to be forked.
        first: with which the template is made; None = with those.
    """
    with _making:
        made = _templates.get(stock)
        if made is None or not made.alive():
            made = _shared(stock) or Template(python, first or variables, stock)
            _templates[stock] = made
            atexit.register(made.close)
        return made if made.fits(variables) else None


def _shared(stock: Stock) -> Channel | None:
    """The template of the lane whose worker this is."""
    at = os.environ.get(_SHARED + stock.title.upper())
    if at is not None:
        with suppress(OSError):  # it has ended
            return join(Path(at), _environment(stock), stock)
    return None


def _environment(stock: Stock) -> Mapping[str, str]:
    """Under which a lane's template imports."""
    return environment(_ANY, os.environ) if stock is SGLANG else os.environ


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Begin the imports before the workers of a lane, which share them."""
    config = session.config
    if not getattr(config.option, "numprocesses", 0) or hasattr(config, "workerinput"):
        return
    _share(config, ROSE, Path(sys.executable))
    asked = wanted(config.getoption("markexpr") or "")
    if "engine" in asked and "cluster" not in asked and is_ready():
        _share(config, SGLANG, engine_python())


def _share(config: pytest.Config, stock: Stock, python: Path) -> None:
    at = Path(tempfile.mkdtemp(prefix="rose", dir="/tmp")) / "template"
    made = Template(python, _environment(stock), stock, at=at)
    os.environ[_SHARED + stock.title.upper()] = str(at)

    def end() -> None:
        del os.environ[_SHARED + stock.title.upper()]
        made.close()
        shutil.rmtree(at.parent, ignore_errors=True)

    config.add_cleanup(end)


def _wait_ready(engine: RealEngine) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        if engine.process.poll() is not None:
            pytest.fail(f"engine ended with {engine.process.returncode}:\n{engine.log_tail()}")
        if engine.control.exists() and _answers(f"{engine.url}/ready"):
            return
        time.sleep(0.25)
    pytest.fail(f"engine not ready after {READY_SECONDS} s:\n{engine.log_tail()}")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:  # noqa: S310  # http to this machine
            return bool(reply.status == 200)
    except OSError:  # refused while starting; 503 is one too
        return False


def _end_group(process: ProcessHandle) -> None:
    """Kill the engine's own session: launcher, scheduler, detokenizer."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)


State = dict[str, StoredTensor]


def state_of(recipe: Recipe) -> State:
    """A small model's tensors as the weight format sees them: dtype word, shape, flat bits."""
    import torch  # noqa: PLC0415  # slow to import, and most tests need none

    return {
        name: StoredTensor(
            "BF16",
            tuple(tensor.shape),
            tensor.view(torch.int16).numpy().view(np.uint16).ravel(),
        )
        for name, tensor in tensors(recipe).items()
    }


def write_bundle(
    folder: Path,
    target: WeightVersion,
    new: State,
    base: tuple[WeightVersion, State] | None = None,
) -> Manifest:
    """Write a bundle that an engine can stage; full when no base is given."""
    blocks = folder / "blocks"
    blocks.mkdir(parents=True)

    def keep(block: bytes) -> None:
        (blocks / name_of(block).hex()).write_bytes(block)

    entries = table(TensorSpec(name, *parts[:2]) for name, parts in new.items())
    before = None
    if base is not None:
        bare = Builder(entries, None, keep)
        for name in new:
            bare.add(None, base[1][name][2], blocks=False)
        before = bare.finish(base[0])
    builder = Builder(entries, before, keep)
    for name, (_, _, bits) in new.items():
        builder.add(base[1][name][2] if base is not None else None, bits)
    manifest = builder.finish(target)
    (folder / "manifest.msgpack").write_bytes(manifest.encode())
    return manifest


@pytest.fixture(scope="session")
def real_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    """One SGLang with the tiny peaked model, shared by the whole run."""
    if not is_ready():
        pytest.fail("no engine environment; run `make engine`")
    with start_engine(tmp_path_factory.mktemp("engine")) as engine:
        yield engine
