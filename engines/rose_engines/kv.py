"""What becomes of cached KV when weights change; one policy for the life of an engine.

| policy | requests that run | requests that wait or come later |
|---|---|---|
| ``Keep`` | keep their KV, mixed from then on | key of the new weights: nothing old is reused |
| ``Recompute`` | lose it and prefill again, tokens sampled so far included | the same |
| ``Reuse`` | keep their KV | later turns of a trajectory keep its first key, for some commits |

Next step: ``sglang.retraction`` and ``vllm.plugin`` take KV away from requests that run.
"""

from __future__ import annotations

from collections import OrderedDict

from rose_engines.errors import UnsupportedEngine

KEEP, RECOMPUTE, REUSE = POLICIES = ("Keep", "Recompute", "Reuse")

REUSE_COMMITS = 4
"""Commits after which a trajectory starts on a new key."""

REMEMBERED = 4096
"""Trajectories whose first key is known; the longest unused goes first."""


class CachePolicy:
    """Prefix-cache keys of one scheduler, and what it recomputed.

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
        self._first: OrderedDict[str, tuple[str, int]] = OrderedDict()

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
