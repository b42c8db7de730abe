"""The rules of the ROSE paper (arXiv 2605.06534 v2), as a baseline.

The paper itself was not at hand: its abstract and secondary notes on it were. Each figure bears the
mark of where it comes from. None was tuned, and nothing of ours is in here.

| mark | means |
|---|---|
| [notes] | several notes agree |
| [one note] | a single secondary note says so |
| [inferred] | no source has it; it is our reading |

The order of placement is [one note] for borrowed engines first (``rose-paper``) and [two other
notes] for dedicated ones first (``rose-paper-dedicated``): a comparison shows both. The order of
the queue is [inferred]. Where the notes are silent the choice that favours the paper was made: its
offline profiles predict exactly what the engine costs alone, and its executor sees a request
without delay. **One thing does not favour it**: its elastic KV pages are not modelled, so its
rollouts have the fixed share of the memory that every regime has.
"""

from __future__ import annotations

from collections.abc import Callable

from rose_simulate.model.clock import Event, VirtualClock
from rose_simulate.model.gpus.device import SharedGpus
from rose_simulate.model.gpus.gates import ReplicaGate, ServingRequest, SimulatedHost
from rose_simulate.model.scenarios.costs import ModelCosts, pairs

# [notes] section 4.1: dual-SLO admission at each scheduler tick. [inferred]: how long a tick is.
TICK_S = 0.010
# [one note] section 4.1: the non-preemptible quantum of a rollout prefill, tokens.
QUANTUM = 512
# [notes] section 4.1: a watermark inside the headroom of 20 %. [inferred]: its value.
HIGH_WATERMARK = 0.8
# [notes] section 4.1: emergency cut divides the rollout budget by 2 in one go until the next step.
CUT = 2
# [one note] section 4.3: most trajectories per GPU (Qwen3, 32k context).
CAP = 16
# [one note] section 4.1: the rollout model lies dormant there and is activated within this.
ACTIVATION_S = 5.0
# [one note] section 4.3: an engine without a token for so long is left, and its turn begins anew.
STALL_S = 2.0


class PaperGate(ReplicaGate):
    """Rollouts run only while every serving request has prefill and decode slack (section 4.1)."""

    def __init__(
        self,
        clock: VirtualClock,
        device: SharedGpus,
        host: SimulatedHost,
        changed: Callable[[bool], None],
        *,
        profile: ModelCosts,
        ttft_s: float,
        tpot_s: float,
    ) -> None:
        super().__init__(clock, device, host, changed)
        self._profile, self._ttft_s, self._tpot_s = profile, ttft_s, tpot_s
        self._live: dict[int, ServingRequest] = {}
        self._wake: Event | None = None
        self.cap = CAP

    def on_arrival(self, request: ServingRequest) -> None:
        """The executor has it at once."""
        self._live[request.number] = request
        self._tick()

    def on_end(self, request: ServingRequest) -> None:
        """It no longer counts."""
        self._live.pop(request.number, None)
        self._tick()

    def on_node_death(self) -> None:
        """No request is left."""
        self._live.clear()
        self.cap = CAP
        super().on_node_death()

    def on_engine_ready(self) -> None:
        """A co-serving model is active."""
        self._tick()

    def on_step(self) -> None:
        """The RL step is over: the cut budget may grow again (section 4.1)."""
        self.cap = CAP

    def slack(self) -> bool:
        """Whether both slacks are positive for every request."""
        now = self.clock.now_ns
        decode = self._profile.step(
            max(1, len(self._live)), sum(map(_context, self._live.values()))
        )[0]
        for request in self._live.values():
            if not request.first_ns:
                left = self._ttft_s - (now - request.arrived_ns) / 1e9
                if left <= self._profile.prefill(request.prompt, pairs(request.prompt)):
                    return False
            elif self._tpot_s <= self._since_token(request, now) + decode:
                return False
        return True

    @staticmethod
    def _since_token(request: ServingRequest, now: int) -> float:
        sequence = request.sequence
        if sequence is None or sequence.produced < 1:
            return 0.0
        mean = (now - request.first_ns) / 1e9 / sequence.produced
        return max(0.0, (now - request.first_ns) / 1e9 - mean * (sequence.produced - 1))

    def _tick(self) -> None:
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        if self.device.rollout is None or not self.granted:
            return
        serving = self.device.serving
        if serving is not None:
            serving.settle()
            if serving.kv_share > HIGH_WATERMARK and self.cap == CAP:
                self.cap = CAP // CUT
                self._changed(self.is_open)
        slack = self.slack()
        if slack:
            self.device.allow()
        else:
            self.device.forbid()
        self.set_open(slack)
        if self._live:
            self._wake = self.clock.after(TICK_S, self._tick)


def _context(request: ServingRequest) -> int:
    produced = request.sequence.produced if request.sequence is not None else 0
    return request.prompt + produced
