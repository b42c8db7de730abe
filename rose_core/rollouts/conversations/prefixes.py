"""Which trajectory a turn without a key belongs to: the one whose tokens its prompt begins with.

Some trainers send no session key. A later turn's prompt repeats everything before it, output
included, so the hash of what a turn left behind is found again inside the next one's prompt. Only
prefixes that hold some output are noted: answers to the same prompt share the prompt alone.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence

BLOCK = 16  # tokens; a trajectory whose output is shorter is not recognized
_SIZE = 8  # bytes of a key that say how many tokens it stands for
_ID = array("I").itemsize
_DIGEST = 16  # bytes


class Prefixes:
    """Names of trajectories by what they have left behind.

    Args:
        most: prefixes remembered; a forgotten one costs a prefill, never correctness.
    """

    def __init__(self, most: int = 65536) -> None:
        self._most = most
        self._names: OrderedDict[bytes, str] = OrderedDict()
        self._sizes: Counter[int] = Counter()  # only prefixes of a known size are worth a hash

    def __len__(self) -> int:
        return len(self._names)

    def note(self, name: str, prompt: Sequence[int], output: Sequence[int]) -> None:
        """A turn of the trajectory has ended."""
        whole = (len(prompt) + len(output)) // BLOCK * BLOCK
        if whole <= len(prompt):
            return
        try:
            raw = array("I", (*prompt, *output)[:whole])
        except OverflowError:  # no ids of any model
            return
        # Every turn without a key comes here, and ``_hashes`` would take twice as long.
        key = _key(whole, hashlib.blake2b(raw, digest_size=_DIGEST))
        names = self._names
        if key in names:
            names.move_to_end(key)
        else:
            self._sizes[whole] += 1
        names[key] = name
        if len(names) > self._most:
            self._forget()

    def _forget(self) -> None:
        key, _ = self._names.popitem(last=False)
        size = int.from_bytes(key[:_SIZE])
        self._sizes[size] -= 1
        if not self._sizes[size]:
            del self._sizes[size]

    def find(self, prompt: Sequence[int]) -> str:
        """The trajectory with the longest known prefix of the prompt; empty when none is known."""
        blocks = range(BLOCK, len(prompt) + 1, BLOCK)
        if len(blocks) > len(self._sizes):
            fitting = sorted([size for size in self._sizes if size in blocks])
        else:
            fitting = [size for size in blocks if size in self._sizes]
        found = ""
        if not fitting:
            return found
        for key in _hashes(prompt, fitting):
            found = self._names.get(key, found)
        return found


def _hashes(tokens: Sequence[int], sizes: Sequence[int]) -> Iterator[bytes]:
    """The size and hash of the first so many tokens, for each of the sizes from small to large.

    Of tokens that are no ids of any model, negative ones for instance, there is none.
    """
    if not sizes:
        return
    try:
        raw = memoryview(array("I", tokens)).cast("B")  # made at a quarter of what signed ones cost
    except OverflowError:
        return
    running = hashlib.blake2b(digest_size=_DIGEST)
    start = 0
    for size in sizes:
        running.update(raw[start : size * _ID])
        start = size * _ID
        yield _key(size, running.copy())


def _key(size: int, digest: hashlib.blake2b) -> bytes:
    return size.to_bytes(_SIZE) + digest.digest()
