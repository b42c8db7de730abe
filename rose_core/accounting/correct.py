"""What a correct answer cost, taken apart into what drives it, so that the parts give the bill.

    cost per correct = price per token x answer x reasoning x rollout ratio / accept rate

| factor | is | unit |
|---|---|---|
| price per token | the bill over the tokens sampled; of each tier too | money |
| answer | tokens of an accepted trajectory's answers, without reasoning | tokens |
| reasoning multiplier | tokens of an accepted trajectory over those of its answers | 1 or more |
| rollout ratio | tokens sampled for each that was trained on | 1 or more |
| accept rate | correct answers of the trajectories trained on | 0 to 1 |

The tokens are counted on both sides: sampled ones by engines, trained ones by the trainer. Money is
in micro-units. What nobody counted is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rose_core.accounting.cost import Cost
from rose_core.accounting.ledger import GpuTier

_MILLION = 1_000_000


@dataclass(frozen=True)
class Sampled:
    """Tokens of a run, each counted by whom it concerns.

    Attributes:
        by_tier: sampled by engines.
        trained: in trajectories that were trained on, by the trainer.
        reasoning: of those, tokens before the answers; None = the model's turns are answers.
    """

    by_tier: dict[GpuTier, int]
    trained: int
    reasoning: int | None = None

    @property
    def produced(self) -> int:
        """Trajectories of both tiers together."""
        return sum(self.by_tier.values())


@dataclass(frozen=True)
class CostCorrect:
    """The factors; ``total`` multiplies them again."""

    per_million: dict[GpuTier, float]
    share: dict[GpuTier, float]
    answer_tokens: float
    reasoning: float
    rollout_ratio: float
    accept_rate: float

    @property
    def blended(self) -> float:
        """Micro-units per million tokens of both tiers."""
        return sum(price * self.share[tier] for tier, price in self.per_million.items())

    @property
    def tokens(self) -> float:
        """Tokens sampled per correct answer."""
        return self.answer_tokens * self.reasoning * self.rollout_ratio / self.accept_rate

    @property
    def total(self) -> float:
        """Micro-units per correct answer."""
        return self.blended / _MILLION * self.tokens

    def borrowed_threshold(self, other: float) -> float | None:
        """Price of a million borrowed tokens up to which a correct answer costs ``other`` at most.

        Below zero: it costs more than that even if borrowing is free. None: nothing was borrowed.
        """
        borrowed = self.share.get(GpuTier.BORROWED, 0.0)
        if not borrowed:
            return None
        rest = self.blended - self.per_million.get(GpuTier.BORROWED, 0.0) * borrowed
        return (other / self.tokens * _MILLION - rest) / borrowed


def taken_apart(bill: Cost, tokens: Sampled, accepted: int, correct: int) -> CostCorrect | None:
    """The factors of a run; None where one of them is unknown: no token, none correct.

    Args:
        bill: what was paid. What lending took from serving and its weights' network belong to the
            borrowed tokens, and dedicated GPUs, the trainer's too, to the dedicated ones.
        tokens: that were sampled and trained on.
        accepted: trajectories trained on.
        correct: correct answers among them.
    """
    produced = tokens.produced
    if not produced or not tokens.trained or not accepted or not correct:
        return None
    used = {tier: count for tier, count in tokens.by_tier.items() if count}
    used_paid = _paid_for(bill, used)
    answers = tokens.trained - (tokens.reasoning or 0)
    if answers <= 0:
        return None
    return CostCorrect(
        per_million={tier: used_paid.get(tier, 0.0) / used[tier] * _MILLION for tier in used},
        share={tier: count / produced for tier, count in used.items()},
        answer_tokens=answers / accepted,
        reasoning=tokens.trained / answers,
        rollout_ratio=produced / tokens.trained,
        accept_rate=correct / accepted,
    )


def _paid_for(bill: Cost, used: Mapping[GpuTier, int]) -> dict[GpuTier, float]:
    """What the tiers that sampled tokens cost, in micro-units."""
    paid = {
        GpuTier.DEDICATED: bill.dedicated,
        GpuTier.BORROWED: bill.borrowed + bill.taken + bill.network,
    }
    if any(amount and tier not in used for tier, amount in paid.items()):
        # Nothing carries what that tier cost: by tier there is no price then.
        return {next(iter(used)): sum(paid.values())}
    return {tier: paid[tier] for tier in used}
