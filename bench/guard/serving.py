"""The engine that serves in the benchmark: stock SGLang, or vLLM where ``make vllm`` was run."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.guard.dialects import SGLANG, VLLM, Dialect
from rose_core.wire.sync import EngineSpec
from rose_dev import engine_environment, vllm_environment
from rose_engines.process.launch import Launch
from rose_engines.sglang.arguments import command, environment

KV_TOKENS = 16384
RUNNING = 16
_CONTEXT = 8192

Started = tuple[list[str], dict[str, str]]
"""Command line and environment."""


@dataclass(frozen=True)
class Serving:
    """One kind of serving engine.

    Attributes:
        engine: its word in a pool's policy.
        ready: path that answers 200 once it serves.
        missing: why it cannot be started here; empty when it can.
    """

    name: str
    engine: str
    version: str
    dialect: Dialect
    ready: str
    start: Callable[[Path, int], Started]
    missing: Callable[[], str]


def _sglang(model: Path, port: int) -> Started:
    launch = Launch(python=engine_environment.engine_python(), model=model, port=port)
    spec = EngineSpec("sglang-cpu", "serving", kv_tokens=KV_TOKENS, max_running=RUNNING)
    return command(spec, launch), environment(launch, os.environ)


def _vllm(model: Path, port: int) -> Started:
    argv = vllm_environment.command(model, port, running=RUNNING, context=_CONTEXT)
    return argv, vllm_environment.environment()


def _without_sglang() -> str:
    ready = engine_environment.is_ready()
    return "" if ready else "SGLang is not installed here: run `make engine`"


def _without_vllm() -> str:
    ready = vllm_environment.is_ready()
    return "" if ready else "vLLM is not installed here: run `make vllm` (about 6 GB)"


SERVING = {
    one.name: one
    for one in (
        Serving(
            *("sglang", "SGLang", engine_environment.SGLANG_VERSION, SGLANG, "/ready"),
            start=_sglang,
            missing=_without_sglang,
        ),
        Serving(
            *("vllm", "VLLM", vllm_environment.VLLM_VERSION, VLLM, "/health"),
            start=_vllm,
            missing=_without_vllm,
        ),
    )
}
