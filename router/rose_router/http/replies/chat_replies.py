"""Turns as ``/v1/chat/completions`` would have answered them; ids and versions beside the words."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rose_router.http.dialects import chat
from rose_router.http.dialects.terms import ParsedRequest
from rose_router.http.replies import parts
from rose_router.http.replies.parts import TokenNames
from rose_router.http.replies.streaming import Events
from rose_router.http.tokenizer.tokenization import Tokenizer
from rose_router.turns.turn import Turn, VisibleOutput, typed_abort


class ChatReplies:
    """Answers of one request.

    Args:
        model: name to show.
        tokenizer: for words after a cut.
        body: the request.
        ask: the same, read.
        names: of tokens in log-probs.
    """

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer | None,
        body: Mapping[str, Any],
        ask: ParsedRequest,
        names: TokenNames,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._body = body
        self._ask = ask
        self._names = names

    def answer(self, turns: Sequence[Turn]) -> dict[str, Any]:
        """The whole answer."""
        choices = [self._choice(turn, index) for index, turn in enumerate(turns)]
        body = self._frame(turns[0], "chat.completion", choices)
        body["usage"] = parts.usage(turns)
        return body | self._prompt(turns[0])

    def events(self, turn: Turn, index: int = 0) -> Events:
        """Pieces as they come; calls of tools whole, at the end."""
        tokens = characters = 0
        over, first = False, True
        while not over:
            over = turn.is_over
            typed_abort(turn)
            shown = turn.shown()
            message = self._message(turn, shown) if over else {}
            text = self._text(turn, shown, message)
            delta: dict[str, Any] = {"content": text[characters:]}
            if first:
                delta["role"] = "assistant"
                first = False
            if message.get("tool_calls"):
                calls = enumerate(message["tool_calls"])
                delta["tool_calls"] = [{"index": place, **call} for place, call in calls]
            choice = self._beside(turn, shown, tokens)
            choice |= {"index": index, "delta": delta, "finish_reason": self._finish(turn, message)}
            tokens, characters = len(shown.tokens), max(characters, len(text))
            piece = self._frame(turn, "chat.completion.chunk", [choice])
            if "role" in delta:
                piece |= self._prompt(turn)
            alone = over and len(self._ask.turns) == 1  # several are counted together
            yield piece | ({"usage": parts.usage([turn])} if alone else {})

    def counted(self, turns: Sequence[Turn]) -> dict[str, Any]:
        """The last event of a stream of several answers."""
        whole = self._frame(turns[0], "chat.completion.chunk", [])
        return whole | {"usage": parts.usage(turns)}

    def message(self, turn: Turn) -> dict[str, Any]:
        """The answer of a turn that is over, as a message of the conversation."""
        return self._message(turn, turn.shown())

    def _choice(self, turn: Turn, index: int) -> dict[str, Any]:
        shown = turn.shown()
        message = self._message(turn, shown)
        choice = self._beside(turn, shown, 0)
        choice["prompt_token_ids"] = turn.request.prompt
        if self._body.get("return_meta_info"):
            choice["meta_info"] = parts.meta_info(turn, shown)
        finish = self._finish(turn, message)
        return choice | {"index": index, "message": message, "finish_reason": finish}

    def _prompt(self, turn: Turn) -> dict[str, Any]:
        """The prompt's ids where vLLM has them; the choice has them at SGLang's place anyway."""
        asked = self._body.get("return_token_ids")
        return {"prompt_token_ids": turn.request.prompt} if asked else {}

    def _message(self, turn: Turn, shown: VisibleOutput) -> dict[str, Any]:
        text = parts.text_of(turn, shown, self._tokenizer)
        return chat.message_of(text, self._body, turn.request.rid)

    def _text(self, turn: Turn, shown: VisibleOutput, message: Mapping[str, Any]) -> str:
        if message:
            return str(message["content"] or "")
        text = parts.text_of(turn, shown, self._tokenizer)
        # A character that is not whole yet will look different in the next event.
        return chat.shown_text(text, self._body).rstrip("\ufffd")

    @staticmethod
    def _finish(turn: Turn, message: Mapping[str, Any]) -> str | None:
        reason = parts.finish_reason(turn.finish)
        return "tool_calls" if reason == "stop" and message.get("tool_calls") else reason

    def _beside(self, turn: Turn, shown: VisibleOutput, since: int) -> dict[str, Any]:
        ids = shown.tokens[since:]
        asked = bool(self._body.get("logprobs"))  # a training row has them in any case
        return {
            "logprobs": parts.token_logprobs(shown, since, self._names) if asked else None,
            "token_ids": ids,
            "response_token_ids": ids,
            **parts.stop_reasons(turn.finish),
            **parts.conversation_json(turn, self._ask, shown=shown),
        }

    def _frame(self, turn: Turn, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        spans = choices[0]["weight_versions"] if choices else []
        version = spans[-1]["version"] if spans else None
        return {
            "id": turn.request.rid,
            "object": kind,
            "created": int(time.time()),
            "model": self._model,
            "choices": choices,
            "metadata": {"weight_version": version, "weight_versions": spans},
        }
