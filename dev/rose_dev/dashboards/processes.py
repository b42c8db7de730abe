"""Operator and agents: whether ROSE's own processes are well, and what they cost the API server."""

from __future__ import annotations

from rose_dev.dashboards.model import (
    Dashboard,
    Panel,
    Row,
    high_is_bad,
    just,
    quantiles,
    rates,
    stat,
)

DASHBOARD = Dashboard(
    name="processes",
    title="ROSE / Operator and agents",
    description="Leader, plans, API requests, and the agents' links.",
    jobs=("rose_operator_term", "rose_guard_tick_seconds_count", "rose_host_engines"),
    rows=(
        Row(
            "In short",
            (
                stat(
                    "Leaders",
                    "Replicas that lead; anything but one for longer than a minute is wrong.",
                    "short",
                    'sum(rose_operator_leader_state{state="Leader", $here})',
                    steps=just(1),
                ),
                stat(
                    "Since the last pass",
                    "Age of the last reconcile pass.",
                    "s",
                    "time() - max(rose_operator_last_pass_timestamp_seconds{$here})",
                    steps=high_is_bad(30, 120),
                ),
                stat(
                    "Writes",
                    "Requests that write to the API server; zero at rest.",
                    "reqps",
                    "sum(rate(rose_operator_api_writes_total{$here}[$rate]))",
                    steps=high_is_bad(10),
                ),
                stat(
                    "Nodes with grants",
                    "Nodes whose last answer carried a grant.",
                    "short",
                    "count(max by (node) (rose_operator_grants{$here}) > 0) or vector(0)",
                ),
                stat(
                    "Engines",
                    "Engines of all engine hosts, whatever their state.",
                    "short",
                    "sum(rose_host_engines{$here})",
                ),
                stat(
                    "Agents",
                    "Guards that are scraped.",
                    "short",
                    "count(rose_guard_tick_seconds_count{$here})",
                ),
            ),
        ),
        Row(
            "Operator",
            (
                Panel(
                    "Leader lock",
                    "State of each replica's lock.",
                    "short",
                    {"sum by (state) (rose_operator_leader_state{$here})": "{{state}}"},
                ),
                Panel(
                    "Leader term",
                    "Grows with every change of leader.",
                    "short",
                    {"max(rose_operator_term{$here})": "term"},
                ),
                Panel(
                    "Reconcile pass",
                    "Duration of a pass, its writes included.",
                    "s",
                    quantiles("rose_operator_plan_seconds"),
                ),
                Panel(
                    "Writes to the API server",
                    "By kind and verb; a correct world is not written to.",
                    "reqps",
                    {
                        "sum by (kind, verb) "
                        "(rate(rose_operator_api_writes_total{$here}[$rate]))": "{{verb}} {{kind}}"
                    },
                ),
                Panel(
                    "Failed requests",
                    "Requests to the API server that failed, by why.",
                    "reqps",
                    rates("rose_operator_api_failures_total", "why"),
                ),
                Panel(
                    "Sync calls",
                    "Calls of agents by answer; incomplete ones come from followers and from a "
                    "leader that is not warm.",
                    "reqps",
                    rates("rose_operator_syncs_total", "answer"),
                ),
            ),
        ),
        Row(
            "Agents",
            (
                Panel(
                    "Sync as agents see it",
                    "Calls to the operator by outcome.",
                    "reqps",
                    rates("rose_guard_syncs_total", "outcome"),
                ),
                Panel(
                    "Certificates of nodes",
                    "Certificates that guards asked of the operator, by outcome.",
                    "ops",
                    rates("rose_guard_enrolments_total", "outcome"),
                ),
                Panel(
                    "Highest term obeyed",
                    "Nodes that obey another term than the leader's get no grants from it.",
                    "short",
                    {
                        "min(rose_guard_highest_term{$here})": "lowest",
                        "max(rose_guard_highest_term{$here})": "highest",
                    },
                    width=8,
                ),
                Panel(
                    "Links to routers",
                    "Streams to routers that ended or failed.",
                    "ops",
                    rates("rose_guard_attaches_total", "outcome"),
                    width=8,
                ),
                Panel(
                    "Watches of pods that failed",
                    "Lists and watches of the node's own pods.",
                    "ops",
                    rates("rose_guard_kubernetes_errors_total"),
                    width=8,
                ),
            ),
        ),
        Row(
            "Engine hosts",
            (
                Panel(
                    "Engines by state",
                    "States of the engines on borrowed GPUs.",
                    "short",
                    {"sum by (state) (rose_host_engines{$here})": "{{state}}"},
                    stacked=True,
                ),
                Panel(
                    "Start of an engine",
                    "From the start of its process until it answered that it is ready.",
                    "s",
                    quantiles("rose_host_engine_start_seconds"),
                ),
                Panel(
                    "Restarts",
                    "Engines started again after they ended by themselves.",
                    "ops",
                    rates("rose_host_engine_restarts_total"),
                ),
                Panel(
                    "Data routes",
                    "Requests of routers to engines, by outcome.",
                    "reqps",
                    rates("rose_host_proxy_requests_total", "outcome"),
                ),
            ),
        ),
        Row(
            "Keys",
            (
                Panel(
                    "Pool of keys: engines",
                    "Engines that are told of the platform's pool, and those that can ask it now.",
                    "short",
                    {
                        "sum(rose_host_kv_pool_engines{$here})": "told",
                        "sum(rose_host_kv_pool_joined_engines{$here})": "joined",
                    },
                ),
                Panel(
                    "Pool of keys: failures",
                    "Times that an engine left the pool alone, and answers that came too late.",
                    "ops",
                    rates("rose_host_kv_pool_failures_total")
                    | rates("rose_host_kv_pool_late_orders_total"),
                ),
                Panel(
                    "Pool of keys: bytes",
                    "What engines pull from it and write to it, and what they had to drop.",
                    "Bps",
                    rates("rose_host_kv_pool_bytes_total", "what"),
                ),
                Panel(
                    "Pool of keys: speed of a pull",
                    "What a pull brings in a second of its own.",
                    "Bps",
                    {
                        'sum(rate(rose_host_kv_pool_bytes_total{what="pulled", $here}[$rate])) '
                        "/ sum(rate(rose_host_kv_pool_pull_seconds_total{$here}[$rate]))": "pulled",
                    },
                ),
            ),
        ),
    ),
)
