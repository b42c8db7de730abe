"""The environment of the real engine: stock SGLang, every version pinned.

``python -m rose_dev.engine_environment`` makes it (a minute on a warm network, about 10 GB) and
prints the path of its Python on the last line of stdout; run again it answers at once.
``environments`` has the rules. Next step: ``rose_engines.sglang.launch`` runs in it.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import rose_engines
from rose_dev.environments import PYTHON_VERSION, Environment, Steps, log

SGLANG_VERSION = "0.5.23"
CONSTRAINTS = Path(__file__).with_name("engine_constraints.txt")
# What an engine imports on CPU; the last three are ROSE's own needs, which SGLang brings along.
NEEDED = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "msgspec",
    "numpy",
    "zstandard",
)


# In front of SGLang's CUDA kernels on a machine without a GPU.
CPU_PATH = Path(rose_engines.__file__).with_name("sglang") / "paths" / "cpu"


def fingerprint() -> str:
    """What the environment is made of."""
    text = f"{SGLANG_VERSION} {PYTHON_VERSION}\n".encode() + CONSTRAINTS.read_bytes()
    return hashlib.sha256(text).hexdigest()


def _fill(steps: Steps) -> None:
    steps.install(
        f"stock SGLang {SGLANG_VERSION} (about 10 GB; the first time downloads PyTorch)",
        *("-c", str(CONSTRAINTS), f"sglang=={SGLANG_VERSION}"),
    )
    # Once, for all engine starts: without byte code every start compiles SGLang anew (30 s). Some
    # files of the wheels are templates that do not compile, so the exit code says nothing.
    packages = [str(path) for path in _packages(steps.site)]
    log("byte code of the engine (once)")
    subprocess.run(
        [steps.python, "-m", "compileall", "-qq", "-j", "0", *packages],
        env=steps.environment,
        check=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    # The rest of the byte code is written by importing what every engine process imports, which
    # also proves that the engine starts on this machine.
    shim = {"PYTHONPATH": str(CPU_PATH), "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
    imports = "; ".join(f"import {name}" for name in NEEDED)
    steps.run("first import of the engine", [steps.python, "-W", "ignore", "-c", imports], shim)


def _packages(site: Path) -> Iterator[Path]:
    """What an engine on CPU imports at every start."""
    for name in ("sglang/srt", "sglang/lang", "sglang/utils.py", "transformers/models/qwen3"):
        if (site / name).exists():
            yield site / name


ENGINE = Environment(f"sglang-{SGLANG_VERSION}", "engine", fingerprint, _fill)
environment_folder = ENGINE.folder
engine_python = ENGINE.python
is_ready = ENGINE.is_ready
install = ENGINE.install


def main(argv: list[str] | None = None) -> int:
    """``python -m rose_dev.engine_environment [--print-only]``."""
    parser = argparse.ArgumentParser(prog="rose_dev.engine_environment", description=__doc__)
    parser.add_argument("--print-only", action="store_true", help="only print the Python's path")
    return ENGINE.command(print_only=parser.parse_args(argv).print_only)


if __name__ == "__main__":
    sys.exit(main())
