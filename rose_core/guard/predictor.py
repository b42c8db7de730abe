"""Predicts prefill and decode cost, alone and beside a rollout engine.

A profile gives the shape (cost per prompt byte and per request in the batch) and how much slower
each phase is beside a rollout engine; ``mixture`` corrects both from what the tap sees. What is
predicted is a high *quantile* of the cost, not its mean. Next step: ``slack`` asks for predictions.
"""

from __future__ import annotations

from dataclasses import dataclass

from rose_core.guard.mixture import Mixture


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
        step: speed of learning it, in units of the logarithm.
    """

    profile: CostProfile = CostProfile()
    quantile: float = 0.9
    step: float = 0.1
    prefill: Mixture = _UNTAUGHT
    decode: Mixture = _UNTAUGHT

    def prefill_s(self, size: int, *, shared: bool) -> float:
        """Predicted time to first token for a body of ``size`` bytes (unknown: -1)."""
        slowdown = self.profile.shared_prefill
        return self.profile.prefill_s(size) * self.prefill.factor(slowdown, shared=shared)

    def decode_s(self, running: int, *, shared: bool) -> float:
        """Predicted time per token with ``running`` requests in the batch."""
        slowdown = self.profile.shared_decode
        return self.profile.decode_s(running) * self.decode.factor(slowdown, shared=shared)

    def learn_prefill(self, size: int, seconds: float, *, share: float) -> Predictor:
        """Learn from a time to first token that met an open gate for ``share`` of it."""
        seen, slowdown = seconds / self.profile.prefill_s(size), self.profile.shared_prefill
        learned = self._learned(self.prefill, seen, share, slowdown)
        return Predictor(self.profile, self.quantile, self.step, learned, self.decode)

    def learn_decode(self, running: int, seconds: float, *, share: float) -> Predictor:
        """Learn from a mean time per token that met an open gate for ``share`` of it."""
        seen, slowdown = seconds / self.profile.decode_s(running), self.profile.shared_decode
        learned = self._learned(self.decode, seen, share, slowdown)
        return Predictor(self.profile, self.quantile, self.step, self.prefill, learned)

    def slowdown(self) -> float:
        """How many times slower a decode step is beside a rollout engine; at least 1."""
        return 1 / (1 - self.loss(decoding=True))

    def loss(self, *, decoding: bool) -> float:
        """Share of a phase's speed that is lost beside a rollout engine."""
        if decoding:
            return self.decode.line(self.profile.shared_decode).loss
        return self.prefill.line(self.profile.shared_prefill).loss

    def _learned(self, phase: Mixture, seen: float, share: float, slowdown: float) -> Mixture:
        if seen <= 0:
            return phase
        return phase.add(seen, share, slowdown, quantile=self.quantile, step=self.step)
