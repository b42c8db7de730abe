"""What an engine takes besides weights and KV pool: estimated once, then measured and remembered.

Context, graphs, workspaces and the allocator's slack depend on the engine's version, the model's
shape, the GPU and the arguments, and no formula tells them. The first engine of a kind on a node
gets a cautious estimate; what it is seen to hold is remembered for the next ones (``Footprint``).

| remembered | the processes hold | then |
|---|---|---|
| nothing | anything within the estimate | remembered, the highest of the first minutes |
| nothing, or measured | more than promised | remembered; it goes on if that fits, else it waits |
| corrected before | more than was promised | it is ended (``MemoryOverrun``): it leaks |

So an estimate that is wrong costs one restart at most and never a loop of them. Next step:
``rose_agent.host.memory.footprints`` keeps them on the node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rose_core.devices.memory import CONTEXT_BYTES, GIB, EngineSize, in_gib, overrun

_MIB = 1 << 20
# Over what was measured: one more segment of the allocator for a longer prompt, and late kernels.
MARGIN_BYTES = 1 * GIB
# For how long after an engine began to serve its use is followed before it counts as measured:
# the first long prompts come in that time.
SETTLE_SECONDS = 600.0

# SGLang 0.5.23's own estimate of what is not static (``arg_groups/memory_hook.py``): constants,
# activations of a chunk, parallel slack, graphs. Its floor of 10 GiB on cards above 60 GB belongs
# to its *default* fraction; ROSE names a fraction, so there is none.
_CONSTANT_BYTES = 512 * _MIB + 128 * _MIB
_ACTIVATION_BYTES_PER_TOKEN = 3 * _MIB // 2
_LEAST_CHUNK = 2048
_GRAPH_BYTES_PER_REQUEST = 2 * _MIB
_PREFILL_GRAPH_BYTES = 512 * _MIB
_LATENT_PREFILL_GRAPH_BYTES = 1536 * _MIB


@dataclass(frozen=True)
class Footprint:
    """What engines of one kind were seen to hold besides weights and KV pool.

    Attributes:
        fixed: bytes, the highest seen.
        settled: the first minutes are over.
        corrected: an engine once held more than was promised, and the figure was raised.
    """

    fixed: int
    settled: bool = False
    corrected: bool = False


@dataclass(frozen=True)
class Judgement:
    """What follows from a look at an engine's processes.

    Attributes:
        footprint: to remember from now on; None = nothing is known yet.
        size: of the engine, as it is promised from now on.
        refusal: why the engine has to be ended; empty when it need not.
    """

    footprint: Footprint | None
    size: EngineSize
    refusal: str = ""


def estimate(arguments: Mapping[str, str], max_running: int, *, latent: bool) -> int:
    """A cautious figure for an engine that was never measured, bytes.

    Args:
        arguments: of the engine, as the lease gives them.
        max_running: requests at a time.
        latent: the model has MLA, whose graphs for prefill are larger.
    """
    chunk = int(arguments.get("chunked-prefill-size") or 512)
    activations = max(chunk, _LEAST_CHUNK) * _ACTIVATION_BYTES_PER_TOKEN
    graphs = max_running * _GRAPH_BYTES_PER_REQUEST
    graphs += _LATENT_PREFILL_GRAPH_BYTES if latent else _PREFILL_GRAPH_BYTES
    return CONTEXT_BYTES + _CONSTANT_BYTES + activations + graphs


def promised(known: Footprint | None, estimated: int) -> int:
    """What is promised to an engine for it, bytes."""
    return estimated if known is None else known.fixed + MARGIN_BYTES


def judge(
    known: Footprint | None,
    size: EngineSize,
    held: int | None,
    room: int | None,
    *,
    served_s: float,
) -> Judgement:
    """Judge what an engine's processes hold by the table of the module.

    Args:
        known: what is remembered of its kind.
        size: what it was promised.
        held: what the driver says that its processes hold; None = unknown.
        room: what may be lent of its GPU; None = unknown, then a correction fits.
        served_s: for how long it has served.
    """
    if held is None:
        return Judgement(known, size)
    seen = max(0, held - (size.total - size.fixed))
    over = overrun(size.total, held)
    if over and known is not None and known.corrected:
        return Judgement(known, size, f"{over}; it held less before, so it leaks")
    if over:
        footprint = Footprint(seen, settled=True, corrected=True)
        larger = replace(size, fixed=promised(footprint, 0))
        if room is not None and larger.total > room:
            text = f"{over}; {in_gib(larger.total)} are asked for from now on"
            return Judgement(footprint, larger, f"{text}, and {in_gib(room)} may be lent")
        return Judgement(footprint, larger)
    if known is not None and known.settled:
        return Judgement(known, size)
    highest = max(seen, known.fixed if known is not None else 0)
    return Judgement(Footprint(highest, settled=served_s >= SETTLE_SECONDS), size)
