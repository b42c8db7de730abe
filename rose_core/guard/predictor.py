"""Predicts prefill and decode cost, alone and beside a rollout engine.

A profile gives the shape (cost per prompt byte and per request in the batch) and how much slower
each phase is beside a rollout engine; a ``Mixture`` for each phase corrects both from what the tap
sees. What is predicted is a high *quantile* of the cost, not its mean. ``StopCost`` tells routers
what co-running costs where only idle gaps are lent. Next step: ``slack`` asks for predictions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from rose_core.stats import Recent

_MEMORY = 0.98  # forgetting factor: 1 / (1 - 0.98) = the last fifty requests carry the weight
_REMEMBERED = 200  # costs: twenty lie above the 0.9 quantile, and another load is soon learned
_UNSEEN = 1e-3  # of a request: the profile is the line until there is one, and then seen no more
_BELIEF = 4.0  # requests that the prior of the slope counts for: few, so that evidence wins soon
_STOP_MEMORY = 0.995  # the last two hundred: what it costs is the device's, and seldom changes
# Variance of a prefill, relative, over that of what is believed of the loss: (0.1 / 0.25)^2.
_STOP_BELIEF = 0.16
_STALL = 4.0  # times what nine of ten prefills of that size take alone: far outside their spread
_SLOWEST = 10.0  # a loss of 1 would mean that nothing ever ends beside rollouts
_FURTHEST = 100.0  # from the profile, by which one request may be off: one stall is no line


@dataclass(frozen=True)
class SpeedLine:
    """Relative speed over the share of open time."""

    alone: float
    loss: float

    def cost(self, share: float) -> float:
        """Multiple of the profile's cost alone."""
        return 1 / (self.alone * (1 - share * self.loss))


_NO_COSTS = Recent()


@dataclass(frozen=True)
class Mixture:
    """Learns the cost of one phase, alone and beside a rollout engine, from finished requests.

    Two known algorithms: weighted least squares with exponential forgetting and a prior in the form
    of pseudo-observations (a line), and adaptive conformal inference for a quantile of what
    requests would have cost alone (``stats.Recent``).

    Under a duty cycle no request runs wholly alone or wholly beside rollouts. One that met an open
    gate for a share ``f`` of its time ran, as a multiple of the speed that the profile predicts, at

        y = alone x (1 - f x loss),        loss = 1 - 1 / slowdown

    So a line through many requests gives both ``alone`` and ``loss``. It has to be steadied: a
    replica that is never idle hardly ever runs alone, and under a steady duty all shares are alike.
    Then only the height of the line is known, and a slope read from it would take every stutter of
    serving for harm done by rollouts.

    | part | from |
    |---|---|
    | height | the last fifty requests or so; a new replica starts at the profile |
    | slope | the same, against the weight of ``_BELIEF`` requests at the profile's slowdown |
    | a quantile of the cost | the last 200, each less what the line puts down to rollouts |

    The line is sums over what was seen, each request weighing less with each one after it. With
    fewer than nine requests (of a 0.9 quantile) the cost is the largest of them and the profile's.

    Attributes:
        weight, share, square, speed, product: sums of 1, f, f^2, y, f y.
        costs: of the last requests, had nothing been lent, as multiples of the profile's.
        adjustment: of the quantile's level, so that it holds what it claims (``stats.Recent``).
    """

    weight: float = _UNSEEN
    share: float = 0.0
    square: float = 0.0
    speed: float = _UNSEEN
    product: float = 0.0
    costs: Recent = _NO_COSTS
    adjustment: float = 0.0

    def line(self, slowdown: float) -> SpeedLine:
        """The line through what was seen; ``slowdown`` is the profile's, from which it starts."""
        # 1. The prior's slope, as a loss.
        believed = 1 - 1 / max(1.0, slowdown)
        # 2. The height alone, by least squares with that slope: where the prior is put.
        fitted = self.speed - believed * self.product
        level = fitted / (self.weight - 2 * believed * self.share + believed**2 * self.square)
        # 3. The prior as pseudo-observations on that line: half its weight at f = 0, half at f = 1.
        half = _BELIEF / 2
        weight, share, square = self.weight + 2 * half, self.share + half, self.square + half
        speed = self.speed + half * level * (2 - believed)
        product = self.product + half * level * (1 - believed)
        # 4. Both by least squares (the normal equations of y = alone - slope x f), kept in bounds.
        slope = (share * speed - weight * product) / (weight * square - share**2)
        alone = max((speed + slope * share) / weight, 1e-6)
        return SpeedLine(alone, min(1 - 1 / _SLOWEST, max(0.0, slope / alone)))

    def factor(self, slowdown: float, *, shared: bool, quantile: float) -> float:
        """Multiple of the profile's cost alone that so many requests do not exceed."""
        alone = self._alone(quantile)
        return alone / (1 - self.line(slowdown).loss) if shared else alone

    def _alone(self, quantile: float) -> float:
        seen = self.costs.ordered
        few = len(seen) < quantile / (1 - quantile) - 1e-9
        first = 1.0 if few else 0.0
        return max(first, self.costs.bound(quantile, self.adjustment)) if seen else first

    def add(self, seen: float, share: float, slowdown: float, *, quantile: float) -> Mixture:
        """Learn from one request.

        Args:
            seen: its cost as a multiple of the profile's cost alone.
            share: of its time beside an open gate.
            slowdown: the profile's.
            quantile: share of requests that should not be slower than predicted.
        """
        alone = seen * (1 - share * self.line(slowdown).loss)
        missed = alone > self._alone(quantile)
        y = 1 / min(_FURTHEST, max(1 / _FURTHEST, seen))
        return Mixture(
            weight=_MEMORY * self.weight + 1,
            share=_MEMORY * self.share + share,
            square=_MEMORY * self.square + share**2,
            speed=_MEMORY * self.speed + y,
            product=_MEMORY * self.product + share * y,
            costs=self.costs.add(alone, _REMEMBERED),
            adjustment=Recent.adjust(self.adjustment, quantile, missed=missed),
        )


