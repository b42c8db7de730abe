"""Weights: how far engines lag behind the trainer, and what bringing them up costs."""

from __future__ import annotations

from rose_dev.dashboards.model import Dashboard, Panel, Row, high_is_bad, quantiles, rates, stat

DASHBOARD = Dashboard(
    name="weights",
    title="ROSE / Weights",
    description="Versions from the trainer's publish to the engines' attested commit.",
    jobs=("rose_weightsync_followed_engines", "rose_weights_head_sequence", "rose_router_engines"),
    rows=(
        Row(
            "In short",
            (
                stat(
                    "Largest lag",
                    "Publishes by which the engine that is furthest behind lags.",
                    "short",
                    "max(rose_router_engine_lag_versions{$here})",
                    steps=high_is_bad(3),
                ),
                stat(
                    "Commits per minute",
                    "Versions committed into engines and attested.",
                    "short",
                    "60 * sum(rate(rose_weightsync_commits_total{$here}[$rate]))",
                ),
                stat(
                    "Commit pause, p99",
                    "Time an engine did not compute because of a commit.",
                    "s",
                    "histogram_quantile(0.99, sum by (le) "
                    "(rate(rose_weightsync_commit_pause_seconds_bucket{$here}[$rate])))",
                ),
                stat(
                    "Fetched",
                    "Blocks that nodes pull.",
                    "Bps",
                    "sum(rate(rose_weightsync_fetched_bytes_total{$here}[$rate]))",
                ),
                stat(
                    "Engines followed",
                    "Engines whose weights are kept at the head of their run.",
                    "short",
                    "sum(rose_weightsync_followed_engines{$here})",
                ),
                stat(
                    "Quarantines",
                    "Engines whose live weights were found to be wrong, in this time range.",
                    "short",
                    "sum(increase(rose_weightsync_quarantines_total{$here}[$__range]))",
                    steps=high_is_bad(1, 2),
                ),
            ),
        ),
        Row(
            "Freshness",
            (
                Panel(
                    "Lag of engines",
                    "Publishes behind the newest version that the router knows.",
                    "short",
                    {"max by (engine) (rose_router_engine_lag_versions{$here})": "{{engine}}"},
                ),
                Panel(
                    "Head of runs",
                    "Sequence of each run's head in the store; a drop is a new incarnation.",
                    "short",
                    {"max by (run) (rose_weights_head_sequence{$here})": "{{run}}"},
                ),
            ),
        ),
        Row(
            "On the nodes",
            (
                Panel(
                    "Commits and failures",
                    "Failures by reason; an engine that cannot follow is left out once it is too "
                    "stale.",
                    "ops",
                    {
                        "sum(rate(rose_weightsync_commits_total{$here}[$rate]))": "commits",
                        "sum by (reason) (rate(rose_weightsync_failures_total{$here}[$rate]))": (
                            "{{reason}}"
                        ),
                    },
                ),
                Panel(
                    "Pull, stage, pause",
                    "Fetching a version, decoding it beside the live weights, committing it.",
                    "s",
                    {
                        query: f"{name} {legend}"
                        for name, histogram in (
                            ("pull", "rose_weightsync_pull_seconds"),
                            ("stage", "rose_weightsync_stage_seconds"),
                            ("pause", "rose_weightsync_commit_pause_seconds"),
                        )
                        for query, legend in quantiles(histogram).items()
                    },
                ),
            ),
        ),
        Row(
            "Store and relay",
            (
                Panel(
                    "Bytes",
                    "Blocks received from publishers and sent to receivers.",
                    "Bps",
                    {
                        "sum by (job) (rate(rose_weights_received_bytes_total{$here}[$rate]))": (
                            "{{job}} received"
                        ),
                        "sum by (job) (rate(rose_weights_sent_bytes_total{$here}[$rate]))": (
                            "{{job}} sent"
                        ),
                    },
                ),
                Panel(
                    "Plans",
                    "What receivers were given: nothing to do, one version, several merged, or a "
                    "full state.",
                    "ops",
                    rates("rose_weights_plans_total", "kind"),
                ),
                Panel(
                    "Time to plan",
                    "Time to answer a plan, merging included.",
                    "s",
                    quantiles("rose_weights_plan_seconds"),
                ),
                Panel(
                    "Refusals and failed commits",
                    "Calls refused, and publishes that did not become a version.",
                    "ops",
                    rates("rose_weights_refusals_total", "error")
                    | {
                        'sum by (outcome) (rate(rose_weights_commits_total{outcome!="Published", '
                        "$here}[$rate]))": "publish {{outcome}}"
                    },
                ),
            ),
        ),
        Row(
            "Trainer",
            (
                Panel(
                    "Stall of the trainer",
                    "Time the trainer stood still in publish().",
                    "s",
                    quantiles("rose_publisher_stall_seconds"),
                ),
                Panel(
                    "In the background",
                    "Comparing and encoding a version, and sending it until it is durable.",
                    "s",
                    {
                        query: f"{name} {legend}"
                        for name, histogram in (
                            ("encode", "rose_publisher_encode_seconds"),
                            ("send", "rose_publisher_send_seconds"),
                        )
                        for query, legend in quantiles(histogram).items()
                    },
                ),
                Panel(
                    "Elements changed",
                    "Share of elements that a version changed; it decides what a version costs.",
                    "percentunit",
                    {"max by (run) (rose_weights_changed_ratio{$here})": "{{run}}"},
                ),
                Panel(
                    "Versions waiting",
                    "Taken from the trainer but not yet durable; growing means that the store or "
                    "the network is too slow.",
                    "short",
                    {"sum(rose_publisher_waiting_versions{$here})": "waiting"},
                ),
            ),
        ),
    ),
)
