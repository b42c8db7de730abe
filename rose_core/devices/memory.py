"""How much of a GPU's memory may be lent, what an engine takes of it, and when it is taken back.

Lendable memory is what serving has never needed:

    lendable = total - highest use of serving - headroom - residue of dormant engines

It is worked out per GPU and never summed: an engine takes its memory on one GPU. The headroom
follows from how serving holds its memory (``Headroom``):

| serving's pool | headroom | why |
|---|---|---|
| static (SGLang, vLLM) | 3 GiB; 4 in the first day, 6 in the first hour | ``STATIC_HEADROOM`` |
| elastic (kvcached) | 20 % of the GPU | it may grow by its whole KV cache at any moment |
| as the owner says | that, from the first moment | their word counts |

An engine that needs more than is lendable is refused with the figures. While it runs, the memory
that is free and serving's own KV use decide how much of its budget it may use:

| seen | budget | memory |
|---|---|---|
| serving's KV above ``high_permille`` | halved at once; again after ``cut_seconds`` | kept |
| free memory below half the headroom | halved at once | kept |
| free memory below a quarter of it | nothing | pressure: taken back (rung 4, else 5) |
| free memory unknown | does not grow | kept |
| calm for ``calm_seconds`` | grows by ``step_permille`` every ``step_seconds`` | kept |
| the pool says ``NextStep`` | frozen instead; whole once calm and on newer weights | kept |

The KV cache of an *elastic* engine comes and goes with the budget (``elastic``): the budget begins
small, and what serving used lately stands in for what it used in a day, since all but weights and
the least of the cache is given back by degrees.

Pressure ends when what is free covers the headroom and what the engine would take again, and has
done so for ``calm_seconds``. Next step: ``rose_agent.devices.watch`` reads the figures,
``model_size`` tells weights and KV of a model, ``footprint`` what an engine takes besides.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

GIB = 1 << 30

WHOLE = 1000


@dataclass(frozen=True)
class HighWater:
    """Highest memory use of serving over a sliding window, by buckets of it.

    Attributes:
        buckets: number of the bucket -> highest use in it, bytes, oldest first.
        since_s: when the first figure came.
    """

    window_s: float = 86_400.0
    bucket_s: float = 300.0
    buckets: tuple[tuple[int, int], ...] = ()
    since_s: float | None = None

    def observe(self, used_bytes: int, now_s: float) -> HighWater:
        """Take a figure of the memory in use."""
        number = int(now_s // self.bucket_s)
        oldest = int((now_s - self.window_s) // self.bucket_s)
        kept = {n: top for n, top in self.buckets if n >= oldest}
        kept[number] = max(kept.get(number, 0), used_bytes)
        since = now_s if self.since_s is None else self.since_s
        return replace(self, buckets=tuple(sorted(kept.items())), since_s=since)

    @property
    def bytes(self) -> int | None:
        """The highest; None before the first figure."""
        return max((top for _, top in self.buckets), default=None)

    def watched_s(self, now_s: float) -> float | None:
        """For how long figures have come; None before the first."""
        return None if self.since_s is None else now_s - self.since_s

    def lately(self, now_s: float, window_s: float = 900.0) -> int | None:
        """The highest of a shorter window; None without a figure in it."""
        oldest = int((now_s - window_s) // self.bucket_s)
        return max((top for n, top in self.buckets if n >= oldest), default=None)


@dataclass(frozen=True)
class MemorySum:
    """The sum behind what may be lent of one GPU, bytes.

    Attributes:
        total: of the GPU.
        serving: the most that serving was seen to use.
        headroom: kept free now; ``settled``: once serving was watched for a day.
        dormant: held by dormant engines of other slots.
    """

    total: int
    serving: int
    headroom: int
    settled: int
    dormant: int = 0

    @property
    def lends(self) -> int:
        """What is left."""
        return max(0, self.total - self.serving - self.headroom - self.dormant)

    @property
    def kept_back(self) -> int:
        """What serving does without so that rollouts have room; it would keep headroom anyway."""
        return min(self.lends + self.dormant, max(0, self.total - self.serving))

    @property
    def kept_for_lending(self) -> int:
        """The same while nobody borrows: what no engine fits into is kept back for nobody."""
        return self.kept_back if self.kept_back >= LEAST_ENGINE_BYTES else 0


@dataclass(frozen=True)
class Lendable:
    """What may be lent of one GPU.

    Attributes:
        bytes: None = unknown; then nothing is lent.
        message: the sum in figures, for people.
        parts: the sum itself; None = unknown.
    """

    bytes: int | None
    message: str
    parts: MemorySum | None = None

    def refusal(self, needed: int) -> str:
        """Why an engine of this size does not fit; empty when it does."""
        if self.bytes is None:
            return self.message
        if needed <= self.bytes:
            return ""
        short = needed - self.bytes
        return (
            f"the engine needs {in_gib(needed)}, {in_gib(short)} more than may be lent: "
            f"{self.message}"
        )


# Kept free beside a static pool, by how long serving has been watched. Its engine took weights, KV
# pool and graphs when it started, and the highest use of a day contains what its batches need at
# most. What may still come is small: a kernel that is loaded late, a segment of the allocator, a
# buffer of a collective; 3 GiB is several times all of them. Until a full batch was seen its peak
# is missing from the figure: SGLang's estimate for a batch of 2048 tokens is 3 GiB more.
STATIC_HEADROOM = ((86_400.0, 3 * GIB), (3_600.0, 4 * GIB), (0.0, 6 * GIB))
# Of the GPU, beside an elastic pool: what the ROSE paper keeps inside its executor.
ELASTIC_HEADROOM_PERCENT = 20


@dataclass(frozen=True)
class Headroom:
    """What is kept free above serving's highest use.

    Attributes:
        gib: as the owner says, GiB; ``percent``: of the GPU. Both None = by the kind of pool.
        elastic: serving's pool grows and shrinks while it runs.
    """

    gib: int | None = None
    percent: int | None = None
    elastic: bool = False

    def kept(self, total: int) -> int:
        """Kept at all times, bytes; budgets are cut by it."""
        return self.before_lending(total, STATIC_HEADROOM[0][0])

    def before_lending(self, total: int, watched_s: float | None) -> int:
        """Kept when memory is lent anew, bytes.

        Args:
            total: the GPU's memory, bytes.
            watched_s: how long serving's use has been watched; None = not yet.
        """
        if self.gib is not None:
            return self.gib * GIB
        if self.percent is not None or self.elastic:
            percent = ELASTIC_HEADROOM_PERCENT if self.percent is None else self.percent
            return total * percent // 100
        watched = watched_s or 0.0
        return next(kept for since, kept in STATIC_HEADROOM if watched >= since)


def lendable(
    total: int | None,
    high_water: int | None,
    headroom: Headroom,
    watched_s: float | None = None,
    residues: Iterable[int] = (),
) -> Lendable:
    """What may be lent of a GPU.

    Args:
        total: the GPU's memory, bytes.
        high_water: the most that serving was seen to use, bytes.
        headroom: kept for what serving has not used yet.
        watched_s: for how long it was watched.
        residues: bytes that dormant engines of other slots still hold.
    """
    if total is None or high_water is None:
        return Lendable(None, "the device driver does not tell how much memory serving uses")
    kept = headroom.before_lending(total, watched_s)
    held = sum(residues)
    parts = MemorySum(total, high_water, kept, headroom.kept(total), held)
    left = parts.lends
    later = kept - parts.settled
    message = (
        f"{in_gib(total)} in all, serving used up to {in_gib(high_water)}, headroom {in_gib(kept)}"
        f"{f' ({in_gib(later)} less once serving was watched for a day)' if later else ''}"
        f"{f', dormant engines hold {in_gib(held)}' if held else ''}: {in_gib(left)} may be lent"
    )
    return Lendable(left, message, parts)


# Below this there is room for nobody: context, graphs and one chunk's activations take as much
# before the first weight (``footprint.estimate``).
LEAST_ENGINE_BYTES = 4 * GIB

# A CUDA context with torch's kernels, before the first tensor; SGLang reads the free memory after
# it was made. Less is usual (0.4 to 0.7 GiB); a fraction that is a little too large does no harm.
CONTEXT_BYTES = 1 * GIB
# How far a model may turn out larger than its files say (tests hold ``model_size`` to it).
WEIGHTS_TOLERANCE_PERCENT = 5
# Rounding of the fraction, pages, padding slots of the pools.
_POOL_MARGIN = GIB // 4


@dataclass(frozen=True)
class EngineSize:
    """What an engine takes of each of its GPUs; all bytes but ``kv_tokens``.

    Attributes:
        weights: of the model as it is loaded.
        kv_per_token: of the KV cache, all layers.
        fixed: context, graphs, workspaces (``footprint``).
        first_permille: of the KV cache that it takes at its start; elastic engines begin small.
        kv_bundle: smallest piece in which an elastic KV cache comes and goes.
        state: pools that do not grow with the tokens: states of linear attention, image caches.
    """

    weights: int
    kv_per_token: int
    kv_tokens: int
    fixed: int
    first_permille: int = WHOLE
    kv_bundle: int = 0
    state: int = 0

    @property
    def kv(self) -> int:
        """The whole KV cache."""
        return self.kv_per_token * self.kv_tokens

    @property
    def start(self) -> int:
        """What must be there when it starts."""
        return self.weights + self.kv * self.first_permille // WHOLE + self.state + self.fixed

    @property
    def total(self) -> int:
        """Everything together."""
        return self.weights + self.kv + self.state + self.fixed

    def fraction(self, free: int) -> float:
        """SGLang's ``--mem-fraction-static`` where this much memory is free before it starts.

        SGLang takes it of the memory that is *free* when it loads, not of the whole GPU:

            pools = free after the weights - (1 - fraction) * free before the weights

        The KV pool itself is bounded by ``--max-total-tokens``, so the fraction is rounded up: too
        large, the pool is still the one that was promised; too small, SGLang builds a smaller one
        or ends with "Loaded weights leave no GPU memory for the KV cache".
        """
        before = max(1, free - min(CONTEXT_BYTES, self.fixed))
        spare = self.weights * WEIGHTS_TOLERANCE_PERCENT // 100 + _POOL_MARGIN
        thousandths = -(-1000 * (self.weights + self.kv + self.state + spare) // before)
        return min(1000, thousandths) / 1000


@dataclass(frozen=True)
class BudgetLimits:
    """Borders of the table of the module."""

    high_permille: int = 850
    low_permille: int = 600
    cut_seconds: float = 30.0
    calm_seconds: float = 30.0
    step_permille: int = 50
    step_seconds: float = 2.0
    least_permille: int = 125


@dataclass(frozen=True)
class MemorySeen:
    """One look at a GPU with serving and an engine on it; ``None`` = unknown.

    Attributes:
        free: memory that nobody holds, bytes.
        headroom: kept for serving, bytes.
        serving_kv_permille: use of serving's KV pool.
        engine_again: bytes that a dormant engine would take back; 0 when it is not dormant.
        step: the weights of the engines, where a cut budget is frozen until these change (``''``
            while nobody knows them); None = it grows by itself.
    """

    free: int | None
    headroom: int
    serving_kv_permille: int | None = None
    engine_again: int = 0
    step: str | None = None


@dataclass(frozen=True)
class Budget:
    """How much of its cap the engine may use, and whether serving needs its memory.

    Attributes:
        permille: of the slot's concurrency cap.
        pressure: the engine's memory is taken back.
        cut_s: when it was last halved; ``calm_s``: since when all has been calm.
        frozen_step: the weights under which it was last whole or cut.
    """

    permille: int = WHOLE
    pressure: bool = False
    cut_s: float | None = None
    calm_s: float | None = None
    grown_s: float = 0.0
    frozen_step: str = ""

    def cap(self, most: int) -> int:
        """Turns in flight out of ``most``; one while there is any budget."""
        return max(1, most * self.permille // WHOLE) if self.permille and most else 0


def steer(before: Budget, seen: MemorySeen, limits: BudgetLimits, now_s: float) -> Budget:
    """One look: cut at once, grow slowly."""
    if seen.free is not None and seen.free < seen.headroom // 4:
        step = seen.step or before.frozen_step
        return Budget(0, True, cut_s=now_s, grown_s=now_s, frozen_step=step)
    calm_since = before.calm_s if before.calm_s is not None else now_s
    calm = (
        replace(before, calm_s=calm_since) if _calm(seen, limits) else replace(before, calm_s=None)
    )
    if before.pressure:
        return _after_pressure(calm, limits, now_s)
    if _tight(seen, limits):
        return replace(_cut(calm, limits, now_s), frozen_step=seen.step or calm.frozen_step)
    if seen.step is not None:
        return _thaw(calm, seen.step)
    return _grow(calm, limits, now_s)


def _tight(seen: MemorySeen, limits: BudgetLimits) -> bool:
    kv_high = (seen.serving_kv_permille or 0) >= limits.high_permille
    return kv_high or (seen.free is not None and seen.free < seen.headroom // 2)


def _calm(seen: MemorySeen, limits: BudgetLimits) -> bool:
    if seen.free is None or seen.free - seen.engine_again < seen.headroom:
        return False
    kv = seen.serving_kv_permille
    return kv is None or kv < limits.low_permille


def _cut(before: Budget, limits: BudgetLimits, now_s: float) -> Budget:
    if before.cut_s is not None and now_s - before.cut_s < limits.cut_seconds:
        return before
    halved = max(limits.least_permille, before.permille // 2)
    return replace(before, permille=halved, cut_s=now_s, grown_s=now_s)


def _after_pressure(before: Budget, limits: BudgetLimits, now_s: float) -> Budget:
    if before.calm_s is None or now_s - before.calm_s < limits.calm_seconds:
        return before
    return replace(before, pressure=False, permille=limits.least_permille, grown_s=now_s)


def _thaw(before: Budget, step: str) -> Budget:
    """Whole again with the next step, unless serving still needs the memory."""
    if before.permille >= WHOLE or not before.frozen_step:
        return replace(before, frozen_step=step or before.frozen_step)
    if not step or step == before.frozen_step or before.calm_s is None:
        return before
    return replace(before, permille=WHOLE, frozen_step=step)


def _grow(before: Budget, limits: BudgetLimits, now_s: float) -> Budget:
    resting = before.calm_s is None or now_s - before.calm_s < limits.calm_seconds
    if before.permille >= WHOLE or resting or now_s - before.grown_s < limits.step_seconds:
        return before
    return replace(
        before, permille=min(WHOLE, before.permille + limits.step_permille), grown_s=now_s
    )


def overrun(size: int, held: int | None) -> str:
    """Why an engine has to be ended for what it holds; empty when it need not.

    Args:
        size: bytes that it was made for; 0 = not known.
        held: what the driver says that its processes hold; None = unknown.
    """
    if not size or held is None or held <= size:
        return ""
    return f"the engine holds {in_gib(held)} of its GPU and was made for {in_gib(size)}"


def limit_refusal(limit: int, total: int | None) -> str:
    """Why a driver limit does not hold; empty when the engine sees no more memory than it.

    Args:
        limit: bytes that the driver was told.
        total: bytes that the engine takes its GPU to have; None = it does not say.
    """
    if total is None:
        return "the engine does not say how much memory it sees, so its limit cannot be checked"
    if total <= limit:
        return ""
    return (
        f"the engine sees {in_gib(total)} although the driver limits it to {in_gib(limit)}: its "
        "cgroup is not the one that was limited, or the kernel hands dmem down to another one"
    )


def in_gib(size: int) -> str:
    """Bytes for people."""
    return f"{size / (1 << 30):.1f} GiB"
