"""Keys of a turn that another node has: their names there, and whether to wait for them.

A turn that is cut goes on at another engine. Where that is on another node, the former node has
pages that this one's store (``kv_store``) lacks. No host pulls them yet: the simulator decides so.

| | seconds |
|---|---|
| prefill | tokens of the missing pages x what the engine takes for one |
| pull | ``SETUP_SECONDS`` + bytes of the pages / what the link has shown |

Who is quicker is done. A pull that takes as long as the prefill would have is given up: pages come
in their order, so what has come by then is used, and the rest is computed. A turn waits at most
twice as long as without. Next step: ``simulate``'s ``kept`` asks it at admission.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from rose_core.rollouts.engines.kv_store import PAGE_TOKENS

SENT_BYTES_PER_SECOND = 1.25e9
"""What a node sends of keys at most, all neighbours together: 10 Gb/s.

A tenth of the network that nodes with GPUs usually have, of which answers to live requests take
next to nothing. It is also what is believed of a link that has shown nothing yet.
"""

SETUP_SECONDS = 0.05
"""Until the first page comes: a connection, its TLS, names hashed and looked up on both sides."""

LONGEST_SECONDS = 20.0
"""Of a pull: a third of what a router lets an engine be silent (``placement.watch``), since the
prefill of what is left follows in silence too."""

FORGET_SECONDS = 60.0
"""After which a link is believed to be quick again: one that is never tried shows nothing."""

MOST_PAGES = 1 << 16
"""Of one pull: a million tokens. Their names are 5 MiB."""

LARGEST_PAGE = 64 << 20
"""Bytes: 16 tokens of 4 MiB, ten times what today's largest models take."""

_WEIGHT = 0.5  # of the newest pull: a link changes with what else goes through it
_LEAST_BYTES = 1 << 20  # a smaller pull shows its set-up and not the link

PAGE_NAME = re.compile(r"[0-9a-f]{64}-[0-9a-f]{16}")
"""A page's file: what SGLang hashes of it, and what of its engine (``sglang.kv_backend``)."""


def page_names(tokens: Sequence[int], key: str, suffix: str) -> list[str]:
    """Names of the pages that an engine looks for before it prefills, as SGLang 0.5.23 makes them.

    A page's name is a hash over the request's key and all tokens up to the page's end. The last
    token is always computed, so a page that ends with it is not looked for.

    Args:
        tokens: of prompt and context.
        key: the request's, as the engine has it (``rose_engines.kv.policy``).
        suffix: what the engine adds.

    Raises:
        OverflowError: a token is none.
    """
    encoded = key.encode()
    seed = hashlib.sha256(b"sglang-cache-namespace-v1")
    seed.update(b"\x01" + len(encoded).to_bytes(8, "little") + encoded)
    seed.update(b"\x00")  # no salt
    last, found = seed.digest(), []
    raw = memoryview(array("I", tokens)).cast("B")
    width = PAGE_TOKENS * raw.nbytes // max(len(tokens), 1)
    for page in range(min((len(tokens) - 1) // PAGE_TOKENS, MOST_PAGES)):
        last = hashlib.sha256(last + raw[page * width : (page + 1) * width]).digest()
        found.append(last.hex() + suffix)
    return found


@dataclass(frozen=True, slots=True)
class LinkRate:
    """What pulls from one host have shown.

    Attributes:
        bytes_per_second: of the last ones, the newest counting most.
        seen_at: seconds of the host's clock; None = never.
    """

    bytes_per_second: float = SENT_BYTES_PER_SECOND
    seen_at: float | None = None

    def saw(self, size: int, seconds: float, now: float) -> LinkRate:
        """Learn from a pull of so many bytes, whole or not."""
        if size < _LEAST_BYTES or seconds <= 0:
            return self
        rate, before = size / seconds, self.believed(now)
        known = self.seen_at is not None
        return LinkRate(before + _WEIGHT * (rate - before) if known else rate, now)

    def believed(self, now: float) -> float:
        """Bytes in a second to expect of the next one."""
        fresh = self.seen_at is not None and now - self.seen_at < FORGET_SECONDS
        return self.bytes_per_second if fresh else SENT_BYTES_PER_SECOND


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
    computed = pages * PAGE_TOKENS * seconds_per_token
    pulled = SETUP_SECONDS + pages * page_bytes / bytes_per_second
    return min(computed, LONGEST_SECONDS) if pulled < min(computed, LONGEST_SECONDS) else 0.0


class SendLimit:
    """Keeps what is sent below a rate, whoever sends it.

    Args:
        bytes_per_second: on average; a tenth of a second's worth may go at once.
    """

    def __init__(self, bytes_per_second: float = SENT_BYTES_PER_SECOND) -> None:
        self._rate = bytes_per_second
        self._free_at = 0.0

    def wait(self, size: int, now: float) -> float:
        """Seconds after which so many more bytes may be sent; they count as sent then.

        Args:
            size: bytes.
            now: seconds of any steady clock.
        """
        self._free_at = max(self._free_at, now - _BURST_SECONDS) + size / self._rate
        return max(0.0, self._free_at - now)


_BURST_SECONDS = 0.1
