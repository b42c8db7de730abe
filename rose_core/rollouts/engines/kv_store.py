"""Keys and values that a lease's engines on a node keep for each other: sizes, what may be kept.

A turn that is cut goes on at another engine. With a store, that engine fetches what the first has
computed, whole pages of it, and computes the rest. A store is a folder in the node's memory
(``agent``'s ``kv_folders``), written and read by SGLang's hierarchical cache (``rose_engines``).

| kept | not kept |
|---|---|
| pages of weights whose digest the engine attests | what ran over a commit: it mixes two versions |
| whole pages | the rest of the last page |
| until newer pages need the room, or the lease has no slot on the node | anything longer |

Where the platform has a pool of memory that all nodes reach (``rose_engines.kv.pool``), pages are
also written there. An engine whose node lacks them pulls them, if to compute them takes longer.

Next step: ``rose_engines.kv.policy`` names what is kept.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass

PAGE_TOKENS = 16
"""Tokens of a page, which is one file: 2 MiB of an 8B's keys in bfloat16.

Engines compute whole pages at a time, so a page is no longer than the shortest prefill chunk
(``rose_core.guard.chunk``).
"""

SETUP_SECONDS = 0.05
"""Until the first page of a pull comes: pages are looked up, and the pool's nodes connected to."""

LONGEST_SECONDS = 20.0
"""Of a pull: a third of what a router lets an engine be silent (``placement.watch``), since the
prefill of what is left follows in silence too."""

_STAGED_CONTEXTS = 2


def patience(
    pages: int, page_bytes: int, seconds_per_token: float, bytes_per_second: float
) -> float:
    """Seconds for which a turn waits for its pages; 0 = none are pulled, to prefill is as quick.

    Args:
        pages: that are missing.
        page_bytes: of one.
        seconds_per_token: of the engine's prefill.
        bytes_per_second: of the link.
    """
    computed = min(pages * PAGE_TOKENS * seconds_per_token, LONGEST_SECONDS)
    pulled = SETUP_SECONDS + pages * page_bytes / bytes_per_second
    return computed if pulled < computed else 0.0


@dataclass(frozen=True)
class KvPoolSpec:
    """The platform's pool, as an engine is told of it.

    Attributes:
        master: ``host:port`` of Mooncake's master.
        protocol: ``tcp`` or ``rdma``.
        gbps: at which pages come to one engine, gigabits per second; by default some
            half of what processors allowed over TCP (docs/decisions/0850).
        python: that has Mooncake; empty = the engine's.
        secret: of the engine's lease.
    """

    master: str
    protocol: str = "tcp"
    gbps: float = 4.0
    python: str = ""
    secret: str = ""

    def __repr__(self) -> str:
        """Without the secret: specifications end up in logs."""
        return f"KvPoolSpec({self.master})"


def pool_secret(lease_token: str, lease_uid: str) -> str:
    """What names and seals a lease's pages in a pool; engines of the lease alone are given it.

    The token is made of the lease's name, which a later lease may have. The uid is no secret, and
    never comes again.

    Args:
        lease_token: by which the lease's router knows its nodes' agents; empty = none is made.
        lease_uid: of the lease; empty = none is made.
    """
    if not lease_token or not lease_uid:
        return ""
    message = f"rose-kv-pool/{lease_uid}"
    return hmac.new(lease_token.encode(), message.encode(), "sha256").hexdigest()


def whole_pages(tokens: int) -> int:
    """Of the first tokens of a sequence, those that a store can have."""
    return tokens // PAGE_TOKENS * PAGE_TOKENS


def staging_tokens(context_tokens: int, kv_tokens: int) -> int:
    """Tokens in the host memory of one engine, through which everything goes in and out.

    Half of it may be fetched into at a time, so two of the longest turns are what one needs. More
    than the engine computes with is of no use.

    Args:
        context_tokens: longest prompt plus output.
        kv_tokens: the engine's pool.
    """
    wanted = _STAGED_CONTEXTS * max(context_tokens, PAGE_TOKENS)
    return min(-(-wanted // PAGE_TOKENS) * PAGE_TOKENS, max(kv_tokens, PAGE_TOKENS))


def admits(asked: int, taken: int, room: int) -> bool:
    """Whether a node has room for one more store of so many bytes beside those that it has."""
    return asked + taken <= room
