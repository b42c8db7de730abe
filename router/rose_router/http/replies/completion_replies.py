"""Turns as OpenAI's ``/v1/completions`` would have answered them, whole or in pieces."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from rose_router.http.replies import parts
from rose_router.http.replies.parts import TokenNames
from rose_router.http.replies.streaming import Events
from rose_router.http.tokenizer.tokenization import Tokenizer
from rose_router.turns.turn import Turn, typed_abort


class CompletionReplies:
    """Answers of one request.

    Args:
        model: name to show.
        tokenizer: for words after a cut.
        names: of tokens in log-probs.
    """

    def __init__(self, model: str, tokenizer: Tokenizer | None, names: TokenNames) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._names = names

    def answer(self, turns: Sequence[Turn]) -> dict[str, Any]:
        """The whole answer."""
        choices = []
        for index, turn in enumerate(turns):
            typed_abort(turn)
            choices.append(parts.openai_choice(turn, index, self._tokenizer, names=self._names))
        return self._frame(turns[0], choices) | {"usage": parts.usage(turns)}

    def events(self, turn: Turn, index: int = 0, prompt: msgspec.Raw | None = None) -> Events:
        """Pieces as they come; they add up to the answer.

        Args:
            turn: whose.
            index: among the answers.
            prompt: the ids of its prompt as they are written; ``None`` = with the first piece.
        """
        tokens = text = 0
        over = False
        while not over:
            over = turn.is_over
            typed_abort(turn)
            choice = parts.openai_choice(
                turn,
                index,
                self._tokenizer,
                names=self._names,
                since=tokens,
                text_since=text,
                prompt=prompt,
            )
            tokens += len(choice["token_ids"])
            text += len(choice["text"])
            yield self._frame(turn, [choice])

    def counted(self, turns: Sequence[Turn]) -> dict[str, Any]:
        """The last event of a stream whose caller asks for it (``stream_options``)."""
        return self._frame(turns[0], []) | {"usage": parts.usage(turns)}

    def _frame(self, turn: Turn, choices: list[dict[str, Any]]) -> dict[str, Any]:
        spans = choices[0]["weight_versions"] if choices else []
        return {
            "id": turn.request.rid,
            "object": "text_completion",
            "created": int(time.time()),
            "model": self._model,
            "choices": choices,
            "metadata": {
                "weight_version": spans[-1]["version"] if spans else None,
                "weight_versions": spans,
            },
        }
