"""Real vLLM engines for tests: stock vLLM on CPU with a tiny model, ROSE's plugin inside.

``vllm_engine`` is shared by every test that is marked ``vllm``, by the rules of
``engine_testing.real_engine``. A start takes half a minute: vLLM imports itself in two processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rose_core.wire.sync import EngineSpec
from rose_dev import vllm_environment
from rose_dev.engine_testing import PermitHolder, RealEngine, start_program, until_ended, url_of
from rose_dev.models import Recipe, make_model, make_named
from rose_engines.sglang.arguments import Launch
from rose_engines.vllm.arguments import command, environment
from rose_wire.ports import free_port


@contextmanager
def start_vllm(
    folder: Path,
    model: str | Recipe | Path = "tiny-peaked",
    spec: EngineSpec | None = None,
    version: str = "base",
    *,
    opened: bool = True,
) -> Iterator[RealEngine]:
    """Start vLLM under a permit that is held open; end its whole process group afterwards.

    Args:
        folder: where permit, control socket and log go.
        model: a name in ``rose_dev.models.RECIPES``, a recipe, or a folder.
        spec: the engine's specification; small sizes by default.
        version: weight label at the start.
        opened: False starts the engine under a closed permit, as the engine host does.
    """
    if isinstance(model, Path):
        path = model
    else:
        path = make_named(model) if isinstance(model, str) else make_model(model)
    holder = PermitHolder(folder / "permit")
    if opened:
        holder.open()
    spec = spec or EngineSpec(engine_class="test", model=path.name, kv_tokens=8192, max_running=4)
    launch = Launch(
        python=vllm_environment.vllm_python(),
        model=path,
        port=free_port(),
        version=version,
        permit=folder / "permit",
        plugin_socket=folder / "plugin.sock",
        kv_policy=spec.kv_policy,
    )
    with (folder / "engine.log").open("wb") as log:
        line, variables = command(spec, launch), environment(launch, os.environ)
        process = start_program(line, variables, log.fileno())
    with until_ended(RealEngine(url_of(launch), path, folder, process, holder)) as engine:
        yield engine


@pytest.fixture(scope="session")
def vllm_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    """One vLLM with the tiny peaked model, shared by the whole run."""
    if not vllm_environment.is_ready():
        pytest.fail("no environment of vLLM; run `make vllm`")
    with start_vllm(tmp_path_factory.mktemp("vllm")) as engine:
        yield engine
