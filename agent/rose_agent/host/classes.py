"""The engine classes this host offers, and how each is started."""

from __future__ import annotations

from rose_agent.host.launchers import EngineOrder, EngineProgram, Launcher

# Where the fake engine answers when it is ready, as SGLang does.
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


LAUNCHERS: dict[str, Launcher] = {"fake": fake}
