"""Which trajectory a turn without a key belongs to: the one whose tokens its prompt begins with.

Some trainers send no session key. A later turn's prompt repeats everything before it, output
included, so the hash of what a turn left behind is found again inside the next one's prompt. Only
prefixes that hold some output are noted: answers to the same prompt share the prompt alone.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

BLOCK = 16  # tokens; a trajectory whose output is shorter is not recognized


class Prefixes:
    """Names of trajectories by what they have left behind.

    Args:
        most: prefixes remembered; a forgotten one costs a prefill, never correctness.
    """

    def __init__(self, most: int = 65536) -> None:
        self._most = most
        self._names: OrderedDict[bytes, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._names)

    def note(self, name: str, context: Sequence[int], prompt: int) -> None:
        """A turn of the trajectory has ended.

        Args:
            name: the trajectory's.
            context: prompt and output.
            prompt: how many of these tokens are prompt.
        """
        whole = len(context) // BLOCK * BLOCK
        if whole <= prompt:
            return
        *_, key = _hashes(context[:whole])
        self._names[key] = name
        self._names.move_to_end(key)
        if len(self._names) > self._most:
            self._names.popitem(last=False)

    def find(self, prompt: Sequence[int]) -> str:
        """The trajectory with the longest known prefix of the prompt; empty when none is known."""
        if not self._names:
            return ""
        found = ""
        for key in _hashes(prompt):
            found = self._names.get(key, found)
        return found


def _hashes(tokens: Sequence[int]) -> Iterator[bytes]:
    """The hash of the first block, the first two, and so on."""
    raw = array("q", tokens).tobytes()
    running = hashlib.blake2b(digest_size=16)
    size = BLOCK * 8
    for start in range(0, len(tokens) // BLOCK * size, size):
        running.update(raw[start : start + size])
        yield running.copy().digest()
