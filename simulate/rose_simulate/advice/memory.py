"""What serving's memory setting makes lendable, and what its owner gives up for it. Pure.

An engine with a static pool holds, from its start to its end,

    SGLang  --mem-fraction-static     fraction x (GPU - context) + context + besides
    vLLM    --gpu-memory-utilization  fraction x GPU

and its KV pool is what of that is neither weights nor besides (SGLang's fraction is of the memory
that is free when it loads, and covers weights and pools alone; vLLM's covers all). What is left of
the GPU, less the headroom, is what a rollout engine may have (``rose_core.devices.memory``). Next
step: ``rose_simulate.advise_memory`` reads the models and prints the table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from rose_core.devices.memory import (
    CONTEXT_BYTES,
    GIB,
    STATIC_HEADROOM,
    EngineSize,
    Headroom,
    in_gib,
    lendable,
)
from rose_simulate.advice.errors import NoRoom

# What SGLang gives a hybrid model's states, to its KV pool (``--mamba-full-memory-ratio``).
_STATES_TO_KV = 0.9
# Fractions are compared in steps of it when the largest one that lends enough is looked for.
_STEP = 0.01
_LONG_S = STATIC_HEADROOM[0][0]


class Engine(StrEnum):
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
    engine: Engine = Engine.SGLANG

    def used(self, card: int, fraction: float) -> int:
        """The most that it holds of a GPU, bytes."""
        if self.engine is Engine.VLLM:
            return int(card * fraction)
        return int((card - CONTEXT_BYTES) * fraction) + CONTEXT_BYTES + self.besides

    def pool(self, card: int, fraction: float) -> int:
        """Its KV pool, bytes; below zero it does not start."""
        if self.engine is Engine.VLLM:
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
