"""Engine specification -> command line and environment of SGLang; pure, with an allow-list.

RL teams name engine arguments in their lease. Only those of ``rose_core.api.arguments`` pass;
everything that could load code, open files, change memory sizes, expose admin routes or weaken the
stop stays ROSE's own decision. Next step: ``launch`` runs the command.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

import rose_engines
from rose_core.adapters import pool_slots
from rose_core.api.arguments import refusals
from rose_core.identity import BASE_LABEL
from rose_core.rollouts.drafts import MOST_TOKENS, verified_tokens
from rose_core.wire.sync import AdapterSpec, EngineSpec
from rose_engines import activity
from rose_engines.errors import ArgumentRefused

# An engine that is to stop ends its chunk first, while serving waits (the aim of gpu-check).
_CHUNK_MS = 25.0
# Over several GPUs a chunk of 20 ms is ended with its engine (decision 0190).
_CHUNK_TOGETHER_MS = 15.0
# An 8B on an H200 took 28 ms for 512 tokens after 2,048 tokens of context and 60 ms after 32,768
# (decision 0199): so much for a token, and for a token and each token of context before it.
_TOKEN_MS = 0.0505
_PAIR_MS = 2.03e-6
# SGLang takes any size; smaller ones than this spend more on launches than on tokens.
_CHUNK_STEP, _LARGEST_CHUNK = 16, 512
# Nodes of the tree of what an engine has said itself: some 100 MB on the host.
_OWN_NODES = 500_000

PERMIT_VARIABLE = "ROSE_PERMIT"
SOCKET_VARIABLE = "ROSE_PLUGIN_SOCKET"
# What becomes of cached KV at a commit (``kv``); unset = ``Keep``.
KV_VARIABLE = "ROSE_KV_POLICY"
# What becomes of an engine whose parameter layout is refused, from the host's environment: unset =
# it ends; ``disk`` = it loads patched checkpoints; ``disk-always`` = so whatever its layout.
FALLBACK_VARIABLE = "ROSE_LAYOUT_FALLBACK"
# Rank, modules and number of the adapters that the engine computes with, as JSON; unset = none.
ADAPTER_VARIABLE = "ROSE_ADAPTER"

# Set = the engine drafts tokens and verifies them (``drafts``).
DRAFTS_VARIABLE = "ROSE_DRAFTS"

# Made by the image: a copy of ROSE's packages, and nothing that they need.
OWN_PACKAGES = Path(sys.prefix) / "packages"
_PATHS = Path(__file__).with_name("paths")
# An engine may be stopped for hours; SGLang's watchdog counts wall clock and would kill it.
_WATCHDOG_SECONDS = 30 * 24 * 3600
# What an engine inherits of its starter's environment: nothing that could hold a secret.
_INHERITED = re.compile(
    r"^(PATH|HOME|LANG|LC_.*|TZ|TMPDIR|LD_LIBRARY_PATH|XDG_CACHE_HOME|CUDA_.*|NVIDIA_.*|NCCL_.*"
    r"|ROSE_LAYOUT_FALLBACK)$"
)


@dataclass(frozen=True)
class Launch:
    """Where and how one engine is started; the platform's part of the decision.

    Attributes:
        python: the engine environment's Python.
        model: model folder (safetensors).
        version: weight label at the start.
        permit: permit file, None = runs without one (serving engines).
        plugin_socket: control socket, None = no plugin.
        device: ``cpu`` or ``cuda``.
        memory_fraction: share of the memory that is free when it loads for weights and pools.
        state_slots: of a hybrid model's state pool; 0 = it has none.
        window_permille: tokens of the pool of sliding windows; 0 = it has none.
        quiet_log: only warnings in the engine's log.
        ranks: devices that one engine is spread over (tensor parallelism).
        kv_policy: ``Keep``, ``Recompute`` or ``Reuse`` (``rose_engines.sglang.kv``).
        adapter: the LoRA adapters whose versions it follows, None = those of whole models.
        activity: where it says what it does, before anybody freezes it; None = it does not.
        drafts: it drafts tokens and verifies them.
    """

    python: Path
    model: Path
    port: int
    host: str = "127.0.0.1"
    version: str = BASE_LABEL
    permit: Path | None = None
    plugin_socket: Path | None = None
    device: str = "cpu"
    memory_fraction: float = 0.2
    state_slots: int = 0
    window_permille: int = 0
    served_name: str = ""
    quiet_log: bool = False
    ranks: int = 1
    kv_policy: str = "Keep"
    adapter: AdapterSpec | None = None
    activity: Path | None = None
    drafts: bool = False

    @property
    def plugged(self) -> bool:
        """ROSE's plugin runs inside."""
        return self.permit is not None or self.plugin_socket is not None


