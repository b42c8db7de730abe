"""Tokens, log-probs and version spans of one turn, gathered leg by leg.

A *leg* is one request to one engine. A turn that loses its engine goes on with another leg whose
prompt is the turn's prompt plus the tokens held so far. Tokens of a leg are first *received*, then
*placed* (the version that sampled them is known); only placed tokens are held when a leg is lost
and only placed tokens are shown to the caller, so nothing shown is ever taken back.

An engine calls its own checkpoint ``base``, whichever it is. Where a leg was sent to an attested
version 0, that word stands for this version; anywhere else it is attested by nobody.

    received --spans of the engine cover it--> placed --leg folded--> held
    received --leg lost before that----------> dropped (version unknown; sampled again)

Next step: ``splice`` says what the request of the next leg looks like.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from rose_core.identity import BASE_LABEL
from rose_core.rollouts.errors import BrokenStream
from rose_core.rollouts.transcripts.spans import Kv, TokenSpan, cut, joined, normal, shifted
from rose_core.rollouts.versions import parse
from rose_core.wire.routing import EngineKind

# Lists that an engine returns with one entry per output token.
PER_TOKEN = (
    *("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs"),
    *("output_token_sampling_mask", "output_token_sampling_logprobs"),
)

# Named once: an enum's member is slow to find.
_BORROWED, _OWN, _MIXED = EngineKind.BORROWED, Kv.OWN, Kv.MIXED


class StreamEvent(msgspec.Struct, frozen=True, gc=False):
    """One event of an engine's stream, cumulative or incremental.

    Attributes:
        ids: output token ids; all of the leg so far, or only the new ones.
        count: output tokens of the leg so far (``completion_tokens``).
        per_token: the lists of ``PER_TOKEN`` that came along, long or short like ``ids``.
        spans: (version, start, end) over the leg's tokens, when the event has them.
        label: the engine's weight version when it made the event; says nothing about its tokens
            unless it is the last event.
        meta: everything the engine said beside its tokens.
    """

    ids: Sequence[int]
    count: int
    per_token: Mapping[str, Sequence[Any]] = msgspec.field(default_factory=dict)
    text: str | None = None
    finish: Mapping[str, Any] | None = None
    spans: Sequence[tuple[str, int, int]] | None = None
    label: str = ""
    meta: Mapping[str, Any] = msgspec.field(default_factory=dict)

    @property
    def aborted(self) -> bool:
        """The engine ends the leg without finishing the turn."""
        return self.finish is not None and self.finish.get("type") == "abort"


@lru_cache(4096)
def _attested(version: str) -> tuple[str, str]:
    """The run of a version, and the version itself where it is a version 0."""
    found = parse(version)
    return ("", "") if found is None else (found.run, version if found.is_base else "")


class Leg:
    """What one engine has said in answer to one request.

    Args:
        engine, kind: who answers.
        rid: the leg's own request id; fences it from every other leg.
        version: label attested when the leg was sent; also its prefix-cache key.
        offset: tokens the turn held when the leg began.
        reused: the engine may begin it on keys that an older version computed.

    Attributes:
        ended: the engine itself has said that it is over; before that it may still work on it.
    """

    __slots__ = (
        "_base",
        "_only_new",
        "_run",
        "_text",
        "ended",
        "engine",
        "finish",
        "ids",
        "kind",
        "meta",
        "offset",
        "per_token",
        "placed",
        "placed_text",
        "reused",
        "rid",
        "spans",
        "version",
    )

    def __init__(
        self,
        engine: str,
        kind: EngineKind,
        rid: str,
        version: str,
        offset: int,
        *,
        reused: bool = False,
    ) -> None:
        self.engine, self.kind, self.rid = engine, kind, rid
        self.version, self.offset, self.reused = version, offset, reused
        self._run, self._base = _attested(version)
        self.ids: list[int] = []
        self.per_token: dict[str, list[Any]] = {}
        self.spans: tuple[TokenSpan, ...] = ()
        self.placed = 0
        self.placed_text = ""
        self.finish: Mapping[str, Any] | None = None
        self.ended = False
        self.meta: Mapping[str, Any] = {}
        self._text = ""
        # Whether events hold only what is new; None before that can be told.
        self._only_new: bool | None = None

    def take(self, event: StreamEvent) -> int:
        """Add an event.

        Returns:
            The number of new tokens.

        Raises:
            BrokenStream: tokens are missing, or the engine counts backwards.
        """
        held, count = len(self.ids), event.count
        if (fresh := self._fresh(event, held)) > 0:
            return fresh
        if count < held:
            message = f"engine {self.engine} counted {held} tokens before and {count} now"
            raise BrokenStream(message)
        if held and self._only_new is None:
            self._only_new = len(event.ids) < count or event.ids[:held] != self.ids
        if count > held:
            self._add(self.ids, event.ids, held, event, "output_ids")
            for name, values in event.per_token.items():
                self._add(self.per_token.setdefault(name, []), values, held, event, name)
        self._read_text(event, held)
        self.meta, self.finish = event.meta, event.finish
        self.ended = event.finish is not None
        self._place(event)
        return count - held

    def _fresh(self, event: StreamEvent, held: int) -> int:
        """Take the usual event in one go: new tokens, all of them of the attested version.

        Returns:
            The number of new tokens; 0 = it is another one, and nothing of it was taken.
        """
        ids, spans, text, count = event.ids, event.spans, event.text, event.count
        fresh, only_new = count - held, self._only_new
        begin = 0 if only_new or not held else held  # of what is new in its lists
        if len(ids) - begin != fresh or not spans or len(spans) > 1 or (begin and only_new is None):
            return 0
        version, start, end = spans[0]
        if version != self.version or start or end < count or text is None:
            return 0
        for values in event.per_token.values():
            if len(values) - begin != fresh:
                return 0
        self.ids.extend(ids[begin:] if begin else ids)
        kept = self.per_token
        for name, values in event.per_token.items():
            kept.setdefault(name, []).extend(values[begin:] if begin else values)
        self._text = self.placed_text = self._text + text if only_new else text
        self.meta, self.finish = event.meta, event.finish
        self.ended = event.finish is not None
        self.spans = (TokenSpan(version, 0, count, _MIXED if self.reused else _OWN),)
        self.placed = count
        return fresh

    def end(self, count: int, finish: Mapping[str, Any]) -> None:
        """The turn ends with the ``count``-th token, whatever the engine wrote behind it.

        Args:
            count: at most as many as are placed.
            finish: the turn's finish reason.
        """
        del self.ids[count:]
        for values in self.per_token.values():
            del values[count:]
        self.spans = cut(self.spans, count)
        self.placed, self.finish = count, finish

    def _add(
        self, kept: list[Any], values: Sequence[Any], held: int, event: StreamEvent, what: str
    ) -> None:
        """Keep the entries ``held`` to ``count``, whether the engine repeats the earlier or not."""
        fresh = event.count - held
        if not self._only_new:
            # The engine may already have appended more than it counted: take its count.
            new = values[held : event.count]
        else:
            # An abort may come behind new tokens in one event: it repeats its last token, and all
            # of its log-probs.
            new = values[:fresh] if len(values) == fresh or event.aborted else ()
        if len(new) != fresh:
            message = (
                f"{what}: {len(values)} entries where tokens {held} to {event.count} were announced"
            )
            raise BrokenStream(message)
        kept.extend(new)

    def _read_text(self, event: StreamEvent, held: int) -> None:
        text = event.text
        if text is None:
            return
        if not self._only_new:
            self._text = text
        elif len(event.ids) > event.count - held:
            # An abort has the whole text, behind that of new tokens that came with it.
            self._text = text[(len(text) - len(self._text)) // 2 :]
        else:
            self._text += text

    def _place(self, event: StreamEvent) -> None:
        spans, label = event.spans, event.label
        run, base = self._run, self._base
        if base:
            label = base if label == BASE_LABEL else label
            spans = spans and [(base, *s[1:]) if s[0] == BASE_LABEL else s for s in spans]
        if spans is None and event.finish is not None and label == self.version:
            # Labels only grow: one that is the same at both ends held all the time between.
            spans = [(self.version, 0, event.count)]
        if spans is None:
            return
        version = self.version
        for span in spans:
            if span[0] == version:
                continue
            labelled = parse(span[0])
            if labelled is None or (run and labelled.run != run):
                return  # a label that is no version of our run was attested by nobody
        count = len(self.ids)
        found = normal(spans, version, count, reused=self.reused)
        if found:
            self.spans, self.placed, self.placed_text = found, count, self._text

    def allowed(self, exact: str) -> int:
        """Placed tokens up to the first that ``exact``, when given, did not sample."""
        if exact:
            for span in self.spans:
                if span.version != exact:
                    return span.start
        return self.placed

    @property
    def aborted(self) -> bool:
        """The engine ended the leg without finishing the turn."""
        return self.finish is not None and self.finish.get("type") == "abort"

    @property
    def complete(self) -> bool:
        """The engine finished the turn and every token's version is known.

        An engine that says it has finished without a single token has not: such an answer would
        look like a silent policy, so the turn is tried again.
        """
        finish = self.finish
        if finish is None or finish.get("type") == "abort":
            return False
        return 0 < len(self.ids) == self.placed


class Folded(msgspec.Struct, frozen=True, gc=False):
    """What became of a leg's tokens: ``kept`` are held now, ``dropped`` will be sampled again."""

    kept: int
    dropped: int


