"""Engine specification -> command line and environment of vLLM; pure, with an allow-list.

What a lease may set is in ``rose_core.api.arguments``, with vLLM's name of it where there is one;
the rest is refused by name. Next step: ``launch`` runs the command.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rose_core.api.arguments import ALLOWED
from rose_core.guard.chunk import prefill_chunk
from rose_core.rollouts.requests.fields import MOST_TOP
from rose_core.wire.sync import EngineSpec
from rose_engines.errors import ArgumentRefused
from rose_engines.process.launch import (
    Launch,
    check_arguments,
    command_line,
    common_environment,
    own_packages,
)

SUPPORTED = "0.32.0"

VERSION_VARIABLE = "ROSE_WEIGHT_VERSION"
"""Weight label at the start: vLLM has no argument for it."""

PLUGIN = "rose"
"""Name of ROSE's entry points, the only ones that are loaded."""

# Tokens of a block of KV; vLLM's kernels on CPU want it so.
_BLOCK = 128
# vLLM keeps one block for itself.
_SPARE_BLOCKS = 1
_PATHS = Path(__file__).with_name("paths")

_SAME = {name: one.vllm for name, one in ALLOWED.items() if one.vllm}
"""SGLang's name of an argument -> vLLM's, where both mean the same."""


def command(spec: EngineSpec, launch: Launch) -> list[str]:
    """The engine's command line.

    Raises:
        ArgumentRefused: an argument, or something else that the lease asks for, is not for vLLM.
    """
    _check(spec, launch)
    chunk = spec.arguments.get("chunked-prefill-size") or prefill_chunk(spec.context_tokens)
    own = {
        "model": str(launch.model),
        "load-format": "safetensors",
        "served-model-name": launch.served_name or spec.model,
        "host": launch.host,
        "port": str(launch.port),
        "max-model-len": str(spec.context_tokens),
        "num-gpu-blocks-override": str(-(-spec.kv_tokens // _BLOCK) + _SPARE_BLOCKS),
        "block-size": str(_BLOCK),
        "max-num-seqs": str(spec.max_running),
        "max-num-batched-tokens": str(max(int(chunk), spec.max_running)),
        # The worker in the engine core's process: one boundary for both.
        "distributed-executor-backend": "uni",
        # One iteration at a time: a commit finds no result of the old weights still under way.
        "no-async-scheduling": "",
        # Commits under captured graphs and compiled code were not tried.
        "enforce-eager": "",
        # Of the logits over the temperature, as SGLang's (``plugin``).
        "logprobs-mode": "processed_logprobs",
        "max-logprobs": str(MOST_TOP),
        # Sampling is what the turn says: no defaults of the model's folder.
        "generation-config": "vllm",
        "disable-uvicorn-access-log": "",
        "uvicorn-log-level": "warning",
    }
    given = {_SAME[name]: value for name, value in spec.arguments.items()}
    given.pop("max-num-batched-tokens", None)
    return command_line(launch, "rose_engines.vllm.launch", own | given)


def _check(spec: EngineSpec, launch: Launch) -> None:
    check_arguments(spec.arguments)
    foreign = sorted(name for name in spec.arguments if name not in _SAME)
    if foreign:
        have = ", ".join(sorted(_SAME))
        raise ArgumentRefused(f"engine argument {foreign[0]!r} is not for vLLM; it takes {have}")
    wrong = {
        "a GPU": launch.device != "cpu",
        "gpusPerSlot above 1": launch.ranks > 1,
        "adapters": launch.adapter is not None,
        "drafts": spec.drafts,
        "kvStoreGiB": spec.kv_store_bytes,
        "memorySource Elastic": spec.sharing.memory_source == "Elastic",
    }
    for what, asked in wrong.items():
        if asked:
            raise ArgumentRefused(f"{what}: not supported in an engine of vLLM; take SGLang")


def environment(launch: Launch, inherited: Mapping[str, str], threads: int = 1) -> dict[str, str]:
    """The engine's whole environment; nothing else of the starter's reaches it.

    Args:
        launch: how the engine is started.
        inherited: the starter's environment, of which a few names pass.
        threads: threads of one operation on CPU.
    """
    folders = (_PATHS, *own_packages())
    return common_environment(launch, inherited, folders, threads) | {
        "VLLM_PLUGINS": PLUGIN,
        "VLLM_NO_USAGE_STATS": "1",
        # `uni` alone is silently turned back into processes on CPU.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        # vLLM compiles its sampling and ranks at the first turn, `enforce-eager` or not; that needs
        # a C++ compiler, which images have not, and the core would end with all turns.
        "TORCH_COMPILE_DISABLE": "1",
        # GiB, and at least one: what is taken is given by the number of blocks.
        "VLLM_CPU_KVCACHE_SPACE": "1",
        VERSION_VARIABLE: launch.version,
    }
