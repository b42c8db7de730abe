"""Engine specification -> command line and environment of SGLang; pure, with an allow-list.

What both kinds of engines are started with is in ``rose_engines.process.launch``. Next step:
``launch`` runs the command.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from rose_core.adapters import pool_slots
from rose_core.api.arguments import ROUTED_EXPERTS
from rose_core.guard.chunk import prefill_chunk
from rose_core.rollouts.engines import kv_store
from rose_core.rollouts.engines.drafts import MOST_TOKENS, verified_tokens
from rose_core.wire.sync import EngineSpec
from rose_engines.errors import ArgumentRefused
from rose_engines.kv.pages import BYTES_VARIABLE, FOLDER_VARIABLE
from rose_engines.kv.policy import KEEP
from rose_engines.kv.pool import POOL_VARIABLE, to_text
from rose_engines.node import activity
from rose_engines.process.launch import (
    Launch,
    check_arguments,
    command_line,
    common_environment,
    own_packages,
)

# Nodes of the tree of what an engine has generated itself: some 100 MB on the host.
_OWN_NODES = 500_000

# What becomes of an engine whose parameter layout is refused, from the host's environment: unset =
# it ends; ``disk`` = it loads patched checkpoints; ``disk-always`` = so whatever its layout.
FALLBACK_VARIABLE = "ROSE_LAYOUT_FALLBACK"
# Rank, modules and number of the adapters that the engine computes with, as JSON; unset = none.
ADAPTER_VARIABLE = "ROSE_ADAPTER"

# Set = the engine drafts tokens and verifies them (``drafts``).
DRAFTS_VARIABLE = "ROSE_DRAFTS"

_BACKEND = msgspec.json.encode(
    {
        "backend_name": "rose",
        "module_path": "rose_engines.sglang.kv_backend",
        "class_name": "FolderBackend",
        "prefetch_threshold": kv_store.PAGE_TOKENS,
    }
).decode()

# Which experts a token went through is not kept with its keys: rows of fetched tokens would be
# those of whatever had their place before. And without a prefix cache there is nothing to keep.
_NOT_WITH_STORE = {ROUTED_EXPERTS, "disable-radix-cache"}

_PATHS = Path(__file__).with_name("paths")
# An engine may be stopped for hours; SGLang's watchdog counts wall clock and would kill it.
_WATCHDOG_SECONDS = 30 * 24 * 3600


def command(spec: EngineSpec, launch: Launch) -> list[str]:
    """The engine's command line.

    Raises:
        ArgumentRefused: an argument of the specification is outside the allow-list.
    """
    check_arguments(spec.arguments)
    own = {
        "model-path": str(launch.model),
        "load-format": "safetensors",
        "served-model-name": launch.served_name or spec.model,
        "host": launch.host,
        "port": str(launch.port),
        "weight-version": launch.version,
        "context-length": str(spec.context_tokens),
        "max-total-tokens": str(spec.kv_tokens),
        "max-running-requests": str(spec.max_running),
        "mem-fraction-static": str(launch.memory_fraction),
        "watchdog-timeout": str(_WATCHDOG_SECONDS),
        "load-snapshot-publish-interval": "1",
        "chunked-prefill-size": str(prefill_chunk(spec.context_tokens, launch.ranks)),
        "device": launch.device,
        "log-level": "warning" if launch.quiet_log else "info",
        # One iteration at a time: a commit finds no result of the old weights still under way.
        "disable-overlap-schedule": "",
        "sleep-on-idle": "",
        "enable-metrics": "",
        # A warm-up request would need an open permit.
        "skip-server-warmup": "",
    }
    if launch.plugged:
        # A turn of n tokens otherwise costs n * n / 2 of them in events, made and read again.
        own["incremental-streaming-output"] = ""
    if launch.ranks > 1:
        own["tp-size"] = str(launch.ranks)
    if launch.state_slots:
        # Else the pool of states takes a share of whatever is free.
        own["max-mamba-cache-size"] = str(launch.state_slots)
    if launch.window_permille:
        own["swa-full-tokens-ratio"] = str(launch.window_permille / 1000)
    if launch.device == "cuda":
        # Never more requests run, and each size of a batch costs memory and time at the start.
        own["cuda-graph-max-bs-decode"] = str(spec.max_running)
    if launch.device == "cpu":
        own["attention-backend"] = "torch_native"
    elif launch.plugged:
        # Rung 4: without it SGLang's release answers well and frees nothing.
        own["enable-memory-saver"] = ""
    chosen = own | dict(spec.arguments) | _for_drafts(spec, launch.ranks) | _for_store(spec, launch)
    return command_line(launch, "rose_engines.sglang.launch", chosen) + _for_adapter(launch)


def verifies_drafts(spec: EngineSpec) -> bool:
    """Whether an engine of this specification drafts: asked to, and a step has room for drafts.

    Raises:
        ArgumentRefused: an argument is outside the allow-list.
    """
    check_arguments(spec.arguments)
    return bool(_nodes(spec, spec.ranks))


def _nodes(spec: EngineSpec, ranks: int) -> int:
    if not spec.drafts:
        return 0
    chunk = spec.arguments.get("chunked-prefill-size") or prefill_chunk(spec.context_tokens, ranks)
    return verified_tokens(spec.max_running, int(chunk))


def _for_drafts(spec: EngineSpec, ranks: int) -> dict[str, str]:
    """What makes SGLang draft; nothing where a step could not verify any draft in time."""
    nodes = _nodes(spec, ranks)
    if not nodes:
        return {}
    return {
        "speculative-algorithm": "NGRAM",
        "speculative-num-draft-tokens": str(nodes),
        # Of the drafts, those from the router's tokens; the others are from the engine's own.
        "speculative-ngram-external-sam-budget": str(nodes // 2),
        "speculative-ngram-external-corpus-max-tokens": str(2 * MOST_TOKENS),
        "speculative-ngram-capacity": str(_OWN_NODES),
    }


def _for_store(spec: EngineSpec, launch: Launch) -> dict[str, str]:
    """What makes SGLang keep pages of keys in the lease's store, and fetch them from there.

    Raises:
        ArgumentRefused: of such an engine nobody has tried it.
    """
    if launch.kv_store is None:
        return {}
    for wrong, what in (
        (launch.ranks > 1, "engines of one GPU"),
        (launch.adapter is not None, "versions that are whole models"),
        (launch.kv_policy != KEEP, "kvPolicy Keep"),
        (bool(spec.drafts), "drafts: Off"),
        (launch.state_slots or launch.window_permille, "a model whose layers all attend to all"),
    ):
        if wrong:
            raise ArgumentRefused(f"kvStoreGiB needs {what}; set it to 0, or change that")
    for name in sorted(_NOT_WITH_STORE & spec.arguments.keys()):
        raise ArgumentRefused(
            f"kvStoreGiB cannot be combined with the engine argument {name}; leave one of them out"
        )
    asked = spec.arguments.get("chunked-prefill-size")
    chunk = int(asked) if asked else prefill_chunk(spec.context_tokens, launch.ranks)
    return {
        "page-size": str(kv_store.PAGE_TOKENS),
        "chunked-prefill-size": str(kv_store.whole_pages(chunk)),
        "enable-hierarchical-cache": "",
        "hicache-ratio": str(
            kv_store.staging_tokens(spec.context_tokens, spec.kv_tokens) / spec.kv_tokens
        ),
        "hicache-write-policy": "write_through",
        # Copies by the GPU's own copy engines: serving keeps its multiprocessors.
        "hicache-io-backend": "direct",
        "hicache-mem-layout": "layer_first",
        "hicache-storage-backend": "dynamic",
        "hicache-storage-backend-extra-config": _BACKEND,
        "hicache-storage-prefetch-policy": "wait_complete",
    }


def _for_adapter(launch: Launch) -> list[str]:
    """What makes SGLang ready for the adapters; the plugin has them loaded."""
    if launch.adapter is None:
        return []
    argv = ["--enable-lora", "--max-lora-rank", str(launch.adapter.rank)]
    argv += ["--max-loras-per-batch", str(pool_slots(launch.adapter.slots))]
    if launch.device == "cpu":
        argv += ["--lora-backend", "torch_native"]
    return [*argv, "--lora-target-modules", *launch.adapter.targets]


def environment(launch: Launch, inherited: Mapping[str, str], threads: int = 1) -> dict[str, str]:
    """The engine's whole environment; nothing else of the starter's reaches it.

    Args:
        launch: how the engine is started.
        inherited: the starter's environment, of which a few names pass.
        threads: threads of one operation on CPU.
    """
    chosen = common_environment(launch, inherited, python_path(launch), threads) | {
        "SGLANG_PLUGINS": "rose" if launch.plugged else "none",
        # Probes of ROSE go to the engine host; a health check must not generate tokens.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    }
    if launch.ranks > 1 and launch.device == "cpu":
        chosen["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(launch.ranks)))
    if launch.drafts:
        chosen[DRAFTS_VARIABLE] = "1"
    if launch.kv_store is not None:
        chosen[FOLDER_VARIABLE] = str(launch.kv_store)
        chosen[BYTES_VARIABLE] = str(launch.kv_store_bytes)
        if launch.kv_pool is not None:
            pool = launch.kv_pool
            told = replace(pool, python=pool.python or str(launch.python))
            chosen[POOL_VARIABLE] = to_text(told)
    if launch.activity is not None:
        chosen[activity.VARIABLE] = str(launch.activity)
    if launch.plugin_socket is not None and launch.adapter is not None:
        chosen[ADAPTER_VARIABLE] = msgspec.json.encode(launch.adapter).decode()
    return chosen


def python_path(launch: Launch) -> tuple[Path, ...]:
    """Folders in front of the engine's own packages."""
    folders = [_PATHS / "cpu"] if launch.device == "cpu" else []
    folders += [_PATHS / "plugin"] if launch.plugged else []
    return (*folders, *own_packages())
