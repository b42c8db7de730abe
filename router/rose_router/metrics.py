"""What the router counts; ``docs/metrics.md`` lists it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

REGISTRY = CollectorRegistry()

_SECONDS = (0.001, 0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Seconds(Collector):
    """A histogram of durations without labels, for one thread.

    Every turn is told to three; prometheus_client's takes six calls and two locks to hear of it.
    """

    def __init__(self, name: str, text: str) -> None:
        self._name, self._text = name, text
        self._counts, self._sum = [0] * (len(_SECONDS) + 1), 0.0
        REGISTRY.register(self)

    def observe(self, seconds: float) -> None:
        """Count a duration."""
        self._counts[bisect_left(_SECONDS, seconds)] += 1
        self._sum += seconds

    def observe_none(self) -> None:
        """Count what took no time."""
        self._counts[0] += 1

    def collect(self) -> Iterator[Metric]:
        """What a scrape gets."""
        bounds = [*map(str, _SECONDS), "+Inf"]
        counted = [*zip(bounds, accumulate(self._counts), strict=True)]
        yield HistogramMetricFamily(self._name, self._text, counted, self._sum)

    def describe(self) -> Iterator[Metric]:
        """What there is, for the registry and the page of metrics."""
        return self.collect()


class SeriesTally:
    """One series of a counter, for one thread: what was added since the last scrape.

    Args:
        series: takes it at the next.
    """

    __slots__ = ("_added", "_series")

    def __init__(self, series: Counter) -> None:
        self._series, self._added = series, 0.0

    def add(self, amount: float) -> None:
        """Count so many more."""
        self._added += amount

    def settle(self) -> None:
        """Have the series know what was added."""
        added, self._added = self._added, 0.0
        self._series.inc(added)


class TalliedCounter(Counter):
    """A counter whose series every turn adds to.

    prometheus_client's own way takes four calls and a lock.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:  # noqa: ANN401  # a counter's
        self._tallies: list[SeriesTally] = []
        super().__init__(*arguments, **settings)

    def tally(self, *labels: str) -> SeriesTally:
        """The series of these labels; made once by whoever counts."""
        made = SeriesTally(self.labels(*labels))
        self._tallies.append(made)
        return made

    def collect(self) -> Iterable[Metric]:
        """What a scrape gets."""
        for one in self._tallies:
            one.settle()
        return super().collect()


