"""The engine classes this host offers, and how each is started."""

from __future__ import annotations

import os
from dataclasses import replace

from rose_agent.host.processes.launchers import EngineOrder, EngineProgram, Launcher
from rose_core.api.arguments import BY_SEED
from rose_core.devices.elastic import FIRST_PERMILLE
from rose_core.devices.memory import WHOLE
from rose_core.devices.model_size import WINDOW_PERMILLE
from rose_core.rollouts.requests.fields import NOT_BY_SEED, NOT_IN_VLLM
from rose_core.wire.sync import EngineSpec
from rose_engines.process.launch import Launch
from rose_engines.sglang.arguments import command, environment, verifies_drafts
from rose_engines.vllm import arguments as vllm

# Cheap, and no part of the engine's own work.
_READY = "/ready"


def fake(order: EngineOrder) -> EngineProgram:
    """``rose_engines.fake``: the same routes and permit, no model worth the name."""
    kv_bytes = int(order.spec.arguments.get("kv-bytes", 0))
    elastic = order.spec.sharing.memory_source == "Elastic"
    return EngineProgram(
        argv=(
            str(order.python),
            *("-m", "rose_engines.fake"),
            *("--host", "127.0.0.1", "--port", str(order.port)),
            *("--model", str(order.model)),
            *("--permit", str(order.slot.permit)),
            *("--plugin-socket", str(order.slot.plugin_socket)),
            *("--max-running", str(order.spec.max_running)),
            *("--ranks", str(order.spec.ranks)),
            *_adapters(order.spec),
            *(f"--{name}={value}" for name, value in order.spec.arguments.items()),
        ),
        environment={"CUDA_VISIBLE_DEVICES": ",".join(order.gpu_uuids)},
        ready_path=_READY,
        device_bytes=kv_bytes,
        start_bytes=kv_bytes * (FIRST_PERMILLE if elastic else WHOLE) // WHOLE,
        kv_bytes=kv_bytes,
        kv_bundle=kv_bytes // 64,
    )


def _adapters(spec: EngineSpec) -> tuple[str, ...]:
    """Where requests say which run they are for, the fake looks there."""
    if spec.adapter is None or not spec.shares_adapters:
        return ()
    return ("--adapter-slots", str(spec.adapter.slots))


def _launch(order: EngineOrder) -> Launch:
    """What stock engines of every kind are started with."""
    return Launch(
        python=order.python,
        model=order.model,
        port=order.port,
        permit=order.slot.permit,
        plugin_socket=order.slot.plugin_socket,
        ranks=order.spec.ranks,
        kv_policy=order.spec.kv_policy,
        adapter=order.spec.adapter,
        kv_store=order.kv_store,
        kv_store_bytes=order.spec.kv_store_bytes,
        kv_pool=order.kv_pool,
    )


def _refused(order: EngineOrder) -> tuple[str, ...]:
    """What an engine of SGLang does not take, by its arguments."""
    return tuple(sorted(NOT_BY_SEED)) if BY_SEED in order.spec.arguments else ()


def sglang(order: EngineOrder) -> EngineProgram:
    """Stock SGLang on the GPUs of the grant, with ROSE's plugin and SGLang's memory saver.

    Raises:
        ArgumentRefused: an argument is outside the allow-list.
        NoMemory: the GPUs have too little free memory now.
        BadEngine: no GPU was granted, or the model's size is not known.
    """
    sized = order.sizer.size(order.model, order.spec, order.python, order.gpu_uuids)
    size, running = sized.size, order.spec.max_running
    limited = order.spec.sharing.memory_limit == "Driver"
    fraction = order.sizer.claim(order.slot.uid, size, order.gpu_uuids, limited=limited)
    drafts = verifies_drafts(order.spec)
    launch = replace(
        _launch(order),
        drafts=drafts,
        activity=order.slot.activity,
        device="cuda",
        memory_fraction=fraction,
        state_slots=sized.shape.state_slots(running),
        window_permille=WINDOW_PERMILLE if sized.shape.windowed else 0,
    )
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(order.gpu_uuids)}
    return EngineProgram(
        argv=tuple(command(order.spec, launch)),
        environment={**environment(launch, os.environ), **visible},
        ready_path=_READY,
        device_bytes=size.total,
        start_bytes=size.start,
        size=size,
        kind=sized.kind,
        kv_bytes=size.kv,
        kv_bundle=size.kv_bundle,
        drafts=drafts,
        refuses=_refused(order),
    )


def sglang_cpu(order: EngineOrder) -> EngineProgram:
    """Stock SGLang on CPU with ROSE's plugin.

    Raises:
        ArgumentRefused: an argument is outside the allow-list.
    """
    drafts = verifies_drafts(order.spec)
    launch = replace(_launch(order), drafts=drafts)
    return EngineProgram(
        argv=tuple(command(order.spec, launch)),
        environment=environment(launch, os.environ),
        ready_path=_READY,
        drafts=drafts,
        refuses=_refused(order),
    )


def vllm_cpu(order: EngineOrder) -> EngineProgram:
    """Stock vLLM on CPU with ROSE's plugin.

    Raises:
        ArgumentRefused: the lease asks for what an engine of vLLM does not do.
    """
    launch = _launch(order)
    return EngineProgram(
        argv=tuple(vllm.command(order.spec, launch)),
        environment=vllm.environment(launch, os.environ),
        ready_path=_READY,
        refuses=tuple(sorted(NOT_IN_VLLM)),
    )


LAUNCHERS: dict[str, Launcher] = {
    "fake": fake,
    "sglang": sglang,
    "sglang-cpu": sglang_cpu,
    "vllm-cpu": vllm_cpu,
}
