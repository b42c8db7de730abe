"""What becomes of cached KV when weights change; one policy for the life of an engine.

| policy | requests that run | requests that wait or come later |
|---|---|---|
| ``Keep`` | keep their KV, mixed from then on | key of the new weights: nothing old is reused |
| ``Recompute`` | lose it and prefill again, tokens sampled so far included | the same |
| ``Reuse`` | keep their KV | later turns of a trajectory keep its first key, for some commits |

Prefilling everything at once would hold up every stream, so after ``Recompute`` requests come back
a few at each iteration boundary, up to ``SPREAD_TOKENS`` in each. Until then they are held here and
nowhere else: whoever looks for a request (an abort, the next commit) has them all put back first.
All of it depends on boundaries alone, so every rank of an engine does the same at the same one.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

from rose_engines.errors import UnsupportedEngine

KEEP, RECOMPUTE, REUSE = POLICIES = ("Keep", "Recompute", "Reuse")

SPREAD_TOKENS = 2048
"""Tokens of retracted requests that prefill again from one iteration on; one request at least."""

REUSE_COMMITS = 4
"""Commits after which a trajectory starts on a new key."""

REMEMBERED = 4096
"""Trajectories whose first key is known; the longest unused goes first."""

ABORT = "sglang.srt.managers.scheduler.Scheduler.abort_request"


class CachePolicy:
    """Prefix-cache keys and retractions of one scheduler.

    Args:
        policy: one of ``POLICIES``.

    Raises:
        UnsupportedEngine: no such policy.
    """

    def __init__(self, policy: str = KEEP) -> None:
        if policy not in POLICIES:
            raise UnsupportedEngine(f"KV policy {policy!r}; there are {', '.join(POLICIES)}")
        self.policy = policy
        self.retracted_requests = self.recomputed_tokens = 0
        self._held: deque[Any] = deque()
        self._first: OrderedDict[str, tuple[str, int]] = OrderedDict()

    @property
    def holding(self) -> bool:
        """Retracted requests are still to come back."""
        return bool(self._held)

    def key(self, own: str | None, version: str, commits: int) -> str:
        """The key of a request that prefills now.

        Args:
            own: what the caller asked for, or a key that this made before.
            version: label of the live weights.
            commits: how often they have changed, also to the same label.
        """
        base = (own or "").partition("\n")[0]
        fresh = f"{base}\n{version}#{commits}"
        if self.policy != REUSE or not base:
            return fresh
        first, since = self._first.get(base, (fresh, commits))
        if commits - since > REUSE_COMMITS:
            first, since = fresh, commits
        self._first[base] = (first, since)
        self._first.move_to_end(base)
        while len(self._first) > REMEMBERED:
            self._first.popitem(last=False)
        return first

    def retract(self, scheduler: Any) -> None:  # noqa: ANN401
        """After a commit, between two iterations: what runs loses its KV, if the policy says so."""
        if self.policy != RECOMPUTE:
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
