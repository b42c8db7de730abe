"""Stop strings that begin before a move and end behind it.

An engine looks for stop strings in what it wrote itself. After a move that is the new leg only: a
string whose beginning is held from the leg before would be missed, and the turn would run on. What
the engine cannot see is looked for here by its own rule (read off SGLang 0.5.23): a turn ends with
the first token at which a string stands in the text of the last ``window`` tokens, where the window
is the longest string in tokens and one more.

| the string lies | found by |
|---|---|
| inside one leg | the engine |
| across a move | ``CutStops``, among the first ``window - 1`` tokens of the later leg |

Which text tokens stand for is the one thing asked of outside (``decode``, special tokens shown).
Next step: ``transcript.Leg.end`` takes back what the engine wrote behind the string.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MOST_WINDOW = 64
"""Tokens looked at for each new one; turns with longer strings are not moved."""

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Stops:
    """What ends a turn.

    Attributes:
        strings: the strings, in the caller's order.
        window: tokens in whose text they are looked for.
        decode: token ids to text.
    """

    strings: tuple[str, ...]
    window: int
    decode: Decode = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class StopMatch:
    """The turn ends with the ``count``-th token of the leg, where ``string`` is complete."""

    count: int
    string: str

    @property
    def finish(self) -> dict[str, Any]:
        """The finish reason, as the engine would have said it."""
        return {"type": "stop", "matched": self.string}


class CutStops:
    """Looks for strings across the beginning of one leg.

    Args:
        stops: what ends the turn.
        held: the turn's output tokens before the leg.
    """

    def __init__(self, stops: Stops, held: Sequence[int]) -> None:
        self._stops = stops
        self._held = list(held[-(stops.window - 1) :])
        self._looked = 0
        self._found: StopMatch | None = None

    def match(self, new: Sequence[int]) -> StopMatch | None:
        """The first string that is complete; what was looked at before is not looked at again.

        Args:
            new: all tokens of the leg so far.
        """
        last = min(len(new), self._stops.window - 1)
        while self._found is None and self._looked < last:
            self._looked += 1
            self._found = self._at(new[: self._looked])
        return self._found

    def _at(self, new: Sequence[int]) -> StopMatch | None:
        before = self._stops.window - len(new)
        text = self._stops.decode([*self._held[-before:], *new])
        string = next((string for string in self._stops.strings if string in text), None)
        return StopMatch(len(new), string) if string is not None else None


def sure(text: str, strings: Sequence[str]) -> str:
    """The text of a turn that goes on, without an end that may become one of the strings.

    An engine does so for what it wrote itself; after a move its text begins in the middle.
    """
    most = max(
        (
            length
            for string in strings
            for length in range(1, min(len(string), len(text)) + 1)
            if text.endswith(string[:length])
        ),
        default=0,
    )
    return text[: len(text) - most]


def trimmed(text: str, finish: Mapping[str, Any] | None, *, keep: bool) -> str:
    """The text of a turn without the string that ended it, as an engine shows it.

    Args:
        text: of all tokens of the turn.
        finish: its finish reason; ``None`` = it goes on.
        keep: the string itself was asked for too (``no_stop_trim``).
    """
    string = finish.get("matched") if finish else None
    at = text.find(string) if isinstance(string, str) else -1
    if at < 0:
        return text
    return text[: at + len(string)] if keep and isinstance(string, str) else text[:at]
