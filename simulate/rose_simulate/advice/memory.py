"""What serving's memory setting makes lendable, and what its owner gives up for it. Pure.

An engine with a static pool holds, from its start to its end,

    SGLang  --mem-fraction-static     fraction x (GPU - context) + context + besides
    vLLM    --gpu-memory-utilization  fraction x GPU

and its KV pool is what of that is neither weights nor besides (SGLang's fraction is of the memory
that is free when it loads, and covers weights and pools alone; vLLM's covers all). What is left of
the GPU, less the headroom, is what a rollout engine may have (``rose_core.devices.memory``). Next
step: ``rose_simulate.verbs.advise_memory`` reads the models and prints the table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from rose_core.devices.memory import (
    CONTEXT_BYTES,
    GIB,
    STATIC_HEADROOM,
    EngineSize,
    Headroom,
    MemorySum,
    in_gib,
    lendable,
)
from rose_simulate.advice.errors import NoRoom

# What SGLang gives a hybrid model's states, to its KV pool (``--mamba-full-memory-ratio``).
_STATES_TO_KV = 0.9
# Fractions are compared in steps of it when the largest one that lends enough is looked for.
_STEP = 0.01
_LONG_S = STATIC_HEADROOM[0][0]


class ServingEngineKind(StrEnum):
    """The serving engine, for what its fraction is of."""

    SGLANG = "SGLang"
    VLLM = "VLLM"


@dataclass(frozen=True)
class Serving:
    """The serving engine on one of its GPUs, bytes.

    Attributes:
        weights: on this GPU.
        per_token: of its KV pool, on this GPU.
        hybrid: a part of its pool goes to states.
        besides: context aside, what it holds besides weights and pools: graphs, activations.
    """

    weights: int
    per_token: int
    hybrid: bool = False
    besides: int = 3 * GIB
    engine: ServingEngineKind = ServingEngineKind.SGLANG

    def used(self, card: int, fraction: float) -> int:
        """The most that it holds of a GPU, bytes."""
        if self.engine is ServingEngineKind.VLLM:
            return int(card * fraction)
        return int((card - CONTEXT_BYTES) * fraction) + CONTEXT_BYTES + self.besides

    def pool(self, card: int, fraction: float) -> int:
        """Its KV pool, bytes; below zero it does not start."""
        if self.engine is ServingEngineKind.VLLM:
            left = int(card * fraction) - CONTEXT_BYTES - self.besides - self.weights
        else:
            left = int((card - CONTEXT_BYTES) * fraction) - self.weights
        return int(left / (1 + _STATES_TO_KV)) if self.hybrid else left

    def tokens(self, card: int, fraction: float) -> int:
        """Tokens in that pool."""
        return max(0, self.pool(card, fraction)) // self.per_token


@dataclass(frozen=True)
class Setting:
    """One fraction and what follows from it; bytes but ``fraction`` and tokens.

    Attributes:
        lends: to rollouts, once serving was watched for a day; ``first_hour``: before.
        tokens: of serving's KV pool; 0 = serving does not start.
        given_up: tokens fewer than at the first fraction that was asked about.
        rollout_tokens: KV tokens for which the rollouts' engine would have room; 0 = it does not
            fit.
    """

    fraction: float
    lends: int
    first_hour: int
    tokens: int
    given_up: int
    rollout_tokens: int

    def fits(self, rollout: EngineSize) -> bool:
        """The engine as it was asked for has room."""
        return rollout.total <= self.lends


def settings(
    card: int, serving: Serving, rollout: EngineSize, headroom: Headroom, fractions: Iterable[float]
) -> tuple[Setting, ...]:
    """What each fraction of serving lends and costs.

    Args:
        card: the GPU's memory, bytes.
        serving: on it.
        rollout: an engine of the leases.
        headroom: of the pool.
        fractions: the first is the one that the others are compared with.
    """
    asked = tuple(fractions)
    most = serving.tokens(card, asked[0]) if asked else 0
    found = []
    for fraction in asked:
        high, tokens = serving.used(card, fraction), serving.tokens(card, fraction)
        lends = lendable(card, high, headroom, _LONG_S).bytes or 0
        first_hour = lendable(card, high, headroom, 0.0).bytes or 0
        left = max(0, lends - (rollout.total - rollout.kv)) // rollout.kv_per_token
        found.append(Setting(fraction, lends, first_hour, tokens, most - tokens, left))
    return tuple(found)


def largest(card: int, serving: Serving, rollout: EngineSize, headroom: Headroom) -> Setting:
    """The setting that costs serving least of those at which the rollouts' engine fits.

    Raises:
        NoRoom: there is none at which serving keeps a KV pool.
    """
    steps = [round(one * _STEP, 2) for one in range(99, 0, -1)]
    found = [one for one in settings(card, serving, rollout, headroom, steps) if one.tokens]
    fitting = next((one for one in found if one.fits(rollout)), None)
    if fitting is not None:
        return fitting
    needs = f"a rollout engine needs {in_gib(rollout.total)} of one GPU"
    parts = (
        f"weights {in_gib(rollout.weights)}, KV {in_gib(rollout.kv)}, "
        f"besides {in_gib(rollout.fixed + rollout.state)}"
    )
    if not found:
        raise NoRoom(
            f"{needs} ({parts}), and serving's weights of {in_gib(serving.weights)} leave no KV "
            f"pool on a GPU of {in_gib(card)} at any fraction"
        )
    least = found[-1]
    whole = rollout.total <= card - headroom.kept(card)
    way = "lend whole replicas (wholeReplica)" if whole else "take GPUs with more memory"
    raise NoRoom(
        f"{needs} ({parts}); at fraction {least.fraction:.2f}, the least at which serving keeps a "
        f"KV pool beside its weights of {in_gib(serving.weights)}, {in_gib(least.lends)} of "
        f"{in_gib(card)} may be lent: {in_gib(rollout.total - least.lends)} are missing: "
        f"{way}, or take a smaller model"
    )


# By how much less of a fraction the table goes on, and how far: serving keeps something.
_LESS = (0.05, 0.1, 0.2, 0.3)
_MOST_LESS = 0.9


@dataclass(frozen=True)
class SettingChange:
    """One setting, changed by itself, and what follows on a GPU as it was measured; bytes.

    Attributes:
        setting: what is changed, as it is written; empty = nothing is.
        lends: to rollouts.
        takes: the lease's engine.
        pool: that serving's KV pool loses; ``tokens``: as tokens, None = its model is not known.
        margin: less memory that is kept free.
        starts: serving still has a KV pool; None = its model is not known.
    """

    setting: str
    lends: int
    takes: int
    pool: int = 0
    tokens: int | None = None
    margin: int = 0
    starts: bool | None = None

    @property
    def fits(self) -> bool:
        """The lease's engine has room."""
        return self.takes <= self.lends and self.starts is not False


