"""The report's section on cost: what a correct answer of this run cost, and by what.

Nobody types a count: the trainer says in its progress what it trained on and how much of it was
right, the router counts tokens by kind of engine, the guard the time its gate was open. Pure; a
figure that is missing in the recording leaves the section with what is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rose_core.accounting.breakdown import CostBreakdown, breakdown, lines
from rose_core.accounting.correct import Sampled
from rose_core.accounting.cost import MICRO, Prices
from rose_core.accounting.late import ServedTraffic, late_price
from rose_core.accounting.ledger import GpuTier, GpuTime, Ledger, ServingImpact, Trajectories
from rose_demo.records import Recording
from rose_demo.statistics import LENT_WINDOWS, WITHHELD_WINDOWS, Attainment, growth
from rose_simulate.pages.statement_page import table

# The demo's parts: two serving replicas, of which one lends, a dedicated engine and the trainer.
REPLICAS: Final = 2
OWN_GPUS: Final = 2
# A stand-in's currency: one hour of a GPU's place is 1; a lent hour is half of that.
DEDICATED_HOUR, LENT_HOUR = MICRO, MICRO // 2
_MILLISECONDS, _HOUR_S = 1000, 3600.0


def late_requests(attainments: Mapping[str, Attainment]) -> int:
    """Requests of the lent replica that are late beyond what is late while nothing is lent."""
    lent, held = attainments.get(LENT_WINDOWS), attainments.get(WITHHELD_WINDOWS)
    if lent is None or held is None or lent.met is None or held.met is None:
        return 0
    return max(0, round((held.met - lent.met) * lent.count))


def costs(recording: Recording, attainments: Mapping[str, Attainment]) -> CostBreakdown | None:
    """What the run cost; None where nothing is known of its tokens or its gate."""
    steps = [one for one in recording.training if one.get("event") == "step"]
    borrowed = growth(recording.samples, "borrowed_tokens")
    dedicated = growth(recording.samples, "dedicated_tokens")
    opened = growth(recording.samples, "open_s")
    if borrowed is None or dedicated is None or opened is None or not steps:
        return None
    # Tokens, steps and the gate count from before the first turn, and so does the bill.
    seconds = recording.before_s + recording.samples[-1].at_s - recording.samples[0].at_s
    accepted, correct, trained = (_sum(steps, field) for field in ("trained", "correct", "kept"))
    served = recording.settings.seconds / _HOUR_S  # the requests are those of the measurement
    requests = ServedTraffic(len(recording.requests), REPLICAS * served)
    violation = late_price(requests, DEDICATED_HOUR)
    late = late_requests(attainments)
    own = round(OWN_GPUS * seconds * _MILLISECONDS)
    ledger = Ledger(
        dedicated=GpuTime(own, own),
        borrowed=GpuTime(
            round(seconds * _MILLISECONDS),
            min(round(seconds * _MILLISECONDS), round(opened * _MILLISECONDS)),
        ),
        trajectories=Trajectories(None, None, accepted, correct),
        serving=ServingImpact(len(recording.requests), late),
    )
    return breakdown(
        ledger,
        Prices(DEDICATED_HOUR, LENT_HOUR, violation.whole, reserve_hour=DEDICATED_HOUR),
        Sampled({GpuTier.DEDICATED: int(dedicated), GpuTier.BORROWED: int(borrowed)}, trained),
        violation=violation,
    )


def markdown(found: CostBreakdown | None) -> str:
    """The same lines as a table for a page of the documentation; empty where nothing is known."""
    if found is None:
        return ""
    rows = "".join(f"| {' | '.join(line)} |\n" for line in lines(found))
    return f"| | figure | |\n|---|---|---|\n{rows}"


def _sum(steps: Sequence[Mapping[str, Any]], field: str) -> int:
    return sum(int(one.get(field, 0)) for one in steps)


def section(found: CostBreakdown | None) -> str:
    """The section of the page."""
    head = "<h2>What a correct answer cost</h2>"
    if found is None:
        return f"{head}<p class='note'>Unknown: tokens, gate or training were not recorded.</p>"
    note = (
        "<p class='note'>A GPU's hour is 1, a lent one 0.5: prices of a stand-in, to show how the "
        "parts make the bill. An accepted trajectory is one that was trained on; it is correct "
        "where each of its turns was. A stand-in has no GPU's memory, so none is counted as kept "
        "back.</p>"
    )
    return f"{head}{table(found)}{note}"
