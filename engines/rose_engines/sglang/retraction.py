"""``Recompute`` in SGLang: requests that run lose their KV, and come back a few at a time.

Prefilling everything at once would hold up every stream, so requests come back at each iteration
boundary, up to ``SPREAD_TOKENS`` in each. Until then they are held here and nowhere else: what
looks for a request (an abort, the next commit) has them all put back first. All of it depends on
boundaries alone, so every rank of an engine does the same at the same one.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from rose_engines.kv import policy as kv_policy

SPREAD_TOKENS = 2048
"""Tokens of retracted requests that prefill again from one iteration on; one request at least."""

ABORT = "sglang.srt.managers.scheduler.Scheduler.abort_request"


class RetractingPolicy(kv_policy.CachePolicy):
    """A policy by SGLang's means.

    Args:
        policy: one of ``kv_policy.POLICIES``.
    """

    def __init__(self, policy: str = kv_policy.KEEP) -> None:
        super().__init__(policy)
        self._held: deque[Any] = deque()

    @property
    def holding(self) -> bool:
        """Retracted requests are still to come back."""
        return bool(self._held)

    def retract(self, scheduler: Any) -> None:  # noqa: ANN401
        """After a commit, between two iterations: what runs loses its KV, if the policy says so."""
        if self.policy != kv_policy.RECOMPUTE:
            return
        from sglang.srt.managers.io_struct import (  # noqa: PLC0415  # only inside engines
            ContinueGenerationReqInput,
            PauseGenerationReqInput,
        )

        waited = set(scheduler.waiting_queue)
        scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
        scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
        retracted = [one for one in scheduler.waiting_queue if one not in waited]
        scheduler.waiting_queue[:] = [one for one in scheduler.waiting_queue if one in waited]
        self._held.extend(retracted)
        self.retracted_requests += len(retracted)
        self.recomputed_tokens += sum(map(_tokens, retracted))

    def held(self) -> tuple[Any, ...]:
        """Retracted requests that have not come back."""
        return tuple(self._held)

    def put_back(self, scheduler: Any, tokens: int | None = None) -> None:  # noqa: ANN401
        """Let requests wait in SGLang's own queue again, in their order.

        Args:
            scheduler: SGLang's scheduler.
            tokens: about so many tokens' worth, one request at least; None = all.
        """
        left = tokens
        while self._held and (left is None or left > 0):
            request = self._held.popleft()
            scheduler.waiting_queue.append(request)
            left = None if left is None else left - _tokens(request)


def _tokens(request: Any) -> int:  # noqa: ANN401
    return len(request.origin_input_ids) + len(request.output_ids)
