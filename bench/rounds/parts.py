"""A lease without a cluster: store, router, and a dedicated engine with its weight-sync.

Every process is the product's own command; nothing is borrowed, so there is no guard.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from examples.grpo.learner import Policy
from rose_dev.engine_environment import engine_python
from rose_dev.models import make_named
from rose_dev.vllm_environment import vllm_python
from rose_dev.waiting import wait_until
from rose_trainer.publisher import Publisher
from rose_wire.ports import free_ports

MODEL = "tiny"
RUN = "grpo"
LEASE = "bench/rounds"
PYTHONS: Mapping[str, Callable[[], Path]] = {
    "sglang-cpu": engine_python,
    "vllm-cpu": vllm_python,
    "fake": lambda: Path(sys.executable),
}
"""Engine class -> the Python that an engine host runs its engines with."""
READY_SECONDS = 1200.0
"""An engine starts in half a minute on a quiet machine, in a quarter of an hour on a full one."""


@dataclass(frozen=True)
class RunningLease:
    """Where the trainer sends its turns and its weights."""

    url: str
    store: str
    model: Path


def _guard() -> list[str]:
    """What a benchmark started that is killed goes with it."""
    return ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []


def trainer_command(running: RunningLease, out: Path, seed: int, seconds: float) -> list[str]:
    """The example's training on a lease, which writes to ``out`` and says little."""
    return [
        *(*_guard(), sys.executable, "-m", "examples.grpo.train", "--quiet"),
        *(f"--url={running.url}", f"--store={running.store}", f"--run={RUN}"),
        *(f"--model={running.model}", f"--out={out}", f"--seed={seed}", f"--seconds={seconds}"),
    ]


@contextmanager
def process(folder: Path, *command: str) -> Iterator[None]:
    """One command of ``rose``; its output goes to a file in the folder."""
    name = "-".join(part for part in command[:2] if not part.startswith("-"))
    argv = [*_guard(), sys.executable, "-m", "rose_cli.main", *command]
    with (folder / f"{name}.log").open("wb") as log:
        child = subprocess.Popen(argv, stdout=log, stderr=log, start_new_session=True)
    try:
        yield
    finally:
        child.terminate()
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


@contextmanager
def lease(
    folder: Path, engine_class: str = "sglang-cpu", *, drafts: bool = False
) -> Iterator[RunningLease]:
    """Everything up, the engine with the base weights; all gone afterwards.

    Args:
        folder: where all of it keeps its files and logs.
        engine_class: of the engine; ``fake`` makes up its tokens, so nothing is learned from it.
        drafts: it verifies drafts of the router's tokens.

    Raises:
        StartFailed: the engine was not ready in time; the message names the logs.
    """
    model = make_named(MODEL)
    store, http, attach, data = free_ports(4)
    token, rundir = folder / "token", folder / "run"
    token.write_text("bench")
    rundir.mkdir()
    (folder / "engine.yaml").write_text(
        yaml.safe_dump(_engine(f"127.0.0.1:{store}", model, engine_class) | {"drafts": drafts})
    )
    with ExitStack() as stack:
        python = PYTHONS[engine_class]()
        for command in _commands(folder, (store, http, attach, data), (model, python)):
            stack.enter_context(process(folder, *command))
        running = RunningLease(f"http://127.0.0.1:{http}", f"127.0.0.1:{store}", model)
        _wait_for_page(f"http://127.0.0.1:{http}/health", folder)
        # The trainer's own tensors in its order: its runs go on where this one ends.
        base = Policy(model, learning_rate=0.0).named_tensors()
        with Publisher(running.store, RUN) as publisher:
            version = publisher.publish(0, base)
            publisher.wait(version, READY_SECONDS)
        _wait_for_page(f"{running.url}/ready", folder)
        yield running


def _engine(store: str, model: Path, engine_class: str) -> dict[str, object]:
    return {
        "name": "own-0",
        "engineClass": engine_class,
        "model": model.name,
        "run": RUN,
        "weightEndpoint": store,
        "contextTokens": 512,
        "kvTokens": 16384,
        "maxRunning": 16,
        "maxStaleness": 3,
    }


def _commands(
    folder: Path, ports: tuple[int, ...], engine: tuple[Path, Path]
) -> Iterator[Sequence[str]]:
    store, http, attach, data = ports
    model, python = engine
    token, rundir = f"--token-file={folder / 'token'}", f"--rundir={folder / 'run'}"
    yield (
        *("weights", "serve", "--root", str(folder / "store")),
        *(f"--address=127.0.0.1:{store}", "--http-port=0"),
    )
    yield (
        *("router", f"--lease={LEASE}", "--max-staleness=3", token, "--drain-seconds=0"),
        *(f"--http-address=127.0.0.1:{http}", f"--attach-address=127.0.0.1:{attach}"),
    )
    yield (
        *("engine-host", rundir, f"--models={model.parent}", "--cgroup=signals"),
        *(f"--engine-python={python}", "--data-host=127.0.0.1", f"--data-port={data}"),
        *("--http-port=0", f"--dedicated={folder / 'engine.yaml'}", f"--lease={LEASE}"),
        *(f"--router=127.0.0.1:{attach}", token),
    )
    yield ("weight-sync", rundir, "--http-port=0")


def _wait_for_page(url: str, folder: Path) -> None:
    def answers() -> bool:
        try:
            with urllib.request.urlopen(url, timeout=5) as reply:  # noqa: S310  # loopback
                return bool(reply.status == 200)
        except OSError:
            return False

    why = f"(the logs are in {folder})"
    wait_until(answers, f"{url} answers", seconds=READY_SECONDS, pause=0.5, why=lambda: why)
