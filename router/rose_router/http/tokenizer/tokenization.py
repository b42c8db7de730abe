"""Text in and out, only where the lease brings a tokenizer; token ids are the truth.

A chat template is the model's own (``chat_template.jinja`` or ``tokenizer_config.json`` beside the
tokenizer); ``templates`` runs it on what ``conversation`` made of the caller's messages.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rose_core.rollouts.requests.stops import MOST_WINDOW, Stops
from rose_core.wire.tokenizer_files import MOST_OF, TOKENIZER
from rose_router.errors import BadRequest

if TYPE_CHECKING:
    from rose_router.http.tokenizer.templates import Template

# Tokens whose text is remembered: log-probs name the same ones again and again.
_MOST_TOKENS = 1 << 16

# Characters; a shorter text takes less time than to hand over to a thread of the library.
_LONG_TEXT = 1 << 15

_SAMPLED_WITH = ("temperature", "top_p", "top_k", "min_p")

_EVERY_ROUND = 8
"""Rounds since a question at each of which all is rendered as well; then at 16, 32, ..."""
_OF_ROUNDS = frozenset({"assistant", "tool"})
_TRIED_ROUNDS = (3, 6, 20)
"""Lengths of the conversations by which a template is tried once."""

# Stands for an answer whose tokens are known; no caller can have written it.
_MARK = f"answer-{secrets.token_hex(12)}"


class Tokenizer:
    """A ``tokenizer.json``, and what stands beside it.

    Args:
        path: the file, or the folder it stands in; what messages call it.
        files: their contents by name, where they do not lie there.

    Attributes:
        sampling_defaults: what the model's makers sample with (``generation_config.json``).

    Raises:
        BadRequest: it cannot be read.
    """

    def __init__(self, path: Path, files: Mapping[str, bytes] | None = None) -> None:
        import tokenizers  # noqa: PLC0415  # only where text is asked for

        file = path / TOKENIZER if files is not None or path.is_dir() else path
        self._folder = file.parent
        files = _read(file) if files is None else files
        self._files = {name: content for name, content in files.items() if name != TOKENIZER}
        self._token_text = lru_cache(_MOST_TOKENS)(
            lambda token: self.decode([token], skip_special=False)
        )
        self.most_text = sys.maxsize
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(files[TOKENIZER])
        except BaseException as error:  # the library's panics are no ``Exception``
            if isinstance(error, KeyboardInterrupt):
                raise
            reason = str(error).removeprefix("Cannot instantiate Tokenizer from buffer: ")
            message = f"{file} is no tokenizer.json: {reason}"
            raise BadRequest("NoTokenizer", message) from error
        self.sampling_defaults = _sampling_defaults(self._json("generation_config.json"))

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Text to token ids, by default with the special tokens the tokenizer adds by itself.

        Raises:
            BadRequest: the text is too long to be tokenized in the memory there is.
        """
        if len(text) > self.most_text:
            message = f"{len(text)} characters of text, and {self.most_text} are taken at a time"
            raise BadRequest("TooLong", message)
        if len(text) < _LONG_TEXT:
            return list(self._tokenizer.encode(text, add_special_tokens=special).ids)
        # One text or many: only this call lets other threads run meanwhile.
        (made,) = self._tokenizer.encode_batch([text], add_special_tokens=special)
        return list(made.ids)

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """Token ids to text."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special))

    def token_text(self, token: int) -> str:
        """The text of one token, special ones included; a part of a character is U+FFFD."""
        return self._token_text(token)

    def stops(self, strings: Sequence[str]) -> Stops | None:
        """What ends a turn at these strings; ``None`` when they are too long to be looked for."""
        longest = max(len(self.encode(string, special=False)) for string in strings)
        decode = partial(self.decode, skip_special=False)
        return Stops(tuple(strings), longest + 1, decode) if longest < MOST_WINDOW else None

    def chat(
        self, messages: Sequence[Any], tools: Sequence[Any], more: Mapping[str, Any]
    ) -> list[int]:
        """A conversation as the prompt of the next answer, in the model's own template.

        Args:
            messages: as ``conversation`` makes them.
            tools: as in OpenAI's request.
            more: further variables of the template (``chat_template_kwargs``).

        Raises:
            BadRequest: the model has no template, or it refuses the messages.
        """
        return self.encode(self._rendered(messages, tools, more), special=False)

    def chat_after(
        self,
        messages: Sequence[Any],
        answer: int,
        tools: Sequence[Any],
        more: Mapping[str, Any],
    ) -> list[int] | None:
        """What the template puts after the words of one answer: its end, and all that follows.

        Args:
            messages: as for ``chat``.
            answer: which of them; an assistant's.
            tools: as for ``chat``.
            more: as for ``chat``.

        Returns:
            Token ids; ``None`` where the template does not show an answer as it is told.
        """
        after = self._after_mark(messages, answer, tools, more)
        if after is None:
            return None
        if messages[answer].get("tool_calls") and not self._follows(
            messages, answer, tools, more, after
        ):
            return None
        return self.encode(after, special=False)

    def _after_mark(
        self,
        messages: Sequence[Any],
        answer: int,
        tools: Sequence[Any],
        more: Mapping[str, Any],
    ) -> str | None:
        """What stands behind an answer, as ``chat_after``.

        A turn renders its own round and not what tools have told since the last question, or an
        agent's session would cost the square of its rounds. That this makes the same text is shown
        by the template's trial, by the first rounds after each question, and by all of it whenever
        they have doubled. Where the template's syntax shows that it sees nothing else
        (``locality``), people's words are left out as well.
        """
        local = self._is_local
        near, place = _nearest(messages, answer) if local else _near(messages, answer)
        if len(near) == len(messages) or not (local or self._looks_near):
            return self._shown_after(messages, answer, tools, more)
        found = self._shown_after(near, place, tools, more)
        began = 0 if local else _first_round(messages, answer)
        rounds = sum(one["role"] == "assistant" for one in messages[began : answer + 1])
        if found is not None and rounds > _EVERY_ROUND and rounds & (rounds - 1):
            return found
        whole = self._shown_after(messages, answer, tools, more)
        if found is not None and whole != found:
            if local:
                self._is_local = False
            else:
                self._looks_near = False
        return whole

    @cached_property
    def _is_local(self) -> bool:
        """Whether the template's syntax says that people's words far away change nothing."""
        return self._template is not None and self._template.is_local

    @cached_property
    def _looks_near(self) -> bool:
        """Whether what the template puts behind an answer depends on its own round alone."""
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
        asks = {"role": "user", "content": "a question"}
        calls = {"role": "assistant", "content": "", "tool_calls": [call]}
        gives = {"role": "tool", "tool_call_id": "c", "name": "f", "content": "a result"}
        for rounds in _TRIED_ROUNDS:
            talk = [asks, *(rounds * [calls, gives])]
            near, place = _near(talk, len(talk) - 2)
            found = self._shown_after(near, place, [], {})
            if found != self._shown_after(talk, len(talk) - 2, [], {}):
                return False
        return True

    def _shown_after(
        self,
        messages: Sequence[Any],
        answer: int,
        tools: Sequence[Any],
        more: Mapping[str, Any],
    ) -> str | None:
        marked = [*messages]
        marked[answer] = {"role": "assistant", "content": _MARK}
        try:
            text = self._rendered(marked, tools, more)
        except BadRequest:
            return None  # it wants the calls that results of tools belong to
        before, mark, after = text.partition(_MARK)
        return after if mark and _MARK not in before and _MARK not in after else None

    def _follows(
        self,
        messages: Sequence[Any],
        answer: int,
        tools: Sequence[Any],
        more: Mapping[str, Any],
        after: str,
    ) -> bool:
        """Whether the template goes on alike after an answer that made calls.

        Some begin the results of calls otherwise. Where an answer is shown otherwise once it is
        not the last one, its end cannot be found, and what was told of it is believed.
        """
        # What stands before this answer's round seldom matters here, and a long history would be
        # rendered twice more at each of its turns.
        near, place = (_nearest if self._is_local else _near)(messages, answer)
        if len(near) < len(messages) and self._goes_on(near, place, tools, more, after):
            return True
        return self._goes_on(messages, answer, tools, more, after)

    def _goes_on(
        self,
        messages: Sequence[Any],
        answer: int,
        tools: Sequence[Any],
        more: Mapping[str, Any],
        after: str,
    ) -> bool:
        upto = {**more, "add_generation_prompt": False}
        try:
            whole = self._rendered(messages, tools, more)
            until = self._rendered(messages[: answer + 1], tools, upto)
        except BadRequest:
            return False  # it wants what was left out
        return not whole.startswith(until) or after.endswith(whole[len(until) :])

    def _rendered(
        self, messages: Sequence[Any], tools: Sequence[Any], more: Mapping[str, Any]
    ) -> str:
        if self._template is None:
            message = f"{self._folder}: the model has no chat template; send token ids as input_ids"
            raise BadRequest("NoTemplate", message)
        names = {"add_generation_prompt": True, **self._special, **more}
        return self._template.render(messages=messages, tools=list(tools) or None, **names)

    def _json(self, name: str) -> dict[str, Any]:
        """A file's object; empty where there is none.

        Raises:
            BadRequest: it is no JSON.
        """
        try:
            found: Any = json.loads(self._files.get(name, b"{}"))
        except (ValueError, RecursionError) as error:
            message = f"{self._folder / name} is no JSON: {error}"
            raise BadRequest("NoTokenizer", message) from error
        return found if isinstance(found, dict) else {}

    @cached_property
    def _config(self) -> dict[str, Any]:
        return self._json("tokenizer_config.json")

    @cached_property
    def _special(self) -> dict[str, str]:
        found = {}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            value = self._config.get(name)
            found[name] = str(value.get("content", "")) if isinstance(value, dict) else value or ""
        return found

    @cached_property
    def _template(self) -> Template | None:
        beside = self._files.get("chat_template.jinja")
        text: Any = self._config.get("chat_template")
        text = text if beside is None else beside.decode(errors="replace")
        if isinstance(text, list):  # several by name; the default one is asked for
            text = next((one.get("template") for one in text if _is_default(one)), None)
        if not isinstance(text, str):
            return None
        from rose_router.http.tokenizer.templates import Template  # noqa: PLC0415  # jinja, where asked for

        return Template(text)


def _near(messages: Sequence[Any], answer: int) -> tuple[Sequence[Any], int]:
    """A conversation without the rounds of tools between its last question and the answer's round.

    What people and systems say is never left out: a word of theirs may hold from there on, as
    ``/no_think`` does.

    Returns:
        The messages, and where the answer stands among them.
    """
    last = _round_before(messages, answer)
    first = _first_round(messages, answer)
    if last <= first:
        return messages, answer
    return [*messages[:first], *messages[last:]], answer - (last - first)


def _nearest(messages: Sequence[Any], answer: int) -> tuple[Sequence[Any], int]:
    """As much of a conversation as a local template sees: its beginning and the last two rounds.

    Returns:
        The messages, and where the answer stands among them.
    """
    last = _round_before(messages, answer)
    # Some templates want questions and answers to alternate behind a system's word.
    if messages[0]["role"] == "system" and messages[last - 1]["role"] == "user":
        last -= 1
    if last <= 1:
        return messages, answer
    return [messages[0], *messages[last:]], answer - last + 1


def _round_before(messages: Sequence[Any], answer: int) -> int:
    """Where the answer before the given one stands; 0 where there is none."""
    before = range(answer - 1, 0, -1)
    return next((n for n in before if messages[n]["role"] == "assistant"), 0)


def _first_round(messages: Sequence[Any], answer: int) -> int:
    """Behind the last message, before the answer's round and the one before, that is no tool's."""
    before = range(_round_before(messages, answer) - 1, -1, -1)
    asks = (n for n in before if messages[n]["role"] not in _OF_ROUNDS)
    return next(asks, answer) + 1


def _read(file: Path) -> dict[str, bytes]:
    """The files beside a ``tokenizer.json``, and it.

    Raises:
        BadRequest: it is not there.
    """
    if not file.is_file():
        message = f"{file}: no such tokenizer; --tokenizer wants a tokenizer.json or its folder"
        raise BadRequest("NoTokenizer", message)
    beside = {name: file.parent / name for name in MOST_OF} | {TOKENIZER: file}
    return {name: one.read_bytes() for name, one in beside.items() if one.is_file()}


def _is_default(template: object) -> bool:
    return isinstance(template, dict) and template.get("name") == "default"


def _sampling_defaults(found: Mapping[str, Any]) -> dict[str, float]:
    """What a model's makers sample with, as engines take it where a request does not say.

    Penalties are left out: a turn with one cannot move between engines, and nobody asked.
    """
    chosen = {name: found[name] for name in _SAMPLED_WITH if _is_number(found.get(name))}
    return chosen | ({"temperature": 0.0} if found.get("do_sample") is False else {})


def _is_number(value: object) -> bool:
    # Below what any float has: these files may hold ``Infinity`` and numbers of any length.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9
