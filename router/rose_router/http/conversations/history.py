"""What stands behind a request's messages: tokens sampled here as they were, the rest rendered.

Next step: ``rose_core.rollouts.conversations.message_tree`` holds the turns; ``tokenization``
renders the rest.
"""

from __future__ import annotations

import base64
import binascii
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from rose_core.rollouts.conversations.message_tree import (
    KnownDigests,
    MessageTree,
    Owner,
    PrefixMatch,
    Routing,
    root_of,
)
from rose_core.rollouts.errors import InvalidTurn
from rose_router.http.conversations.conversation import Message
from rose_router.http.tokenizer.tokenization import Tokenizer
from rose_router.turns.turn import Turn

_UNFINISHED = frozenset({"", "abort"})
"""Turns that were cut short: their callers ask again."""

EXPERTS = "routed_experts"
"""In ``meta_info``: base64 of a row for every token of the turn's context but the last."""

_MOST_AT_ONCE = 1 << 15  # ids that are packed in one call: a quarter of a millisecond
_NOT_COMMON = ("add_generation_prompt",)  # a variable that changes what comes after the messages


Find = Callable[
    [str, bytes, Sequence[Mapping[str, Any]], str, Sequence[bytes]],
    PrefixMatch,
]
"""``MessageTree.find``."""


@dataclass(frozen=True)
class Conversation:
    """The prompt of a request, and what is known of where its tokens come from.

    Attributes:
        ids: the prompt.
        match: what of its messages was known.
        exact: how many ids are an earlier turn's, as they were given and sampled.
        begun: the beginning of the answer that the caller has written.
        session: whose it is, where the messages say so; empty = they do not.
        packed: the ids as the tree keeps them, where many are new; ``None``: it makes that itself.
    """

    ids: tuple[int, ...]
    match: PrefixMatch
    exact: int
    begun: str = ""
    session: str = ""
    packed: array[int] | None = None

    @cached_property
    def as_json(self) -> dict[str, Any]:
        """For replies; a stream says it with every event."""
        return {
            "messages": len(self.match.digests),
            "known_messages": self.match.messages,
            "exact_tokens": self.exact,
            "rendered_tokens": len(self.ids) - self.exact,
            "altered_at": self.match.altered_at,
        }


class History:
    """The conversations of a router's callers.

    Args:
        tree: what is known.
        tokenizer: renders what is not.
        find: asks the tree; where a thread makes a prompt, it asks in the thread of the tree.
        known: what was computed of conversations before; ``None`` = nothing.
    """

    def __init__(
        self,
        tree: MessageTree,
        tokenizer: Tokenizer,
        find: Find | None = None,
        known: KnownDigests | None = None,
    ) -> None:
        self._known = KnownDigests() if known is None else known
        self._tree = tree
        self._tokenizer = tokenizer
        self._find = find or tree.find

    def prompt(
        self,
        job: str,
        session: str,
        messages: Sequence[Message],
        tools: Sequence[Any],
        variables: Mapping[str, Any],
        *,
        begun: str = "",
    ) -> Conversation:
        """The prompt of a conversation.

        Args:
            job: whose.
            session: of the request; empty = it names none.
            messages: as ``conversation`` makes them.
            tools: as in OpenAI's request.
            variables: of the template.
            begun: beginning of the answer.

        Raises:
            BadRequest: the model has no template, or it refuses the messages.
            InvalidTurn: it makes nothing of them.
        """
        common = {name: value for name, value in variables.items() if name not in _NOT_COMMON}
        root = root_of(tools, common)
        match = self._find(job, root, messages, session, self._known.of(root, messages))
        node, new = match.node, None
        if node is not None:
            new = self._tokenizer.chat_after(messages, match.messages - 1, tools, variables)
        if node is None or new is None:
            # A template that does not show an answer as it is told: nothing can be taken over.
            match = replace(match, node=None, messages=0)
            ids, exact, found = self._tokenizer.chat(messages, tools, variables), 0, session
        else:
            before = node.ids()
            exact, found = len(before), session or node.owner[1]
            # A turn that ended by itself holds the token that ends an answer; one that was cut
            # does not, and the template's own is then part of what is given.
            ended = node.finish == "stop" and new[:1] == before[-1:]
            ids = before + (new[1:] if ended else new)
        if begun:
            ids = ids + self._tokenizer.encode(begun, special=False)
        if not ids:
            raise InvalidTurn("messages: the model's chat template makes no token of them")
        packed = _packed(ids) if len(ids) - exact > _MOST_AT_ONCE else None
        return Conversation(tuple(ids), match, exact, begun, found, packed)

    def note(
        self,
        conversation: Conversation,
        owner: Owner,
        turn: Turn,
        answer: Message,
        semantics: str,
        *,
        by: str,
    ) -> None:
        """A turn of the conversation is over.

        Args:
            conversation: its prompt.
            owner: its job, and its trajectory by its caller's name.
            turn: the turn.
            answer: the assistant's message as its caller will send it back.
            semantics: which distribution its log-probs belong to.
            by: what says whose it is.
        """
        shown, finish = turn.shown(), str((turn.finish or {}).get("type", ""))
        if not shown.tokens or turn.abandoned or finish in _UNFINISHED:
            return
        if conversation.begun:
            answer = {**answer, "content": conversation.begun + str(answer.get("content") or "")}
        entries = shown.per_token.get("output_token_logprobs") or ()
        self._tree.note(
            owner,
            turn.request.rid,
            conversation.match,
            conversation.ids if conversation.packed is None else conversation.packed,
            answer,
            sampled=shown.tokens,
            logprobs=array("f", (math.nan if one[0] is None else one[0] for one in entries)),
            spans=shown.spans,
            finish=finish,
            semantics=semantics,
            routing=routing_of(turn),
            by=by,
        )


def _packed(ids: Sequence[int]) -> array[int]:
    """Ids, in slices between which the thread that reads them gives way."""
    made = array("I")
    for begin in range(0, len(ids), _MOST_AT_ONCE):
        made.extend(ids[begin : begin + _MOST_AT_ONCE])
    return made


def routing_of(turn: Turn) -> Routing | None:
    """Which experts the tokens of a turn that is over went through, where its engine said so."""
    given, legs = turn.last_meta.get(EXPERTS), turn.transcript.legs
    if not isinstance(given, str) or not legs or not legs[-1].complete:
        return None
    written = turn.last_meta.get("completion_tokens")
    if not isinstance(written, int) or written < len(legs[-1].ids):
        return None
    try:
        rows = base64.b64decode(given, validate=True)
    except binascii.Error:
        return None
    tokens = len(turn.request.prompt) + turn.held
    # An engine may have written behind the turn's end: rows of those tokens are nobody's.
    behind = written - len(legs[-1].ids)
    found = Routing.of(rows, tokens + behind, recomputed=legs[-1].offset)
    return None if found is None else found.until(tokens - 1)
