"""Starts stock SGLang in the engine's environment: ``PYTHON -m rose_engines.sglang.launch ...``.

The arguments are SGLang's own (``arguments.command`` makes them). On CPU two things are needed that
a GPU machine has by itself: SGLang's switch for its CPU engine, which the scheduler's child process
inherits, and the stand-in for the CUDA kernels on PYTHONPATH; and its processes are forked.

When the environment names a permit or a control socket, the launcher refuses to start an engine in
which ROSE's plugin did not load: an engine that could not be stopped must not run. When the
environment names a key, only the routes of ``rose_engines.process.exposed_routes`` are there. Next
step: ``plugin``.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys

from rose_engines.process.exposed_routes import KEY_VARIABLE, RouteFilter
from rose_engines.process.hooks import check_loaded


def on_cpu(argv: list[str]) -> bool:
    """Whether the arguments ask for the CPU device."""
    pairs = itertools.pairwise(argv)
    return "--device=cpu" in argv or ("--device", "cpu") in set(pairs)


if on_cpu(sys.argv):
    # At import: SGLang reads it while it is imported, also in its children.
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"


def fork_children() -> None:
    """Let SGLang's processes be forked where it asks for new ones.

    A new one imports PyTorch and SGLang again, 15 to 20 s of a core; an engine has three. On a GPU
    a forked process could not use the driver that its parent has begun to use. On a CPU there is
    none, and with one thread an operation no pool of threads that a child would miss.
    """
    choose = multiprocessing.set_start_method

    def forked(method: str | None, force: bool = False) -> None:
        choose("fork" if method == "spawn" else method, force)

    multiprocessing.set_start_method = forked


def main(argv: list[str]) -> int:
    """Run the server until it ends."""
    if on_cpu(argv) and os.environ.get("OMP_NUM_THREADS") == "1":
        fork_children()
    from sglang.launch_server import run_server  # noqa: PLC0415  # needs the switch above
    from sglang.srt.plugins import load_plugins  # noqa: PLC0415
    from sglang.srt.server_args import prepare_server_args  # noqa: PLC0415
    from sglang.srt.utils import kill_process_tree  # noqa: PLC0415

    from rose_engines.sglang import plugin  # noqa: PLC0415

    load_plugins()
    check_loaded(plugin.registered(), "SGLang")
    key = os.environ.pop(KEY_VARIABLE, "")  # the engine's children have no business with it
    if key:
        from sglang.srt.entrypoints.http_server import app  # noqa: PLC0415

        app.add_middleware(RouteFilter, key=key)
    try:
        run_server(prepare_server_args(argv))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
