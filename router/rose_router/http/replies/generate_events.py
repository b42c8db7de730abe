"""SGLang's stream of a turn: each event says all of it so far, and only what is new is encoded.

From one event to the next nothing changes but the text, the tokens and their lists, and a count
that stands in several places. So the second one is written as any other answer (``parts.sglang``)
with marks in these places, and what stands around them is a template. It holds as long as what it
was made of. The first event, for which somebody waits, is written whole; so is that of a turn that
waits, has moved or is over.

Next step: ``streaming`` writes the lines.
"""

from __future__ import annotations

import msgspec

from rose_core.rollouts.requests.logprobs import SCALE
from rose_core.rollouts.transcripts.transcript import Leg
from rose_router.http.replies import parts
from rose_router.http.tokenizer.tokenization import Tokenizer
from rose_router.turns.turn import Turn, VisibleOutput, typed_abort

_encode = msgspec.json.Encoder().encode
_LINE = b"data: %b\n\n"
# A zero byte stands in no JSON: an event is taken apart there.
_MARK, _MARKED_LIST = msgspec.Raw(b"\0"), msgspec.Raw(b"[\0]")
_LENGTHS = ("output_token_logprobs_length", "output_token_sampling_mask_length")


class GenerateEvents:
    """The lines of a turn's stream; the last one is of its end.

    Args:
        turn: whose.
        tokenizer: for the text of a turn that has moved; ``None`` = it has the engines' own.
    """

    __slots__ = (
        *("_counts", "_done", "_ended", "_lists", "_made_of", "_template", "_tokenizer", "_turn"),
    )

    def __init__(self, turn: Turn, tokenizer: Tokenizer | None) -> None:
        self._turn, self._tokenizer = turn, tokenizer
        self._ended = False
        self._made_of: tuple[object, ...] = ()
        self._template, self._counts = b"", 0
        # Tokens that are encoded; their ids, and every list of theirs, without brackets.
        self._done = 0
        self._lists: list[bytearray] = []

    def __iter__(self) -> GenerateEvents:
        return self

    def __next__(self) -> bytes:
        """What may be shown now."""
        turn = self._turn
        if self._ended:
            raise StopIteration
        if turn.is_over:
            self._ended = True
            typed_abort(turn)
            return _LINE % _encode(parts.sglang(turn, self._tokenizer))
        shown, leg = turn.shown(), turn.leg
        if leg is not None and shown.tokens is leg.ids and not turn.transcript.legs:
            count = leg.placed
            # Else a list began late, and its entries are of other tokens.
            if len(leg.spans) == 1 and all([len(a) == count for a in leg.per_token.values()]):  # noqa: C419  # generators cost twice that
                return self._by_template(turn, leg, shown)
        return _LINE % _encode(parts.sglang(turn, self._tokenizer, shown))

    def _by_template(self, turn: Turn, leg: Leg, shown: VisibleOutput) -> bytes:
        """The line of a turn that is on its first engine."""
        span, per_token, count = leg.spans[0], leg.per_token, leg.placed
        label, scale = turn.labels.get(span.version), leg.meta.get(SCALE)
        made_of = (leg, turn.prompt_meta, span.version, span.kv, label, scale, len(per_token))
        if made_of != self._made_of:
            if not self._made_of:
                self._made_of = (leg,)
                return _LINE % _encode(parts.sglang(turn, self._tokenizer, shown))
            self._make(turn, shown)
            self._made_of = made_of
        done, lists = self._done, self._lists
        if count > done:
            self._done = count
            between = b"," if done else b""
            lists[0] += between + _encode(leg.ids[done:])[1:-1]
            for number, values in enumerate(per_token.values(), 1):
                lists[number] += between + _encode(values[done:])[1:-1]
        text = _encode(parts.text_of(turn, shown, self._tokenizer))
        return self._template % (text, *lists, *(b"%d" % count,) * self._counts)

    def _make(self, turn: Turn, shown: VisibleOutput) -> None:
        """Make the template, of which nothing is encoded yet."""
        event = parts.sglang(turn, self._tokenizer, shown)
        meta, per_token = event["meta_info"], shown.per_token
        event["text"], event["output_ids"] = _MARK, _MARKED_LIST
        meta.update(dict.fromkeys(per_token, _MARKED_LIST))
        counted = [meta, *meta["weight_versions"], *meta["rose"]["engines"]]
        for one, name in zip(counted, ("completion_tokens", "end", "tokens"), strict=True):
            one[name] = _MARK
        lengths = [name for name in _LENGTHS if name in meta]
        meta.update(dict.fromkeys(lengths, _MARK))
        self._counts = len(counted) + len(lengths)
        self._template = _LINE % _encode(event).replace(b"%", b"%%").replace(b"\0", b"%b")
        self._done, self._lists = 0, [bytearray() for _ in range(1 + len(per_token))]
