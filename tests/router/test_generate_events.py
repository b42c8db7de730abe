"""SGLang's stream of a turn: by the template each event says what it says when written whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest

from rose_core.rollouts.requests.logprobs import SCALE
from rose_core.rollouts.requests.stops import Stops
from rose_core.rollouts.transcripts.transcript import Leg, StreamEvent, Transcript
from rose_core.wire.routing import EngineKind
from rose_router.http.replies import parts
from rose_router.http.replies.generate_events import GenerateEvents
from rose_router.turns.request import TurnRequest
from rose_router.turns.turn import Turn, TurnState

FIRST, SECOND = "run@1.0", "run@1.1"


def turn(**fields: Any) -> Turn:  # noqa: ANN401  # of a request
    request = TurnRequest("r%b\0", (1, 2, 3), {"temperature": 0.5}, **fields)
    made = Turn(request, 0.0, Transcript((1, 2, 3)), labels={}, state=TurnState.RUNNING)
    made.leg = Leg("100%", EngineKind.DEDICATED, "x", FIRST, 0)
    return made


def event(
    count: int,
    new: int = 1,
    *,
    tops: bool = False,
    scale: str = "temperature",
    spans: Sequence[tuple[str, int, int]] = (),
) -> StreamEvent:
    """The last ``new`` of ``count`` tokens."""
    ids = list(range(count - new, count))
    lists: dict[str, Any] = {"output_token_logprobs": [[-one / 8, one, None] for one in ids]}
    if tops:
        lists["output_top_logprobs"] = [[[-0.5, one, "%b"]] for one in ids]
    meta = {"prompt_tokens": 3, "cached_tokens": 0, SCALE: scale}
    text, spans = 'é"%\n' * new, spans or [(FIRST, 0, count)]
    return StreamEvent(ids, count, lists, text, spans=spans, meta=meta)


def said(line: bytes) -> Any:  # noqa: ANN401  # JSON
    assert line.startswith(b"data: {")
    assert line.endswith(b"}\n\n")
    return msgspec.json.decode(line[6:])


def steps_of(one: Turn, *, tops: bool = False) -> Iterator[Callable[[], None]]:
    """What may befall a turn between two events of its stream."""

    def take(count: int, new: int = 1, **more: Any) -> Callable[[], None]:  # noqa: ANN401
        def taken() -> None:
            leg = one.leg
            assert leg is not None
            leg.take(event(count, new, tops=tops, **more))

        return taken

    def told(**more: object) -> Callable[[], None]:
        def learned() -> None:
            one.prompt_meta = one.prompt_meta | more

        return learned

    yield take(1)
    yield told(prompt_tokens=3, cached_tokens=2)
    yield take(2)
    yield take(3)
    yield take(3, 0)
    yield take(7, 4)
    yield told(input_token_logprobs=[[None, 1, "%d\0"]])
    yield take(8)
    yield lambda: one.labels.update({FIRST: "step-%b"})  # type: ignore[attr-defined]
    yield take(9)
    yield take(10, scale="original")
    yield take(11)
    yield take(12, spans=[(FIRST, 0, 11), (SECOND, 11, 12)])
    yield take(13, spans=[(FIRST, 0, 11), (SECOND, 11, 13)])

    def move() -> None:
        assert one.leg is not None
        one.transcript.fold(one.leg)
        one.leg = Leg("other", EngineKind.BORROWED, "y", SECOND, len(one.transcript.tokens))

    yield move
    yield take(1, spans=[(SECOND, 0, 1)])
    yield take(2, spans=[(SECOND, 0, 2)])


@pytest.mark.parametrize("tops", [False, True])
@pytest.mark.parametrize("stop", [None, "%\nx"])
def test_each_event_is_what_it_would_be_if_it_were_written_whole(
    tops: bool, stop: str | None
) -> None:
    stops = None if stop is None else Stops((stop,), 4, str)
    one = turn(passed={"return_logprob": True}, stops=stops)
    events = GenerateEvents(one, None)
    for step in steps_of(one, tops=tops):
        step()
        whole = msgspec.json.decode(msgspec.json.encode(parts.sglang(one, None)))
        assert said(next(events)) == whole
    one.state, one.finish = TurnState.DONE, {"type": "stop"}
    one.transcript.fold(one.leg)  # type: ignore[arg-type]
    one.leg = None
    assert said(next(events))["meta_info"]["finish_reason"] == {"type": "stop"}
    with pytest.raises(StopIteration):
        next(events)


def test_a_turn_that_fails_says_so_in_its_last_event() -> None:
    one = turn()
    events = GenerateEvents(one, None)
    one.leg, one.state, one.error = None, TurnState.FAILED, ValueError("no more")
    finish = said(next(events))["meta_info"]["finish_reason"]
    assert (finish["type"], finish["message"]) == ("abort", "no more")
    assert list(events) == []


def test_an_event_of_a_long_stream_is_not_written_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, made = parts.sglang, list[object]()

    def counted(*given: Any) -> dict[str, Any]:  # noqa: ANN401  # as the function's
        made.append(given)
        return whole(*given)

    monkeypatch.setattr(parts, "sglang", counted)
    one = turn()
    assert one.leg is not None
    events = GenerateEvents(one, None)
    for count in range(1, 200):
        one.leg.take(event(count))
        assert said(next(events))["output_ids"] == list(range(count))
    assert len(made) == 2, "the first event, and the template"


def test_a_list_that_begins_late_is_shown_as_it_is() -> None:
    one = turn()
    assert one.leg is not None
    events = GenerateEvents(one, None)
    for count in range(1, 8):
        one.leg.take(event(count, tops=count > 3))
        whole = msgspec.json.decode(msgspec.json.encode(parts.sglang(one, None)))
        assert said(next(events)) == whole