@dataclass(frozen=True)
class StopCost:
    """Learns what a second costs a prefill for which rollouts still compute, from idle gaps.

    Whoever lends idle gaps shuts the gate at an arrival, so no request there has a share of *open*
    time and ``Mixture`` never leaves its profile. But what is on the GPU by then runs on, for as
    long as rollouts take to stop. A request that met the replica empty took

        ttft = base + rate x size + loss x stop,        loss = 1 - 1 / slowdown

    Least squares with exponential forgetting, each request weighted by its size, and a prior for
    the loss alone (ridge regression). How long a stop takes hangs on where in its step the engine
    was and not on the request, so a profile of the wrong shape makes the loss less sure, and biases
    nothing. Where stops are short beside prompts the prior stays.

    Attributes:
        squares: sums of products of (1, size, stop): 11, 1s, 1t, ss, st, tt.
        products: sums of their products with the time to first token.
    """

    squares: tuple[float, ...] = (0.0,) * 6
    products: tuple[float, ...] = (0.0,) * 3

    def learn(
        self, size: int, ttft_s: float, stop_s: float, scale_s: float, alone_s: float
    ) -> StopCost:
        """Learn from a time to first token on an empty replica.

        One that took far longer than rollouts can account for teaches nothing. Squares have no
        bound: one stall of ten seconds would be taken for harm done by rollouts for hundreds of
        requests.

        Args:
            size: bytes of its body; less than 0 = unknown, which teaches nothing.
            ttft_s: the time.
            stop_s: of it, how long rollouts took to stop; 0 = none computed, also where an engine
                without turns was stopped.
            scale_s: what a body of this size takes, roughly: errors are relative to it.
            alone_s: a high quantile of what one of this size takes, as learned.
        """
        if size < 0 or ttft_s <= 0 or scale_s <= 0:
            return self
        if ttft_s - stop_s > _STALL * alone_s:
            return self
        one, kilobytes, stop = 1 / scale_s, size / 1024 / scale_s, min(stop_s, ttft_s) / scale_s
        row, seen = (one, kilobytes, stop), ttft_s / scale_s
        pairs = (row[i] * row[j] for i in range(3) for j in range(i, 3))
        return StopCost(
            tuple(_STOP_MEMORY * old + new for old, new in zip(self.squares, pairs, strict=True)),
            tuple(_STOP_MEMORY * old + x * seen for old, x in zip(self.products, row, strict=True)),
        )

    def slowdown(self, believed: float) -> float:
        """How many times slower serving is beside rollouts; ``believed`` = before it was seen."""
        prior = 1 - 1 / max(1.0, believed)
        aa, ab, ac, bb, bc, cc = self.squares
        ya, yb, yc = self.products
        if not aa:
            return max(1.0, believed)
        # Base and rate are eliminated; all sizes alike leave only the base.
        spread = bb - ab * ab / aa
        known = spread > 1e-9 * bb
        bc, yb = bc - ab * ac / aa, yb - ab * ya / aa
        rest, seen = cc - ac * ac / aa, yc - ac * ya / aa
        if known:
            rest, seen = rest - bc * bc / spread, seen - bc * yb / spread
        loss = (seen + _STOP_BELIEF * prior) / (max(0.0, rest) + _STOP_BELIEF)
        return 1 / (1 - min(1 - 1 / _SLOWEST, max(0.0, loss)))


