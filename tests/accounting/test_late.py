"""What a late request costs: asked, earned by its pool, or what the GPUs cost."""

import pytest

from rose_core.accounting.late import (
    LatePrice,
    LateSource,
    ServedTraffic,
    TokenRevenue,
    late_price,
)

SERVED = ServedTraffic(1000, 2.0, input_tokens=3_000_000, output_tokens=500_000, with_tokens=1000)
REVENUE = TokenRevenue(per_million_input=250_000, per_million_output=1_000_000)
GPU_HOUR = 2_000_000


def test_a_late_request_costs_what_its_pool_earns_by_one() -> None:
    # 3 millions read at 0.25 and half a million written at 1: 1.25 by 1,000 requests.
    assert late_price(SERVED, GPU_HOUR, REVENUE) == LatePrice(1250.0, LateSource.REVENUE)
    written = TokenRevenue(per_million_output=1_000_000)
    assert late_price(SERVED, GPU_HOUR, written) == LatePrice(500.0, LateSource.REVENUE)
    nothing = TokenRevenue()
    assert late_price(SERVED, GPU_HOUR, nothing) == LatePrice(0.0, LateSource.REVENUE), "as said"


@pytest.mark.parametrize(
    ("served", "revenue"),
    [(SERVED, None), (ServedTraffic(1000, 2.0), REVENUE)],
    ids=["its pool says nothing", "no token was counted"],
)
def test_where_no_revenue_is_known_it_costs_what_the_gpus_must_earn(
    served: ServedTraffic, revenue: TokenRevenue | None
) -> None:
    assert late_price(served, GPU_HOUR, revenue) == LatePrice(4000.0, LateSource.BREAK_EVEN)


def test_requests_from_before_tokens_were_counted_make_none_cheaper() -> None:
    old = ServedTraffic(1_010_000, 2.0, 30_000_000, 5_000_000, with_tokens=10_000)
    assert late_price(old, GPU_HOUR, REVENUE) == LatePrice(1250.0, LateSource.REVENUE)
    silent = ServedTraffic(1000, 2.0, 30_000_000, 5_000_000)
    assert late_price(silent, GPU_HOUR, REVENUE).source is LateSource.BREAK_EVEN


def test_a_price_that_was_asked_counts_before_both() -> None:
    assert late_price(SERVED, GPU_HOUR, REVENUE, asked=0) == LatePrice(0.0, LateSource.ASKED)
    assert late_price(SERVED, GPU_HOUR, None, asked=7) == LatePrice(7.0, LateSource.ASKED)


def test_without_a_request_there_is_no_price() -> None:
    idle = ServedTraffic(0, 2.0, input_tokens=5)
    for revenue in (None, REVENUE):
        found = late_price(idle, GPU_HOUR, revenue)
        assert found == LatePrice(None, LateSource.BREAK_EVEN)
        assert found.whole == 0, "charged nothing"
