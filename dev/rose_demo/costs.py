"""The report's section on cost: what a correct answer of this run cost, and by what.

Nobody types a count: the trainer says in its progress what it trained on and how much of it was
right, the router counts tokens by kind of engine, the guard the time its gate was open. Pure; a
figure that is missing in the recording leaves the section with what is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

from rose_core.accounting.correct import (
    CostCorrect,
    Sampled,
    reserve_price,
    taken_apart,
    violation_price,
)
from rose_core.accounting.cost import Cost, Prices, cost
from rose_core.accounting.ledger import GpuTime, Ledger, ServingImpact, Tier, Trajectories
from rose_demo.records import Recording
from rose_demo.statistics import LENT_WINDOWS, WITHHELD_WINDOWS, Attainment, growth

MICRO: Final = 1_000_000
# The demo's parts: two serving replicas, of which one lends, a dedicated engine and the trainer.
REPLICAS: Final = 2
OWN_GPUS: Final = 2
# A stand-in's currency: one hour of a GPU's place is 1; a lent hour is half of that.
DEDICATED_HOUR, LENT_HOUR = MICRO, MICRO // 2
# The stand-in's memory is a claim, so the reserve is priced by the tenth.
RESERVE_SHARE: Final = 0.1
_MILLISECONDS, _HOUR_S = 1000, 3600.0


@dataclass(frozen=True)
class CostSummary:
    """What the run cost; money in micro-units, None is unknown.

    Attributes:
        bill: by cause.
        factors: of the cost per correct answer.
        accepted, correct: trajectories that were trained on, and correct answers among them.
        late: requests that lending made late beyond the share that is late without.
        violation: price of one of them.
        reserve: what each tenth of the lent GPU's memory is worth to serving at most.
        threshold: price of a million borrowed tokens up to which borrowing pays.
    """

    bill: Cost
    factors: CostCorrect | None
    accepted: int
    correct: int
    late: int
    violation: float | None
    reserve: float
    threshold: float | None


def late_requests(attainments: Mapping[str, Attainment]) -> int:
    """Requests of the lent replica that are late beyond what is late while nothing is lent."""
    lent, held = attainments.get(LENT_WINDOWS), attainments.get(WITHHELD_WINDOWS)
    if lent is None or held is None or lent.met is None or held.met is None:
        return 0
    return max(0, round((held.met - lent.met) * lent.count))


def costs(recording: Recording, attainments: Mapping[str, Attainment]) -> CostSummary | None:
    """What the run cost; None where nothing is known of its tokens or its gate."""
    steps = [one for one in recording.training if one.get("event") == "step"]
    borrowed = growth(recording.samples, "borrowed_tokens")
    dedicated = growth(recording.samples, "dedicated_tokens")
    opened = growth(recording.samples, "open_s")
    if borrowed is None or dedicated is None or opened is None or not steps:
        return None
    # Tokens, steps and the gate count from before the first turn, and so does the bill.
    seconds = recording.before_s + recording.samples[-1].at_s - recording.samples[0].at_s
    hours = seconds / _HOUR_S
    accepted, correct, trained = (_sum(steps, word) for word in ("trained", "correct", "kept"))
    served = recording.settings.seconds / _HOUR_S  # the requests are those of the measurement
    violation = violation_price(DEDICATED_HOUR, REPLICAS, served, len(recording.requests))
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
    prices = Prices(DEDICATED_HOUR, LENT_HOUR, round(violation or 0))
    bill = cost(ledger, prices)
    tokens = Sampled({Tier.DEDICATED: int(dedicated), Tier.BORROWED: int(borrowed)}, trained)
    factors = taken_apart(bill, tokens, accepted, correct)
    alone = None
    if factors is not None and Tier.DEDICATED in factors.per_million:
        # Without borrowing every token costs what a dedicated one does.
        alone = factors.per_million[Tier.DEDICATED] * factors.total / factors.blended
    return CostSummary(
        bill,
        factors,
        accepted,
        correct,
        late,
        violation,
        reserve_price(DEDICATED_HOUR, 1, hours, RESERVE_SHARE),
        None if factors is None or alone is None else factors.borrowed_threshold(alone),
    )


def _sum(steps: Sequence[Mapping[str, Any]], word: str) -> int:
    return sum(int(one.get(word, 0)) for one in steps)


def rows(found: CostSummary) -> list[tuple[str, str, str]]:
    """(what, figure, why) of each line."""
    bill, parts = found.bill, found.factors
    lines = [
        ("bill", money(bill.total), "of which the next four"),
        (
            "dedicated engine and trainer",
            money(bill.dedicated),
            f"{OWN_GPUS} GPUs, from before the first turn",
        ),
        ("lent time", money(bill.borrowed), "while the gate was open"),
        ("requests made late", money(bill.violations), f"{found.late} of them"),
        ("weights over the network", money(bill.network), "one cluster: no price"),
        ("accepted, correct", f"{found.accepted}, {found.correct}", "said by the trainer"),
    ]
    if parts is None:
        why = "no answer was correct, or no token is known"
        lines.append(("cost of a correct answer", "unknown", why))
    else:
        lines += [
            ("cost of a correct answer", money(parts.total), "the product of the next five"),
            *(
                (
                    f"a million {tier.lower()} tokens",
                    money(price),
                    f"{parts.share[tier]:.0%} of all",
                )
                for tier, price in parts.per_million.items()
            ),
            ("answer", f"{parts.answer_tokens:.1f} tokens", "of an accepted trajectory"),
            ("reasoning multiplier", f"{parts.reasoning:.2f}", "this model's turns are answers"),
            ("rollout ratio", f"{parts.rollout_ratio:.2f}", "tokens sampled for each trained on"),
            ("accept rate", f"{parts.accept_rate:.1%}", "correct among those trained on"),
        ]
    lines += [
        (
            "borrowing pays up to",
            money(found.threshold),
            "for a million borrowed tokens: what dedicated ones cost, the trainer's GPU in it",
        ),
        ("price of a late request", money(found.violation), "the pool's GPUs by its requests"),
        (
            "price of the reserve, at most",
            money(found.reserve),
            "for each tenth of the lent GPU's memory, if serving could use all of it",
        ),
    ]
    return lines


def money(micros: float | None) -> str:
    """In units of a GPU-hour's price."""
    return "unknown" if micros is None else f"{micros / MICRO:.4g}"


def section(found: CostSummary | None) -> str:
    """The section of the page."""
    head = "<h2>What a correct answer cost</h2>"
    if found is None:
        return f"{head}<p class='note'>Unknown: tokens, gate or training were not recorded.</p>"
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in rows(found)
    )
    note = (
        "<p class='note'>A GPU's hour is 1, a lent one 0.5: prices of a stand-in, to show how the "
        "parts make the bill. An accepted trajectory is one that was trained on; it is correct "
        "where each of its turns was.</p>"
    )
    top = "<tr><th></th><th>figure</th><th></th></tr>"
    return f"{head}<table><thead>{top}</thead><tbody>{body}</tbody></table>{note}"