class Transcript(msgspec.Struct, eq=False):
    """The turn so far: its prompt and everything held of its legs.

    Attributes:
        prompt: answers to the same prompt share it.
        exact_text: false once a leg was cut: an engine's text leaves out characters that are not
            whole yet.
        borrowed: a borrowed engine gave at least one token.
    """

    prompt: Sequence[int]
    tokens: list[int] = msgspec.field(default_factory=list)
    per_token: dict[str, list[Any]] = msgspec.field(default_factory=dict)
    spans: tuple[TokenSpan, ...] = ()
    text: str = ""
    exact_text: bool = True
    legs: list[Leg] = msgspec.field(default_factory=list)
    borrowed: bool = False

    def fold(self, leg: Leg, exact: str = "") -> Folded:
        """Hold what is placed of a leg and forget the rest of it.

        Args:
            leg: ended for good; a later event of it must not be taken.
            exact: the only version the turn may be sampled by, or empty.
        """
        ids, placed, spans = leg.ids, leg.placed, leg.spans
        keep, count = leg.allowed(exact) if exact else placed, len(ids)
        if keep == count:
            self.tokens.extend(ids)
            for name, values in leg.per_token.items():
                self.per_token.setdefault(name, []).extend(values)
        else:
            self.tokens.extend(ids[:keep])
            for name, values in leg.per_token.items():
                self.per_token.setdefault(name, []).extend(values[:keep])
        if keep == placed:
            self.text += leg.placed_text
        else:
            spans = cut(spans, keep)
        if self.spans or leg.offset:
            spans = joined((*self.spans, *shifted(spans, leg.offset)))
        self.spans = spans
        if count and not (keep == count and leg.complete):
            self.exact_text = False
        self.legs.append(leg)
        if placed and leg.kind is _BORROWED:
            self.borrowed = True
        return Folded(keep, count - keep)

    @property
    def context(self) -> Sequence[int]:
        """The prompt of the next leg."""
        return (*self.prompt, *self.tokens) if self.tokens else self.prompt

    @property
    def kinds(self) -> tuple[EngineKind, ...]:
        """Kinds of the engines that gave tokens, in order of first use."""
        return tuple(dict.fromkeys(leg.kind for leg in self.legs if leg.placed))
