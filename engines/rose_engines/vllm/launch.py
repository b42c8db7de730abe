"""Starts stock vLLM in the engine's environment: ``PYTHON -m rose_engines.vllm.launch ...``.

The arguments are vLLM's own (``arguments.command`` makes them). When the environment names a permit
or a control socket, an engine in which ROSE's plugin did not load is not started: it could not be
stopped. When it names a key, only the routes of ``rose_engines.process.exposed_routes`` are there.
With one thread an operation the engine core is forked. Next step: ``plugin``, ``turns``.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.context
import os
import sys

from rose_engines.process.exposed_routes import KEY_VARIABLE
from rose_engines.process.hooks import check_loaded


def fork_core() -> None:
    """Let vLLM's engine core be forked where it asks for a new process.

    A new one imports PyTorch and vLLM again, a third of an engine's start. vLLM forks on GPUs by
    default and insists on a new process on CPU, for its pools of threads; with one thread an
    operation there is none.
    """
    choose = multiprocessing.get_context

    def forked(method: str | None = None) -> multiprocessing.context.BaseContext:
        return choose("fork" if method == "spawn" else method)

    multiprocessing.get_context = forked  # type: ignore[assignment]


def main() -> int:
    """Run the server until it ends."""
    if os.environ.get("OMP_NUM_THREADS") == "1":
        fork_core()
    from vllm.entrypoints.launchers.api_server.entry import main as serve  # noqa: PLC0415
    from vllm.plugins import load_general_plugins  # noqa: PLC0415

    from rose_engines.vllm import plugin, turns  # noqa: PLC0415

    load_general_plugins()
    check_loaded(plugin.registered(), "vLLM")
    turns.TurnRoutes.key = os.environ.pop(KEY_VARIABLE, "")  # children have no business with it
    serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
