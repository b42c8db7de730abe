"""Serving guard: what live traffic felt, how fast the gate closed, and what kept it closed."""

from __future__ import annotations

from rose_dev.dashboards.model import (
    Dashboard,
    Panel,
    Row,
    high_is_bad,
    low_is_bad,
    quantiles,
    rates,
    stat,
)

DASHBOARD = Dashboard(
    name="guard",
    title="ROSE / Serving guard",
    description="Latency of live traffic beside rollouts, and everything that protects it.",
    jobs=("rose_guard_tick_seconds_count", "rose_tap_replicas", "rose_host_engines"),
    rows=(
        Row(
            "In short",
            (
                stat(
                    "Within the SLO",
                    "Share of live requests that met their pool's objective.",
                    "percentunit",
                    'sum(rate(rose_guard_serving_requests_total{met="true", $here}[$rate])) '
                    "/ sum(rate(rose_guard_serving_requests_total{$here}[$rate]))",
                    steps=low_is_bad(0.95, 0.99),
                ),
                stat(
                    "Gates open",
                    "Slots whose engine may compute now.",
                    "short",
                    "sum(rose_guard_gate_open{$here})",
                ),
                stat(
                    "Arrival to closed gate, p99",
                    "From the first segment of a request to the closed permit.",
                    "s",
                    "histogram_quantile(0.99, sum by (le) "
                    "(rate(rose_guard_arrival_to_close_seconds_bucket{$here}[$rate])))",
                    steps=high_is_bad(0.02, 0.1),
                ),
                stat(
                    "Arrival to standstill, p99",
                    "From the first segment of a request until every engine thread stands still.",
                    "s",
                    "histogram_quantile(0.99, sum by (le) "
                    "(rate(rose_guard_arrival_to_stop_seconds_bucket{$here}[$rate])))",
                    steps=high_is_bad(0.05, 0.15),
                ),
                stat(
                    "Replicas unknown",
                    "Replicas whose state is unknown; their gates are closed.",
                    "short",
                    "count(rose_guard_signal_known{$here} == 0) or vector(0)",
                    steps=high_is_bad(1),
                ),
                stat(
                    "Replicas unverified",
                    "Replicas on which tap and engine do not count the same requests.",
                    "short",
                    "count(rose_guard_signal_verified{$here} == 0) or vector(0)",
                    steps=high_is_bad(1),
                ),
            ),
        ),
        Row(
            "Live traffic",
            (
                Panel(
                    "Time to first token",
                    "As the tap saw it, in windows with lending and in windows without.",
                    "s",
                    quantiles("rose_guard_serving_ttft_seconds", "window", 0.5, 0.9, 0.99),
                ),
                Panel(
                    "Time per output token",
                    "As the tap saw it, in windows with lending and in windows without.",
                    "s",
                    quantiles("rose_guard_serving_tpot_seconds", "window", 0.5, 0.9, 0.99),
                ),
                Panel(
                    "Requests by pool",
                    "Finished live requests, and those that missed the objective.",
                    "reqps",
                    {
                        "sum by (pool, met) "
                        "(rate(rose_guard_serving_requests_total{$here}[$rate]))": (
                            "{{pool}} met {{met}}"
                        )
                    },
                ),
                Panel(
                    "Missed by the tap",
                    "Requests that the engine counted and the tap did not; a path the tap cannot "
                    "see keeps the gate closed.",
                    "reqps",
                    rates("rose_guard_missed_requests_total", "pod"),
                ),
            ),
        ),
        Row(
            "Promises",
            (
                Panel(
                    "TTFT of the next request, as certified",
                    "What the next request on an empty replica needs alone, and what lending may "
                    "add; the sum has to fit into the pool's TTFT.",
                    "s",
                    {
                        "max by (pool, part) (rose_guard_certificate_seconds{$here})": (
                            "{{pool}} {{part}}"
                        )
                    },
                ),
                Panel(
                    "Certificates that hold",
                    "1 while it fits; at 0 gates on empty replicas stay shut.",
                    "short",
                    {"min by (pool) (rose_guard_certificate_holds{$here})": "{{pool}}"},
                ),
                Panel(
                    "Promised requests",
                    "Requests that met an open gate under a certificate, and those beyond it.",
                    "reqps",
                    {
                        "sum by (pool, exceeded) "
                        "(rate(rose_guard_certified_requests_total{$here}[$rate]))": (
                            "{{pool}} exceeded {{exceeded}}"
                        )
                    },
                ),
                Panel(
                    "Made slow by lending, at most",
                    "Most of the lent busy periods in which lending has made a request miss the "
                    "SLO, 95 % at every look; beside it the busy periods it speaks of.",
                    "short",
                    {
                        "sum by (pool) (rose_guard_added_misses_most{$here})": "{{pool}} at most",
                        "sum by (pool) (rose_guard_trial_busy_periods{$here})": "{{pool}} of",
                    },
                ),
            ),
        ),
        Row(
            "The gate",
            (
                Panel(
                    "Changes by reason",
                    "How often gates changed, by the reason of the new position.",
                    "ops",
                    rates("rose_guard_gate_changes_total", "reason"),
                ),
                Panel(
                    "Arrival to closed gate, to standstill",
                    "How long a live request shares the GPU at its start.",
                    "s",
                    quantiles("rose_guard_arrival_to_close_seconds")
                    | {
                        query: f"standstill {legend}"
                        for query, legend in quantiles("rose_guard_arrival_to_stop_seconds").items()
                    },
                ),
                Panel(
                    "Rungs of the ladder",
                    "How far reclaims had to go; anything past a hold costs rollouts their cache.",
                    "ops",
                    rates("rose_guard_rungs_total", "rung"),
                ),
                Panel(
                    "Orders",
                    "Orders that guards carried out.",
                    "ops",
                    rates("rose_guard_orders_total", "order"),
                ),
            ),
        ),
        Row(
            "Enforcement",
            (
                Panel(
                    "Engine host: time to stop",
                    "From the decision to stop an engine until every process of it stood still.",
                    "s",
                    quantiles("rose_host_stop_seconds"),
                ),
                Panel(
                    "Engine host: lapses, kills, errors",
                    "A permit that lapsed means that its guard was late or gone.",
                    "ops",
                    {
                        "sum(rate(rose_host_permit_lapses_total{$here}[$rate]))": "lapses",
                        "sum by (reason) (rate(rose_host_killed_engines_total{$here}[$rate]))": (
                            "killed {{reason}}"
                        ),
                        "sum(rate(rose_host_group_errors_total{$here}[$rate]))": "group errors",
                    },
                ),
                Panel(
                    "Tap: packets",
                    "Segments that the filter passed and segments that were lost; after a loss the "
                    "state is unknown for two seconds.",
                    "pps",
                    {
                        "sum(rate(rose_tap_segments_total{$here}[$rate]))": "passed",
                        "sum(rate(rose_tap_dropped_segments_total{$here}[$rate]))": "lost",
                        "sum(rate(rose_tap_requests_total{$here}[$rate]))": "requests",
                    },
                ),
                Panel(
                    "Tap and guard: delay",
                    "From the kernel's stamp of a request to its event, and the length of a round "
                    "of the guard, which must stay below the permit's 140 ms.",
                    "s",
                    {
                        query: f"tap {legend}"
                        for query, legend in quantiles("rose_tap_lag_seconds").items()
                    }
                    | {
                        query: f"guard {legend}"
                        for query, legend in quantiles("rose_guard_tick_seconds").items()
                    },
                ),
            ),
        ),
    ),
)
