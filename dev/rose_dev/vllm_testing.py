"""Real vLLM engines for tests: stock vLLM on CPU with a tiny model, ROSE's plugin inside.

``vllm_engine`` is shared by every test that is marked ``vllm``, by the rules of
``engine_testing.real_engine``. Engines are forked from one process, as those of SGLang.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from rose_core.wire.sync import EngineSpec
from rose_dev import vllm_environment
from rose_dev.engine_template import VLLM, ProcessHandle
from rose_dev.engine_testing import RealEngine, fork_or_start, prepare, until_ended
from rose_dev.models import Recipe
from rose_engines.process.launch import Launch
from rose_engines.vllm.arguments import command, environment

_NO_COMPILER = {"CXX": "no-compiler"}
"""As in an image: an engine that compiled something would end."""


@contextmanager
def start_vllm(
    folder: Path,
    model: str | Recipe | Path = "tiny-peaked",
    spec: EngineSpec | None = None,
    version: str = "base",
    *,
    opened: bool = True,
) -> Iterator[RealEngine]:
    """Start vLLM as ``engine_testing.start_engine`` does SGLang, with its arguments."""
    python = vllm_environment.vllm_python()
    spec, launch, holder = prepare(folder, model, spec, version, python, opened=opened)
    with (folder / "engine.log").open("wb") as log:
        line, variables = command(spec, launch), environment(launch, os.environ) | _NO_COMPILER
        process = fork_or_start(VLLM, line, variables, log.fileno())
    with until_ended(folder, launch, process, holder) as engine:
        yield engine


def start_beside_vllm(program: Path, argv: Sequence[str], log: Path) -> ProcessHandle:
    """A test's program where vLLM has been imported, and no plugin of ROSE's.

    Args:
        program: a file.
        argv: its arguments.
        log: a new file for its output.
    """
    python = vllm_environment.vllm_python()
    launch = Launch(python=python, model=log.parent, port=0)
    variables = environment(launch, os.environ) | _NO_COMPILER
    with log.open("wb") as file:
        line = [str(python), "-m", VLLM.launcher, *argv]
        return fork_or_start(VLLM, line, variables, file.fileno(), program)


@pytest.fixture(scope="session")
def vllm_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    """One vLLM with the tiny peaked model, shared by the whole run."""
    if not vllm_environment.is_ready():
        pytest.fail("no environment of vLLM; run `make vllm`")
    with start_vllm(tmp_path_factory.mktemp("vllm")) as engine:
        yield engine
