"""How each engine class is started: the seam between the host and ``rose_engines``.

| engine class | what runs                                                              |
|--------------|------------------------------------------------------------------------|
| sglang       | stock SGLang on GPUs with ROSE's plugin (``rose_engines.sglang.launch``) |
| sglang-cpu   | the same on CPU                                                         |
| vllm-cpu     | stock vLLM on CPU with ROSE's plugin (``rose_engines.vllm.launch``)      |
| fake         | ``rose_engines.fake``: same routes, same permit, no model               |

A launcher turns the slot's order into a program, its environment and the path that answers 200
when the engine is ready. It starts nothing: ``process`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rose_agent.errors import BadEngine, NoModel
from rose_agent.host.memory.sizing import Sizer
from rose_core.devices.memory import EngineSize
from rose_core.identity import GpuUuid
from rose_core.rollouts.engines.kv_store import KvPoolSpec
from rose_core.wire.sync import EngineSpec
from rose_engines.node.rundir import SlotDir


@dataclass(frozen=True)
class EngineOrder:
    """Everything a launcher needs.

    Attributes:
        port: loopback port that the engine must listen on.
        gpu_uuids: GPUs of the grant.
        sizer: tells whether the engine fits on them.
        kv_store: folder of the keys that the lease's engines share; None = they share none.
        kv_pool: where engines of other nodes have keys of the lease; None = nowhere.
    """

    spec: EngineSpec
    slot: SlotDir
    model: Path
    python: Path
    port: int
    gpu_uuids: tuple[GpuUuid, ...] = ()
    sizer: Sizer = field(default_factory=Sizer)
    kv_store: Path | None = None
    kv_pool: KvPoolSpec | None = None


@dataclass(frozen=True)
class EngineProgram:
    """What to run.

    Attributes:
        argv: program and arguments.
        environment: variables beside the host's allow-listed ones.
        ready_path: answers 200 once the engine can serve.
        device_bytes: what it takes of its GPU at most; 0 = not known.
        start_bytes: what must be there when it starts; 0 = all of it.
        size: what that consists of, where it is an engine whose footprint is measured.
        kind: name under which its footprint is remembered.
        kv_bytes, kv_bundle: its KV cache, and the piece in which an elastic one comes and goes.
        cgroups: folders that it joins besides those of its limits.
        drafts: it verifies drafts, and takes tokens to draft from.
        refuses: parameters of turns that it does not take (``rose_core.rollouts.requests.fields``).
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    ready_path: str = "/ready"
    device_bytes: int = 0
    start_bytes: int = 0
    size: EngineSize | None = None
    kind: str = ""
    kv_bytes: int = 0
    kv_bundle: int = 0
    cgroups: tuple[Path, ...] = ()
    drafts: bool = False
    refuses: tuple[str, ...] = ()


Launcher = Callable[[EngineOrder], EngineProgram]


def resolve_model(models: Path, name: str) -> Path:
    """Find a model folder.

    Raises:
        BadEngine: the name leaves the folder.
        NoModel: there is no such model; it may come.
    """
    folder = (models / name).resolve()
    if not name or not folder.is_relative_to(models.resolve()) or folder == models.resolve():
        message = f"model {name!r} is no folder name below {models}"
        raise BadEngine(message)
    if not folder.is_dir():
        message = f"no model {name!r} below {models} on this node"
        raise NoModel(message)
    return folder


def launcher_for(engine_class: str, launchers: Mapping[str, Launcher]) -> Launcher:
    """Pick by engine class.

    Raises:
        BadEngine: this host offers no such class; says which it offers.
    """
    launcher = launchers.get(engine_class)
    if launcher is None:
        offered = ", ".join(sorted(launchers))
        message = f"engine class {engine_class!r} is not offered by this host; it has {offered}"
        raise BadEngine(message)
    return launcher