@dataclass(frozen=True)
class CostProfile:
    """Shape of the cost of one engine kind on one device; seconds.

    Prompt size is the request body's bytes: the tap does not tokenise.
    """

    prefill_base_s: float = 0.015
    prefill_per_kilobyte_s: float = 0.06
    decode_base_s: float = 0.008
    decode_per_request_s: float = 0.001
    shared_prefill: float = 2.0
    shared_decode: float = 2.0

    def prefill_s(self, size: int) -> float:
        """Time to first token alone for a body of ``size`` bytes (unknown: -1)."""
        known = size if size >= 0 else 8192
        return self.prefill_base_s + self.prefill_per_kilobyte_s * known / 1024

    def decode_s(self, running: int) -> float:
        """Time per token alone with ``running`` requests in the batch."""
        return self.decode_base_s + self.decode_per_request_s * max(1, running)


_UNTAUGHT = Mixture()


@dataclass(frozen=True)
class Predictor:
    """A profile and what was learned about each phase.

    Attributes:
        quantile: share of requests that should not be slower than predicted.
    """

    profile: CostProfile = CostProfile()
    quantile: float = 0.9
    prefill: Mixture = _UNTAUGHT
    decode: Mixture = _UNTAUGHT

    def prefill_s(self, size: int, *, shared: bool) -> float:
        """Predicted time to first token for a body of ``size`` bytes (unknown: -1)."""
        return self.profile.prefill_s(size) * self._prefill_factors[shared]

    def decode_s(self, running: int, *, shared: bool) -> float:
        """Predicted time per token with ``running`` requests in the batch."""
        return self.profile.decode_s(running) * self._decode_factors[shared]

    # A gate asks many times a second, and what was learned changes only when a request ends.
    @cached_property
    def _prefill_factors(self) -> tuple[float, float]:
        """Of a prefill alone, and beside a rollout engine."""
        return self._factors(self.prefill, self.profile.shared_prefill)

    @cached_property
    def _decode_factors(self) -> tuple[float, float]:
        """Of a decode step alone, and beside a rollout engine."""
        return self._factors(self.decode, self.profile.shared_decode)

    def learn_prefill(self, size: int, seconds: float, *, share: float) -> Predictor:
        """Learn from a time to first token that met an open gate for ``share`` of it."""
        seen, slowdown = seconds / self.profile.prefill_s(size), self.profile.shared_prefill
        learned = self._learned(self.prefill, seen, share, slowdown)
        return Predictor(self.profile, self.quantile, learned, self.decode)

    def learn_decode(self, running: int, seconds: float, *, share: float) -> Predictor:
        """Learn from a mean time per token that met an open gate for ``share`` of it."""
        seen, slowdown = seconds / self.profile.decode_s(running), self.profile.shared_decode
        learned = self._learned(self.decode, seen, share, slowdown)
        return Predictor(self.profile, self.quantile, self.prefill, learned)

    def slowdown(self) -> float:
        """How many times slower a decode step is beside a rollout engine; at least 1."""
        return 1 / (1 - self.loss(decoding=True))

    def loss(self, *, decoding: bool) -> float:
        """Share of a phase's speed that is lost beside a rollout engine."""
        if decoding:
            return self.decode.line(self.profile.shared_decode).loss
        return self.prefill.line(self.profile.shared_prefill).loss

    def _factors(self, phase: Mixture, slowdown: float) -> tuple[float, float]:
        alone = phase.factor(slowdown, shared=False, quantile=self.quantile)
        return alone, phase.factor(slowdown, shared=True, quantile=self.quantile)

    def _learned(self, phase: Mixture, seen: float, share: float, slowdown: float) -> Mixture:
        if seen <= 0:
            return phase
        return phase.add(seen, share, slowdown, quantile=self.quantile)
