"""What becomes of cached KV when weights change; one policy for the life of an engine.

| policy | requests that run | requests that wait or come later |
|---|---|---|
| ``Keep`` | keep their KV, mixed from then on | key of the new weights: nothing old is reused |
| ``Recompute`` | lose it and prefill again, tokens sampled so far included | the same |
| ``Reuse`` | keep their KV | later turns of a trajectory keep its first key, for some commits |

Keys name the weights by their label and by how often this engine has committed, which no other
engine shares. With a store of keys (``rose_core.rollouts.engines.kv_store``) they name them by
label and digest instead, which every engine shares that attests them; the count is added again
where the same weights are live a second time, since turns that ran over a commit have left KV under
their key.

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
        self._lived: dict[str, int] = {}  # commits at which weights were live first, by digest

    def key(self, own: str | None, version: str, commits: int, digest: str = "") -> str:
        """The key of a request that prefills now.

        Args:
            own: what the caller asked for, or a key that this made before.
            version: label of the live weights.
            commits: how often they have changed, also to the same label.
            digest: of the live weights, where keys are shared; empty = they are this engine's own.
        """
        base = (own or "").partition("\n")[0]
        fresh = f"{base}\n{self._weights(version, commits, digest)}"
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

    def shares(self, key: str, version: str, commits: int, digest: str) -> bool:
        """Whether KV under a key is of the live weights alone, wherever it was computed.

        What runs over a commit keeps its key, and from then on that key is not the live weights'.

        Args:
            key: of a request or of cached KV.
            version: label of the live weights.
            commits: as ``key``'s.
            digest: as ``key``'s.
        """
        name = f"{version}@{digest}"
        return (
            bool(digest)
            and key.partition("\n")[2] == name
            and self._weights(version, commits, digest) == name
        )

    def forget(self) -> None:
        """The cache is empty: nothing of a turn that ran over a commit is left."""
        self._lived.clear()

    def _weights(self, version: str, commits: int, digest: str) -> str:
        if not digest:
            return f"{version}#{commits}"
        again = self._lived.setdefault(digest, commits) != commits
        return f"{version}@{digest}" + (f"#{commits}" if again else "")
