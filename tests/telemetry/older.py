"""Stock engines of other versions, as ``record`` starts them: only flags that older ones have too.

Their environments are made by hand and lie outside the checkout; nothing of ROSE runs in them but
the stand-in for SGLang's CUDA kernels.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from bench.guard.serving import RUNNING, SERVING, Serving, Started
from rose_dev import engine_environment, vllm_environment

_CONTEXT = 2048


def _sglang(python: Path, model: Path, port: int) -> Started:
    given = {
        "model-path": str(model),
        "served-model-name": "serving",
        "host": "127.0.0.1",
        "port": str(port),
        "device": "cpu",
        "attention-backend": "torch_native",
        "context-length": str(_CONTEXT),
        "max-total-tokens": "16384",
        "max-running-requests": str(RUNNING),
        "mem-fraction-static": "0.2",
    }
    argv = [str(python), "-m", "sglang.launch_server", "--enable-metrics", "--skip-server-warmup"]
    argv += ["--disable-overlap-schedule", "--sleep-on-idle"]
    for name, value in given.items():
        argv += [f"--{name}", value]
    return argv, {
        **os.environ,
        "SGLANG_USE_CPU_ENGINE": "1",
        "PYTHONPATH": str(engine_environment.CPU_PATH),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _vllm(python: Path, model: Path, port: int) -> Started:
    argv = vllm_environment.command(model, port, running=RUNNING, context=_CONTEXT)
    return [str(python), *argv[1:]], vllm_environment.environment()


_START: dict[str, Callable[[Path, Path, int], Started]] = {"sglang": _sglang, "vllm": _vllm}


def older(name: str, version: str, python: Path) -> Serving:
    """The engine of this kind and version that this Python has."""
    return replace(
        SERVING[name],
        version=version,
        ready="/health",
        start=lambda model, port: _START[name](python, model, port),
        missing=lambda: "" if python.exists() else f"{python} is not there",
    )