def changes(
    parts: MemorySum,
    rollout: EngineSize,
    engine: ServingEngineKind,
    *,
    serving: Serving | None = None,
    fp8_weights: int | None = None,
) -> tuple[SettingChange, ...]:
    """What each setting of owner and lease would change, on a GPU as its guard has measured it.

    Args:
        parts: of the replica's tightest GPU.
        rollout: the lease's engine.
        engine: that serves.
        serving: its model on this GPU; None = not known.
        fp8_weights: of the lease's model as an FP8 checkpoint; None = not known, or it is one.
    """
    needs = rollout.total
    found = [SettingChange("", parts.lends, needs)]
    if parts.headroom > parts.settled:
        found.append(SettingChange("watched for a day", _lends(parts, parts.settled), needs))
    smaller = [_smaller(parts, needs, engine, serving, less) for less in _LESS]
    least = _least(parts, needs, engine, serving)
    if least is not None and least not in smaller:
        smaller.append(least)
    found += sorted(smaller, key=lambda one: one.pool)
    for gib in (2, 1):
        if gib * GIB < parts.headroom:
            margin = parts.headroom - gib * GIB
            lends = _lends(parts, gib * GIB)
            found.append(SettingChange(f"memoryHeadroomGiB: {gib}", lends, needs, margin=margin))
    for part in (2, 4):
        tokens = rollout.kv_tokens // part
        takes = needs - rollout.kv + tokens * rollout.kv_per_token
        found.append(SettingChange(f"kvTokens: {tokens}", parts.lends, takes))
    if fp8_weights is not None:
        takes = needs - rollout.weights + fp8_weights
        found.append(SettingChange("FP8 checkpoint", parts.lends, takes))
    return tuple(found)


def _lends(parts: MemorySum, headroom: int) -> int:
    return replace(parts, headroom=headroom).lends


def _smaller(
    parts: MemorySum, needs: int, engine: ServingEngineKind, serving: Serving | None, less: float
) -> SettingChange:
    """Serving with a smaller fraction than it has now."""
    model = serving if serving is not None else Serving(0, 1, engine=engine)
    freed = model.used(parts.total, 1.0) - model.used(parts.total, 1.0 - less)
    lends = replace(parts, serving=parts.serving - freed).lends
    pool = model.pool(parts.total, 1.0) - model.pool(parts.total, 1.0 - less)
    tokens = starts = None
    if serving is not None:
        tokens = pool // serving.per_token
        besides = CONTEXT_BYTES + serving.besides
        starts = parts.serving - freed > serving.weights + besides
    flag = (
        "--gpu-memory-utilization" if engine is ServingEngineKind.VLLM else "--mem-fraction-static"
    )
    return SettingChange(f"{flag} {less:.2f} less", lends, needs, pool, tokens, starts=starts)


def _least(
    parts: MemorySum, needs: int, engine: ServingEngineKind, serving: Serving | None
) -> SettingChange | None:
    """The least that the owner has to give up for the engine; None = nothing, or too much."""
    if needs <= parts.lends:
        return None
    steps = (round(one * _STEP, 2) for one in range(1, int(_MOST_LESS / _STEP) + 1))
    tried = (_smaller(parts, needs, engine, serving, less) for less in steps)
    return next((one for one in tried if one.fits), None)
