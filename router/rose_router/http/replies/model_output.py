"""What a model wrote, in the parts that agents' dialects keep apart: thoughts, words, calls.

Thoughts stand in ``<think>...</think>`` at the beginning, or up to ``</think>`` where the template
has opened them. Calls are read as in a chat (``dialects.chat``). While an answer grows, nothing is
shown that may still become another part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rose_router.http.conversations.conversation import Message
from rose_router.http.dialects import chat
from rose_router.http.replies import parts
from rose_router.http.tokenizer.tokenization import Tokenizer
from rose_router.turns.turn import Turn

Beside = Callable[[], dict[str, Any]]
"""What only the router knows of an answer, as it stands now."""

_OPEN, _CLOSE = "<think>", "</think>"
_TAIL = 8  # ids at a prompt's end that are looked at for an open thought


@dataclass(frozen=True)
class ModelOutput:
    """An answer, as far as it goes.

    Attributes:
        thoughts: without their marks.
        text: for the caller to see.
        calls: of tools, in OpenAI's form; only once the turn is over.
    """

    thoughts: str
    text: str
    calls: tuple[Mapping[str, Any], ...] = ()

    def message(self) -> Message:
        """As an assistant's message of a conversation."""
        message: Message = {"role": "assistant", "content": self.text}
        if self.thoughts:
            message["reasoning_content"] = self.thoughts
        if self.calls:
            message["tool_calls"] = [dict(call) for call in self.calls]
        return message


class Part(Enum):
    """What is streamed piece by piece; calls are sent whole."""

    THOUGHTS = "thoughts"
    TEXT = "words"


@dataclass(frozen=True)
class Piece:
    """What is new of a part; ``begins`` = nothing of the part was sent before."""

    part: Part
    text: str
    begins: bool


class OutputReader:
    """Reads one turn's output, for one caller.

    Args:
        turn: the turn.
        tokenizer: for words after a cut.
        body: the request as a chat.
    """

    def __init__(self, turn: Turn, tokenizer: Tokenizer, body: Mapping[str, Any]) -> None:
        self._turn, self._tokenizer, self._body = turn, tokenizer, body
        end = tokenizer.decode(turn.request.prompt[-_TAIL:], skip_special=False)
        self._opened = end.rstrip().endswith(_OPEN)
        self._whole: ModelOutput | None = None
        self._part: Part | None = None
        self._shown = 0

    def pieces(self) -> Iterator[Piece]:
        """What may be shown now and was not yet: thoughts first, and none once there are words."""
        output = self.read()
        for kind, text in ((Part.THOUGHTS, output.thoughts), (Part.TEXT, output.text)):
            if not text or (kind is Part.THOUGHTS and self._part is Part.TEXT):
                continue
            begins = kind is not self._part
            if begins:
                self._part, self._shown = kind, 0
            if begins or len(text) > self._shown:
                yield Piece(kind, text[self._shown :], begins)
                self._shown = len(text)

    def read(self) -> ModelOutput:
        """What may be shown now."""
        if self._whole is not None:
            return self._whole
        turn = self._turn
        over = turn.is_over
        text = parts.text_of(turn, turn.shown(), self._tokenizer)
        thoughts, rest = split_thoughts(text, opened=self._opened, over=over)
        if not over:
            # A character that is not whole yet will look different in the next event.
            shown = chat.shown_text(rest, self._body).rstrip("\ufffd")
            return ModelOutput(thoughts.rstrip("\ufffd"), shown)
        message = chat.message_of(rest, self._body, turn.request.rid)
        calls = tuple(message.get("tool_calls", ()))
        self._whole = ModelOutput(thoughts, str(message["content"] or ""), calls)
        return self._whole


def split_thoughts(text: str, *, opened: bool, over: bool) -> tuple[str, str]:
    """Thoughts and the rest.

    Args:
        text: of the answer.
        opened: the prompt ends within a thought.
        over: nothing more comes.
    """
    begun = text.lstrip()
    if not opened:
        if not begun.startswith(_OPEN):
            may_open = not over and _OPEN.startswith(begun)
            return "", "" if may_open else text
        begun = begun.removeprefix(_OPEN)
    thoughts, closed, rest = begun.partition(_CLOSE)
    if closed:
        return thoughts.strip(), rest.lstrip()
    if not over:
        thoughts = _without_beginning_of(thoughts, _CLOSE)
    return thoughts.lstrip() if not over else thoughts.strip(), ""


def _without_beginning_of(text: str, mark: str) -> str:
    """The text without what may become the mark, and without the space before it."""
    begun = next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)
    return text[: len(text) - begun].rstrip()
