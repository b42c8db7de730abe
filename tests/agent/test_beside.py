"""What a slot counts of its engine's weights and of the live requests beside it."""

from rose_agent.guard.slots.slot import Totals
from rose_core.identity import SlotKey, SlotUid
from rose_core.wire.host import EngineState, EngineStatus


def test_only_what_ends_beside_the_slot_is_the_slots() -> None:
    totals = Totals(last_ns=0)
    totals.note_replica(100, 7)  # before there was a slot
    totals.note_replica(104, 7)
    totals.note_replica(110, 9)
    assert (totals.requests, totals.violations) == (10, 2)
    totals.note_replica(3, 1)  # the serving pod was replaced
    assert (totals.requests, totals.violations) == (13, 3)


def test_only_the_tokens_that_serving_had_beside_the_slot_are_the_slots() -> None:
    totals = Totals(last_ns=0)
    totals.note_served(9_000, 700, 30)  # before there was a slot
    totals.note_served(9_000, 700, 30)
    totals.note_served(9_500, 760, 34)
    assert (totals.input_tokens, totals.output_tokens, totals.with_tokens) == (500, 60, 4)
    totals.note_served(40, 3, 35)  # the serving engine began anew
    assert (totals.input_tokens, totals.output_tokens, totals.with_tokens) == (540, 63, 5)
    totals.note_served(60, 9, 2)  # and the count of requests, with a new replica
    assert (totals.input_tokens, totals.output_tokens, totals.with_tokens) == (560, 69, 7)


def test_requests_count_with_tokens_once_the_tokens_are_said() -> None:
    totals = Totals(last_ns=0)
    totals.note_replica(100, 0)
    totals.note_replica(400, 0)  # the engine does not say tokens yet
    totals.note_served(9_000, 700, 400)
    for finished in (402, 405, 900):  # and no more from here on: the same page is seen again
        totals.note_served(9_000, 700, finished)
    assert (totals.input_tokens, totals.with_tokens) == (0, 0)
    totals.note_served(9_800, 790, 903)
    assert (totals.input_tokens, totals.output_tokens) == (800, 90)
    assert totals.with_tokens == 503, "all that ended since the page before"


def test_weights_add_up_over_engines() -> None:
    totals = Totals(last_ns=0)
    for number, pulled in enumerate((900, 900, 960, 800, 0, 50)):
        status = EngineStatus(SlotKey(SlotUid("s"), 1), EngineState.SERVING, weight_bytes=pulled)
        totals.account(number, granted=True, until_ns=0, status=status)
    assert totals.weight_bytes == 960 + 800 + 50