TURNS = TalliedCounter(
    "rose_router_turns",
    "Turns ended; kind is borrowed as soon as one token came from a borrowed engine.",
    ["kind", "finish"],
    registry=REGISTRY,
)
TOKENS = TalliedCounter(
    "rose_router_tokens",
    "Output tokens held and returned, by the kind of engine that made them.",
    ["kind"],
    registry=REGISTRY,
)
UNDELIVERED = Counter(
    "rose_router_undelivered_tokens",
    "Output tokens of turns whose callers had hung up when they ended; part of the above.",
    registry=REGISTRY,
)
CLASS_TOKENS = Counter(
    "rose_router_class_tokens",
    "Tokens by the device class of the engine: read (prompt, not cached) and written (output).",
    ["device", "what"],
    registry=REGISTRY,
)
CLASS_TURNS = Counter(
    "rose_router_class_turns",
    "Legs of turns begun on engines of a device class; a turn that moves counts at each.",
    ["device"],
    registry=REGISTRY,
)
RUN_TOKENS = Counter(
    "rose_router_run_tokens",
    "Output tokens that were kept, by run, where the lease's engines hold adapters of several.",
    ["run"],
    registry=REGISTRY,
)
CLASS_STEP_SECONDS = Gauge(
    "rose_router_class_step_seconds",
    "Time between two tokens of a turn on engines of a device class, as measured lately.",
    ["device"],
    registry=REGISTRY,
)
CLASS_PREFILL_SECONDS = Gauge(
    "rose_router_class_prefill_seconds",
    "Time per prompt token that is not cached, on engines of a device class.",
    ["device"],
    registry=REGISTRY,
)
HISTORY_TURNS = Gauge(
    "rose_router_history_turns",
    "Turns whose tokens are kept under their messages, for exact prompts and training rows.",
    registry=REGISTRY,
)
HISTORY_FORGOTTEN = Gauge(
    "rose_router_history_forgotten_sessions",
    "Sessions of harnesses that were forgotten for room: their next request is rendered anew.",
    registry=REGISTRY,
)
HISTORY_ALTERED = Counter(
    "rose_router_history_altered",
    "Turns that ended whose conversation is not what their session has seen: what stands from "
    "the first other message on was rendered anew.",
    registry=REGISTRY,
)
HISTORY_LOST_TOKENS = Counter(
    "rose_router_history_lost_tokens",
    "Sampled tokens of such sessions' last turns that are not in the new prompt as they were "
    "sampled.",
    registry=REGISTRY,
)
MOVES = Counter(
    "rose_router_moves",
    "Turns that left an engine before their end, by reason.",
    ["reason"],
    registry=REGISTRY,
)
REDONE = Counter(
    "rose_router_redone_tokens",
    "Output tokens received and dropped because their version was unknown; sampled again.",
    registry=REGISTRY,
)
REPREFILLED = Counter(
    "rose_router_reprefilled_tokens",
    "Tokens of context that a move made another engine prefill.",
    registry=REGISTRY,
)
PROMPT_TOKENS = TalliedCounter(
    "rose_router_prompt_tokens",
    "Tokens that engines had before them when they began a leg: computed, cached (in their own "
    "cache), or fetched (another engine has kept them, kvStoreGiB).",
    ["source"],
    registry=REGISTRY,
)
SUSPECTS = Counter(
    "rose_router_suspect_turns",
    "Turns that may have ended an engine's process: run alone the next time, or refused.",
    ["outcome"],
    registry=REGISTRY,
)
WARMED = Counter(
    "rose_router_warmed",
    "Prefixes sent to their trajectory's next home while its tool ran, by what came of it.",
    ["outcome"],
    registry=REGISTRY,
)
WARMED_TOKENS = Counter(
    "rose_router_warmed_tokens", "Tokens of the prefixes that were warmed.", registry=REGISTRY
)
REFUSED = Counter(
    "rose_router_refused",
    "Requests answered with an error, by closed reason.",
    ["reason"],
    registry=REGISTRY,
)
MEMORY_TAKEN = Gauge(
    "rose_router_request_bytes",
    "Memory that is counted for the requests under way.",
    registry=REGISTRY,
)
CONNECTIONS = Gauge(
    "rose_router_connections", "Connections of callers that are open.", registry=REGISTRY
)
SLOW_SENDERS = Gauge(
    "rose_router_slow_senders",
    "Callers whose head or chunks come in crumbs, and who are heard in turns.",
    registry=REGISTRY,
)
UNREAD = Counter(
    "rose_router_unread_answers",
    "Connections ended because their caller did not read its answer.",
    registry=REGISTRY,
)
QUEUE_SECONDS = Seconds(
    "rose_router_queue_seconds", "Time a turn waited for an engine, each time it needed one."
)
TURN_SECONDS = Seconds("rose_router_turn_seconds", "Time from a request to its last token.")
FIRST_TOKEN_SECONDS = Seconds(
    "rose_router_first_token_seconds", "Time from a request to its first placed token."
)
LIVE = Gauge("rose_router_live_turns", "Turns in flight on engines.", ["kind"], registry=REGISTRY)
QUEUED = Gauge(
    "rose_router_queued_turns",
    "Turns waiting for an engine that stand on none; those at closed gates are in flight.",
    registry=REGISTRY,
)
PHASE = Gauge(
    "rose_router_trainer_phase",
    "1 for what the trainer does as far as its turns and publishes tell: Generating, Training, "
    "Silent, Unknown.",
    ["phase"],
    registry=REGISTRY,
)
ENGINES = Gauge(
    "rose_router_engines",
    "Engines attached, by kind and whether the gate is open.",
    ["kind", "gate"],
    registry=REGISTRY,
)
FENCES = Gauge(
    "rose_router_pending_aborts",
    "Aborts of old legs that their engine has not taken yet.",
    registry=REGISTRY,
)
TRAJECTORIES = Gauge("rose_router_trajectories", "Trajectories remembered.", registry=REGISTRY)
CONCLUDED = Counter(
    "rose_router_concluded_trajectories",
    "Trajectories that the trainer reported, by outcome; borrowed as soon as one token was.",
    ["outcome", "kind"],
    registry=REGISTRY,
)
BORROWED_SHARE = Gauge(
    "rose_router_borrowed_share",
    "Share of the last turns of a stratum (length/freshness, or all) that met a borrowed engine.",
    ["stratum"],
    registry=REGISTRY,
)
INCLUSION_GAP = Gauge(
    "rose_router_inclusion_gap",
    "Share trained on of groups that may borrow less that of groups drawn to run on dedicated"
    " engines alone, by stratum; bound is value, low or high (95 percent, what is lost at worst).",
    ["dimension", "stratum", "bound"],
    registry=REGISTRY,
)
REPLICAS = Gauge(
    "rose_router_replicas", "Replicas of this router that it knows of.", registry=REGISTRY
)
HELD = Gauge("rose_router_held", "1 while a trainer's pause holds turns back.", registry=REGISTRY)
BARRIER_SECONDS = Seconds(
    "rose_router_barrier_seconds", "Time from a published checkpoint until the quorum ran it."
)
HEAD = Gauge(
    "rose_router_head_sequence",
    "Sequence of the newest weight version known, inside its incarnation.",
    registry=REGISTRY,
)
LAG = Gauge(
    "rose_router_engine_lag_versions",
    "Publishes an engine is behind the newest version known.",
    ["engine"],
    registry=REGISTRY,
)
DRAFTS = Counter(
    "rose_router_draft_tokens",
    "Of engines that draft: steps that verified drafts, and tokens accepted beyond one a step.",
    ["outcome"],
    registry=REGISTRY,
)
DRAFT_CORPORA = Counter(
    "rose_router_draft_corpora",
    "Corpora (tokens to draft from) for engines: sent, refused (not taken; sent again).",
    ["outcome"],
    registry=REGISTRY,
)
SANDBOX_STEPS = Counter(
    "rose_router_sandbox_steps",
    "Steps of turns for hosts of agents' sandboxes: told, untold (no sandbox, or no host took it), "
    "late (its agent may have acted on the reply), skipped (too many wait).",
    ["step", "outcome"],
    registry=REGISTRY,
)
