"""The fake's model: the next token is a hash of the whole prefix and of the weights' label.

So every token tells which prefix and which version it came from: a lost or doubled token, a wrong
splice and a wrong version span all show as another token. Greedy and pure.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

# A Mersenne prime and a multiplier for a rolling polynomial hash of the prefix.
_PRIME = (1 << 61) - 1
_MULTIPLIER = 0x9E3779B97F4A7C15 % _PRIME
VOCABULARY = 256


class Prefix:
    """A prefix of tokens that can grow; hashing is incremental."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._hash = 1
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """Add one token."""
        self._hash = (self._hash * _MULTIPLIER + token + 1) % _PRIME

    def logprob(self, token: int, version: str = "") -> float:
        """Log-probability, between -2 and 0, of one token after this prefix."""
        mixed = (self._hash ^ zlib.crc32(f"{version} {token}".encode())) * _MULTIPLIER % _PRIME
        return -((mixed >> 20) % 2000) / 1000.0

    def next_token(self, version: str = "") -> tuple[int, float]:
        """The greedy next token and its log-probability, between -2 and 0."""
        mixed = (self._hash ^ zlib.crc32(version.encode())) * _MULTIPLIER % _PRIME
        return mixed % VOCABULARY, -((mixed >> 20) % 2000) / 1000.0


def next_token(prefix: Sequence[int], version: str = "") -> tuple[int, float]:
    """The greedy next token after ``prefix`` under the weights labelled ``version``."""
    return Prefix(prefix).next_token(version)


def prompt_logprobs(prompt: Sequence[int], version: str = "") -> list[float | None]:
    """Log-probability of every token after those before it; the first has none."""
    prefix = Prefix(prompt[:1])
    found: list[float | None] = [None]
    for token in prompt[1:]:
        found.append(prefix.logprob(token, version))
        prefix.append(token)
    return found


def continuation(prompt: Sequence[int], count: int, version: str = "") -> list[int]:
    """What an undisturbed greedy run of one version generates."""
    prefix = Prefix(prompt)
    tokens = []
    for _ in range(count):
        token, _ = prefix.next_token(version)
        prefix.append(token)
        tokens.append(token)
    return tokens
