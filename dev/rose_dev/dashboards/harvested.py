"""Harvested capacity: what idle GPUs gave to rollouts, to whom, and why not more."""

from __future__ import annotations

from rose_dev.dashboards.model import Dashboard, Panel, Row, quantiles, rates, stat

_SAMPLED = (
    "(sum by (lease) (rose_lease_harvested_tokens{$here}) + "
    "sum by (lease) (rose_lease_dedicated_tokens{$here}))"
)
DASHBOARD = Dashboard(
    name="harvested",
    title="ROSE / Harvested capacity",
    description="What idle serving GPUs gave to rollouts, by pool and lease, and why not more.",
    jobs=("rose_lease_slots", "rose_host_engines", "rose_guard_tick_seconds_count"),
    rows=(
        Row(
            "In short",
            (
                stat(
                    "Slots held",
                    "Borrowed shares of serving replicas that leases hold now.",
                    "short",
                    'sum(rose_lease_slots{what="granted", $here})',
                ),
                stat(
                    "Slots at work",
                    "Slots whose engine runs attested weights.",
                    "short",
                    'sum(rose_lease_slots{what="ready", $here})',
                ),
                stat(
                    "Tokens per second",
                    "Output tokens that borrowed engines make.",
                    "short",
                    "sum(rate(rose_host_generated_tokens_total{$here}[$rate]))",
                ),
                stat(
                    "Tokens harvested",
                    "By borrowed engines for the leases there are, since each was applied.",
                    "short",
                    "sum(rose_lease_harvested_tokens{$here})",
                ),
                stat(
                    "GPU time lent",
                    "Time under a grant of the leases there are.",
                    "s",
                    "sum(rose_lease_lent_seconds{$here})",
                ),
                stat(
                    "Share used",
                    "Of the time lent, how much the gate was open; the rest belonged to serving.",
                    "percentunit",
                    "sum(rate(rose_guard_open_seconds_total{$here}[$rate])) "
                    "/ sum(rate(rose_guard_lent_seconds_total{$here}[$rate]))",
                ),
            ),
        ),
        Row(
            "Leases",
            (
                Panel(
                    "Slots of leases",
                    "Wanted, granted and ready; wanted above granted for long means that pools "
                    "have nothing left to lend.",
                    "short",
                    {
                        "sum by (lease, what) (rose_lease_slots{$here})": "{{lease}} {{what}}",
                    },
                ),
                Panel(
                    "Tokens harvested",
                    "Output tokens of borrowed engines since the lease was applied.",
                    "short",
                    {"sum by (lease) (rose_lease_harvested_tokens{$here})": "{{lease}}"},
                ),
                Panel(
                    "GPU time lent",
                    "Time under a grant since the lease was applied; charged is the part of it in "
                    "which rollouts could compute (rose report). Kept back: that time by the share "
                    "of the memory that serving did without for it; 0 where memory is elastic. Not "
                    "lent: the same of a pool's GPUs that nobody borrowed, which no lease is "
                    "charged.",
                    "s",
                    {
                        "sum by (lease) (rose_lease_lent_seconds{$here})": "{{lease}}",
                        "sum by (lease) (rose_lease_reserved_seconds{$here})": (
                            "{{lease}} memory kept back"
                        ),
                        "sum by (pool) (rose_pool_unlent_reserved_seconds{$here})": (
                            "{{pool}} memory kept back, not lent"
                        ),
                    },
                ),
                Panel(
                    "What late requests earn",
                    "Live requests that were late beside rollouts, at most what lending added, by "
                    "what a request of their pool earns on average (spec.revenue). Empty where no "
                    "pool says it; rose report then prices them by what the GPUs cost.",
                    "short",
                    {"sum by (lease) (rose_lease_late_revenue{$here})": "{{lease}}"},
                ),
                Panel(
                    "Trajectories",
                    "Trained on, and correct answers among them, as the lease's trainer reported.",
                    "short",
                    {
                        "sum by (lease) (rose_lease_accepted_trajectories{$here})": "{{lease}}",
                        "sum by (lease) (rose_lease_correct_answers{$here})": "{{lease}} correct",
                    },
                ),
                Panel(
                    "Correct answers for a lent GPU-hour",
                    "What trainers reported as correct, for an hour under a grant. The pool's "
                    "price divided by it is what a correct answer cost.",
                    "short",
                    {
                        "3600 * sum by (lease) (rose_lease_correct_answers{$here}) / "
                        "sum by (lease) (rose_lease_lent_seconds{$here} > 0)": "{{lease}}",
                    },
                ),
                Panel(
                    "GPUs lent, and used",
                    "GPUs under a grant, and how many of them compute for rollouts at a time.",
                    "short",
                    {
                        "sum(rate(rose_guard_lent_seconds_total{$here}[$rate]))": "lent",
                        "sum(rate(rose_guard_open_seconds_total{$here}[$rate]))": "used",
                    },
                ),
                Panel(
                    "What a correct answer takes",
                    "Tokens sampled for each that was trained on, trajectories trained on for each "
                    "correct answer, and thousands of tokens sampled for each of these. The price "
                    "of a token times the last is what a correct answer cost.",
                    "short",
                    {
                        _SAMPLED + " / sum by (lease) (rose_lease_trained_tokens{$here} > 0)": (
                            "{{lease}} sampled"
                        ),
                        "sum by (lease) (rose_lease_accepted_trajectories{$here}) / "
                        "sum by (lease) (rose_lease_correct_answers{$here} > 0)": "{{lease}} tried",
                        _SAMPLED + " / 1000 / "
                        "sum by (lease) (rose_lease_correct_answers{$here} > 0)": (
                            "{{lease}} thousand tokens"
                        ),
                    },
                ),
            ),
        ),
        Row(
            "Turns",
            (
                Panel(
                    "GPUs that no lease wants",
                    "Could be lent now, but every lease has what its turns can use.",
                    "short",
                    {"sum by (pool) (rose_pool_unwanted_gpus{$here})": "{{pool}}"},
                    stacked=True,
                ),
                Panel(
                    "GPU time that no lease wanted",
                    "GPU-seconds in each second.",
                    "short",
                    {
                        "sum by (pool) (rate(rose_pool_unwanted_gpu_seconds_total"
                        "{$here}[$rate]))": "{{pool}}"
                    },
                ),
                Panel(
                    "Tokens to trainers",
                    "Output tokens that routers hold and return, by the kind of engine.",
                    "short",
                    rates("rose_router_tokens_total", "kind"),
                    stacked=True,
                ),
                Panel(
                    "Turns ended",
                    "By kind of engine and finish; an abort is typed and never looks like an "
                    "empty answer.",
                    "reqps",
                    {
                        "sum by (kind, finish) (rate(rose_router_turns_total{$here}[$rate]))": (
                            "{{kind}} {{finish}}"
                        )
                    },
                ),
                Panel(
                    "Turns in flight and waiting",
                    "Waiting turns need an open gate of a fresh enough version.",
                    "short",
                    {
                        "sum by (kind) (rose_router_live_turns{$here})": "{{kind}}",
                        "sum(rose_router_queued_turns{$here})": "waiting",
                    },
                ),
                Panel(
                    "Moves",
                    "Turns that left an engine before their end and went on elsewhere.",
                    "ops",
                    rates("rose_router_moves_total", "reason"),
                ),
                Panel(
                    "Wait for an engine",
                    "Time a turn waited, each time it needed an engine.",
                    "s",
                    quantiles("rose_router_queue_seconds"),
                ),
                Panel(
                    "Work done twice",
                    "Tokens of context prefilled again after moves, tokens sampled again, and "
                    "sampled tokens that agents' altered histories no longer hold.",
                    "short",
                    {
                        "sum(rate(rose_router_reprefilled_tokens_total{$here}[$rate]))": (
                            "prefilled again"
                        ),
                        "sum(rate(rose_router_redone_tokens_total{$here}[$rate]))": "sampled again",
                        "sum(rate(rose_router_history_lost_tokens_total{$here}[$rate]))": (
                            "lost from histories"
                        ),
                    },
                ),
            ),
        ),
        Row(
            "By device class",
            (
                Panel(
                    "Tokens by device class",
                    "Prompt tokens computed (read) and output tokens made (written): where kinds "
                    "of GPU differ, turns that read much and turns that write much part.",
                    "short",
                    {
                        "sum by (device, what) (rate(rose_router_class_tokens_total"
                        "{$here}[$rate]))": "{{device}} {{what}}"
                    },
                ),
                Panel(
                    "Turns by device class",
                    "Begun on engines of each kind; one that moves counts at each.",
                    "reqps",
                    rates("rose_router_class_turns_total", "device"),
                    stacked=True,
                ),
                Panel(
                    "Time per output token",
                    "As routers measured it lately.",
                    "s",
                    {
                        "avg by (device) (rose_router_class_step_seconds{$here})": "{{device}}",
                    },
                ),
                Panel(
                    "Time per prompt token",
                    "Of those that no cache had, as routers measured it lately.",
                    "s",
                    {
                        "avg by (device) (rose_router_class_prefill_seconds{$here})": "{{device}}",
                    },
                ),
            ),
        ),
        Row(
            "Why not more",
            (
                Panel(
                    "Replicas by verdict",
                    "Replicas by the planner's verdict; the words are in the API reference.",
                    "short",
                    {"sum by (reason) (rose_pool_replicas{$here})": "{{reason}}"},
                    stacked=True,
                ),
                Panel(
                    "Decisions",
                    "Slots lent and released, with the reason.",
                    "ops",
                    {
                        "sum by (decision, reason) "
                        "(rate(rose_planner_decisions_total{$here}[$rate]))": (
                            "{{decision}} {{reason}}"
                        )
                    },
                ),
                Panel(
                    "Leases refused",
                    "Leases that are not accepted, by reason; their conditions say what to change.",
                    "short",
                    {"sum by (reason) (rose_lease_refused{$here})": "{{reason}}"},
                ),
                Panel(
                    "Requests refused by routers",
                    "Answered with an error, by closed reason.",
                    "reqps",
                    rates("rose_router_refused_total", "reason"),
                ),
            ),
        ),
    ),
)
