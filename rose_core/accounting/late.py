"""What a live request costs that lending made late (pure): money in micro-units.

| price | where |
|---|---|
| what was asked | somebody said one, 0 too |
| what serving earns by a request | its pool says what tokens earn, and they were counted |
| what the GPUs cost by the requests that they served | otherwise |

The last is what a request must earn for serving to pay for its GPUs at the use that they had: at
least what it is worth to a pool that pays for itself. It says nothing of one that does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

_MILLION: Final = 1_000_000


class LateSource(StrEnum):
    """Where the price of a late request comes from; in words, for people."""

    ASKED = "as asked"
    REVENUE = "what the pool earns by a request"
    BREAK_EVEN = "the pool's GPUs by its requests"


@dataclass(frozen=True)
class TokenRevenue:
    """What serving earns by a million tokens, read or written, in micro-units."""

    per_million_input: int = 0
    per_million_output: int = 0


@dataclass(frozen=True)
class ServedTraffic:
    """What serving had from live requests, and what that took.

    Attributes:
        requests: that ended.
        input_tokens, output_tokens: that serving engines read and wrote while they counted.
        with_tokens: of the requests, those that ended while they did.
        gpu_hours: of the GPUs that served them.
    """

    requests: int
    gpu_hours: float
    input_tokens: int = 0
    output_tokens: int = 0
    with_tokens: int = 0


@dataclass(frozen=True)
class LatePrice:
    """The price of one late request; None = nothing was served that says it."""

    micros: float | None
    source: LateSource

    @property
    def whole(self) -> int:
        """As ``Prices`` takes it; what is not known is charged nothing."""
        return round(self.micros or 0)


def late_price(
    served: ServedTraffic,
    gpu_hour: int,
    revenue: TokenRevenue | None = None,
    asked: int | None = None,
) -> LatePrice:
    """The price of a late request, and where it comes from.

    Args:
        served: by the pool, beside the loan.
        gpu_hour: price of a GPU's hour.
        revenue: what the pool's owner says that tokens earn.
        asked: a price that somebody said, which counts before all others.
    """
    if asked is not None:
        return LatePrice(float(asked), LateSource.ASKED)
    earned = None if revenue is None else _earned(served, revenue)
    if earned is not None:
        return LatePrice(earned, LateSource.REVENUE)
    even = gpu_hour * served.gpu_hours / served.requests if served.requests else None
    return LatePrice(even, LateSource.BREAK_EVEN)


def _earned(served: ServedTraffic, revenue: TokenRevenue) -> float | None:
    """By a request on average; unknown where no token was counted: requests have some.

    Requests from before tokens were counted have none, and would make each one cheap.
    """
    if not served.with_tokens or not served.input_tokens + served.output_tokens:
        return None
    tokens = (
        served.input_tokens * revenue.per_million_input
        + served.output_tokens * revenue.per_million_output
    )
    return tokens / _MILLION / served.with_tokens
