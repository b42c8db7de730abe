"""A job's own engines, whose width may change between two rounds (``widths``).

A round that is over leaves no turn on them. Where the next kind of round wants another width they
end, and engines of the new width are there after an engine's start, which the trainer's step hides
as far as it is long enough. Turns that come earlier wait in the router's queue.
"""

from __future__ import annotations

from collections.abc import Callable

from rose_core.rollouts.training.rounds import RoundKind
from rose_simulate.model.clock import VirtualClock
from rose_simulate.model.cluster.nodes import Dedicated
from rose_simulate.model.gpus.batch import BatchEngine
from rose_simulate.model.gpus.kept import JobKeys
from rose_simulate.model.jobs.widths import RoundSeen, Width, decide
from rose_simulate.model.routing.router import Router
from rose_simulate.model.scenarios.costs import costs_of, kv_tokens
from rose_simulate.model.scenarios.scenario import RolloutJob, Scenario

_MEMORY = 0.9
USUAL_CONTEXT = 12_000


class OwnEngines:
    """The dedicated engines of one job.

    Args:
        newest: the version that its trainer has.
        keys: where keys of the job's other engines are, and who has made which.
    """

    def __init__(
        self,
        clock: VirtualClock,
        scenario: Scenario,
        job: RolloutJob,
        router: Router,
        newest: Callable[[], int],
        *,
        keys: JobKeys,
    ) -> None:
        self._keys, self._gpus_of_node = keys, scenario.nodes.gpus
        self._clock, self._job, self._router, self._newest = clock, job, router, newest
        self._start_s = scenario.delays.start_s
        self._widths = {
            gpus: _width(scenario, job, gpus) for gpus in (*job.widths, job.gpus_per_engine)
        }
        self._seen: dict[RoundKind, RoundSeen] = {}
        self.width = job.gpus_per_engine
        self.switches = 0
        self.engines = self._made()

    def _made(self) -> list[Dedicated]:
        width = self._widths[self.width]
        found = []
        for number in range(width.engines):
            node = f"{self._job.name}-{number * width.gpus // self._gpus_of_node}"
            batch = BatchEngine(
                *(self._clock, width.times, width.kv_tokens, _nothing),
                kept=self._keys.at(node),
                history=self._keys.history_of(node),
            )
            name = f"{self._job.name}-dedicated-{number}"
            found.append(Dedicated(name, batch, width.most, self._router, self._newest))
        return found

    def on_round_over(self, kind: RoundKind, seen: RoundSeen, coming: RoundKind) -> None:
        """A round is over, and no turn is on an engine: the next one may have another width."""
        self._seen[kind] = seen
        if not self._job.widths:
            return
        width = decide(self._seen.get(coming), list(self._widths.values()), self.width)
        if width == self.width:
            return
        self.width = width
        self.switches += 1
        for engine in self.engines:
            engine.fail()
        self.engines = self._made()
        self._clock.after(self._start_s, self._attach)

    def _attach(self) -> None:
        for engine in self.engines:
            engine.attach(self._clock.now_ns)


def _width(scenario: Scenario, job: RolloutJob, gpus: int) -> Width:
    """Engines of so many GPUs."""
    derate, pays = scenario.derate, scenario.prefill_attention
    pool = kv_tokens(job.device, job.model, _MEMORY, gpus)
    share = job.dedicated_cap * gpus // job.gpus_per_engine
    return Width(
        gpus,
        job.dedicated * job.gpus_per_engine // gpus,
        pool,
        max(1, min(share, pool // USUAL_CONTEXT)),
        costs_of(job, job.device, gpus, derate, attention=pays),
    )


def _nothing() -> None:
    """A dedicated engine shares its GPUs with nobody."""
