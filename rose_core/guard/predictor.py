"""Cost of prefill and decode, alone and beside a rollout engine: a profile, corrected online.

The profile gives the shape (cost per prompt byte and per request in the batch); four factors
correct its level from what the tap sees. A factor follows a high *quantile* of observed/predicted,
not the mean: it moves up by a large step when a request was slower and down by a small one when it
was faster, so it settles where the chosen share of requests is not slower. What a request met of an
open gate (``shares``) turns a mixture into the cost of co-running.
Next step: ``slack``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rose_core.guard.shares import ALONE_SHARE, LEAST_SHARE, shared_cost


@dataclass(frozen=True)
class Profile:
    """Shape of the cost of one engine kind on one device; seconds.

    Prompt size is the request body's bytes: the tap does not tokenise.
    """

    prefill_base_s: float = 0.015
    prefill_per_kilobyte_s: float = 0.06
    decode_base_s: float = 0.008
    decode_per_request_s: float = 0.001
    shared_prefill: float = 2.0
    shared_decode: float = 2.0


@dataclass(frozen=True)
class Predictor:
    """A profile and its four corrections (natural logarithms of factors).

    Attributes:
        quantile: share of requests that should not be slower than predicted.
        step: speed of learning, in units of the logarithm.
    """

    profile: Profile = Profile()
    quantile: float = 0.9
    step: float = 0.1
    prefill_alone: float = 0.0
    prefill_shared: float = 0.0
    decode_alone: float = 0.0
    decode_shared: float = 0.0

    def prefill_s(self, size: int, *, shared: bool) -> float:
        """Predicted time to first token for a body of ``size`` bytes (unknown: -1)."""
        profile = self.profile
        known = size if size >= 0 else 8192
        base = profile.prefill_base_s + profile.prefill_per_kilobyte_s * known / 1024
        if shared:
            return base * profile.shared_prefill * math.exp(self.prefill_shared)
        return base * math.exp(self.prefill_alone)

    def decode_s(self, running: int, *, shared: bool) -> float:
        """Predicted time per token with ``running`` requests in the batch."""
        profile = self.profile
        base = profile.decode_base_s + profile.decode_per_request_s * max(1, running)
        if shared:
            return base * profile.shared_decode * math.exp(self.decode_shared)
        return base * math.exp(self.decode_alone)

    def saw_prefill(self, size: int, seconds: float, *, shared: bool) -> Predictor:
        """Learn from one time to first token."""
        error = self._error(seconds, self.prefill_s(size, shared=shared))
        if shared:
            return replace(self, prefill_shared=self.prefill_shared + error)
        return replace(self, prefill_alone=self.prefill_alone + error)

    def saw_decode(self, running: int, seconds: float, *, shared: bool) -> Predictor:
        """Learn from one request's mean time per token."""
        error = self._error(seconds, self.decode_s(running, shared=shared))
        if shared:
            return replace(self, decode_shared=self.decode_shared + error)
        return replace(self, decode_alone=self.decode_alone + error)

    def met_prefill(self, size: int, seconds: float, *, share: float) -> Predictor:
        """Learn from a time to first token that met an open gate for ``share`` of it."""
        if share <= ALONE_SHARE:
            return self.saw_prefill(size, seconds, shared=False)
        if share < LEAST_SHARE:
            return self
        whole = shared_cost(self.prefill_s(size, shared=False), seconds, share)
        return self.saw_prefill(size, whole, shared=True)

    def met_decode(self, running: int, seconds: float, *, share: float) -> Predictor:
        """Learn from a mean time per token that met an open gate for ``share`` of it."""
        if share <= ALONE_SHARE:
            return self.saw_decode(running, seconds, shared=False)
        if share < LEAST_SHARE:
            return self
        whole = shared_cost(self.decode_s(running, shared=False), seconds, share)
        return self.saw_decode(running, whole, shared=True)

    def slowdown(self) -> float:
        """How many times slower a decode step is beside a rollout engine; at least 1."""
        return max(1.0, self.decode_s(1, shared=True) / self.decode_s(1, shared=False))

    def _error(self, observed: float, predicted: float) -> float:
        if observed <= 0 or predicted <= 0:
            return 0.0
        slower = observed > predicted
        # The further off, the larger the step, so a wrong profile is left within a few requests.
        scale = self.step * min(10.0, max(1.0, abs(math.log(observed / predicted)) / 0.1))
        return scale * (self.quantile if slower else self.quantile - 1.0)
