"""The engine classes this host offers, and how each is started."""

from __future__ import annotations

import os

from rose_agent.host.launchers import EngineOrder, EngineProgram, Launcher
from rose_engines.sglang.arguments import Launch, command, environment

# Cheap, and no part of the engine's own work.
_READY = "/ready"


def fake(order: EngineOrder) -> EngineProgram:
    """``rose_engines.fake``: the same routes and permit, no model worth the name."""
    return EngineProgram(
        argv=(
            str(order.python),
            *("-m", "rose_engines.fake"),
            *("--host", "127.0.0.1", "--port", str(order.port)),
            *("--model", str(order.model)),
            *("--permit", str(order.slot.permit)),
            *("--plugin-socket", str(order.slot.plugin_socket)),
            *("--max-running", str(order.spec.max_running)),
            *(f"--{name}={value}" for name, value in order.spec.arguments.items()),
        ),
        ready_path=_READY,
    )


def sglang_cpu(order: EngineOrder) -> EngineProgram:
    """Stock SGLang on CPU with ROSE's plugin.

    Raises:
        ArgumentRefused: an argument is outside the allow-list.
    """
    launch = Launch(
        python=order.python,
        model=order.model,
        port=order.port,
        permit=order.slot.permit,
        plugin_socket=order.slot.plugin_socket,
    )
    return EngineProgram(
        argv=tuple(command(order.spec, launch)),
        environment=environment(launch, os.environ),
        ready_path=_READY,
    )


LAUNCHERS: dict[str, Launcher] = {"fake": fake, "sglang-cpu": sglang_cpu}
