"""Starts stock vLLM in the engine's environment: ``PYTHON -m rose_engines.vllm.launch ...``.

The arguments are vLLM's own (``arguments.command`` makes them). When the environment names a permit
or a control socket, an engine in which ROSE's plugin did not load is not started: it could not be
stopped. When it names a key, only the routes of ``rose_engines.exposed_routes`` are there.
Next step: ``plugin``, ``turns``.
"""

from __future__ import annotations

import os
import sys

from rose_engines.exposed_routes import KEY_VARIABLE
from rose_engines.hooks import check_loaded


def main() -> int:
    """Run the server until it ends."""
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
