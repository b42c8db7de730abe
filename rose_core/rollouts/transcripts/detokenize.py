"""Text of tokens that keep coming, without decoding those before them again.

The text of a turn that moved is not the engines' any more, so the router decodes its tokens. All of
them at every event would cost a long stream the square of its length. A token's text depends on its
neighbours (bytes of one character, spaces), so the last settled tokens are decoded with the new
ones, and what they alone make is taken off, as engines do it themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

BROKEN = "\ufffd"
"""What a character looks like of which tokens are still to come."""


class IncrementalDetokenizer:
    """The text of one turn while it goes on.

    Args:
        decode: token ids to text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._text = ""
        # Tokens up to ``settled`` are in the text; those from ``before`` on are decoded once more.
        self._before = self._settled = 0

    def text(self, tokens: Sequence[int]) -> str:
        """The text of whole characters.

        Args:
            tokens: all so far, beginning with those of the call before.
        """
        known = self._decode(tokens[self._before : self._settled])
        new = self._decode(tokens[self._before :])[len(known) :]
        if new.endswith(BROKEN):
            return self._text + new.rstrip(BROKEN)
        if len(tokens) > self._settled:
            self._text += new
            self._before, self._settled = self._settled, len(tokens)
        return self._text