def prefill_chunk(context_tokens: int, ranks: int = 1) -> int:
    """Tokens of a prefill chunk that ends in time, also at the end of a context of this length.

    Larger models and smaller GPUs take longer; a lease may name a smaller chunk. What several GPUs
    gain is left to the larger models that are spread over them.
    """
    most_ms = _CHUNK_MS if ranks == 1 else _CHUNK_TOGETHER_MS
    fits = int(most_ms / (_TOKEN_MS + _PAIR_MS * context_tokens))
    return max(_CHUNK_STEP, min(_LARGEST_CHUNK, fits // _CHUNK_STEP * _CHUNK_STEP))


def check_arguments(arguments: Mapping[str, str]) -> None:
    """Refuse arguments outside the allow-list, whatever the operator has let through.

    Raises:
        ArgumentRefused: names the arguments that may not pass, and why.
    """
    sentences = refusals(arguments)
    if sentences:
        raise ArgumentRefused("; ".join(sentences))


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
    chosen = own | dict(spec.arguments) | _for_drafts(spec, launch.ranks)
    argv = [str(launch.python), "-m", "rose_engines.sglang.launch"]
    for name, value in chosen.items():
        argv += [f"--{name}"] if value in {"", "true"} else [f"--{name}", value]
    return argv + _for_adapter(launch)


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
    chosen = inherit(inherited) | {
        "PYTHONPATH": ":".join(map(str, python_path(launch))),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(threads),
        "SGLANG_PLUGINS": "rose" if launch.plugged else "none",
        # Probes of ROSE go to the engine host; a health check must not generate tokens.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    }
    if launch.ranks > 1 and launch.device == "cpu":
        chosen["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(launch.ranks)))
    if launch.permit is not None:
        chosen[PERMIT_VARIABLE] = str(launch.permit)
    if launch.drafts:
        chosen[DRAFTS_VARIABLE] = "1"
    if launch.activity is not None:
        chosen[activity.VARIABLE] = str(launch.activity)
    if launch.plugin_socket is not None:
        chosen[SOCKET_VARIABLE] = str(launch.plugin_socket)
        chosen[KV_VARIABLE] = launch.kv_policy
        if launch.adapter is not None:
            chosen[ADAPTER_VARIABLE] = msgspec.json.encode(launch.adapter).decode()
    return chosen


def inherit(starters: Mapping[str, str]) -> dict[str, str]:
    """What an engine has of its starter's environment."""
    return {name: value for name, value in starters.items() if _INHERITED.match(name)}


def python_path(launch: Launch) -> tuple[Path, ...]:
    """Folders in front of the engine's own packages."""
    folders = [_PATHS / "cpu"] if launch.device == "cpu" else []
    folders += [_PATHS / "plugin"] if launch.plugged else []
    return (*folders, *own_packages())


def own_packages() -> tuple[Path, ...]:
    """Folders of ROSE's packages, for an engine's Python.

    ROSE's packages come from the checkout, or from the image's folder of nothing else. A foreign
    site-packages on the path would replace the engine's libraries; so where ROSE is installed in
    one, its copy in ``packages`` beside the environment is taken, and where there is none, the
    engine's environment must have rose-gpu installed itself.
    """
    engines = Path(rose_engines.__file__).resolve().parents[1]
    if engines.name == "engines":
        return (engines, engines.parent)
    if engines.name not in {"site-packages", "dist-packages"}:
        return (engines,)
    return (OWN_PACKAGES,) if (OWN_PACKAGES / "rose_engines").is_dir() else ()
