"""What finished requests teach: cost, margin, and how fast the error budget burns.

A request is followed from its arrival to its end beside the integral of the gate's open time, so
that at its end it is known for which share of its time it ran beside rollouts:

| a finished request | teaches |
|---|---|
| share of its time beside an open gate | the predictor: cost alone, or beside a rollout engine |
| latency / SLO, and what rollouts account for of it, when it met an open gate | the margin |
| over the SLO or not | the error budget of its pool (``budget``), which opens the breaker |
| TTFT on an empty replica, how soon rollouts stopped for it | the certificate (``certificate``) |
| the same | what co-running costs where only gaps are lent (``StopCost``) |
| longer than an open gate's certificate said, or not | how often that is exceeded |

The guard of a node and the simulator both learn by this. Next step: ``gate`` is judged on it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rose_core.guard.certificate import CertificateCount, Envelope, TtftCertificate
from rose_core.guard.margin import Margin
from rose_core.guard.predictor import Predictor, StopCost
from rose_core.guard.shares import LEAST_SHARE, OpenTime
from rose_core.guard.slack import LatencyObjective
from rose_core.telemetry.book import FinishedRequest


@dataclass(frozen=True, slots=True)
class RequestExposure:
    """What a finished request met.

    Attributes:
        prefill, decode: share of that part of its time beside an open gate.
        used: the worse of TTFT and TPOT as a share of its SLO; 0 = nothing to compare.
        rollouts: share of that latency that rollouts account for.
        exceeded: it took longer than the certificate of the open gate that it met says; None = it
            met none.
    """

    prefill: float
    decode: float
    used: float
    rollouts: float = 0.0
    exceeded: bool | None = None

    @property
    def exposed(self) -> bool:
        """Whether it ran beside rollouts for long enough to have been slowed by them."""
        return max(self.prefill, self.decode) >= LEAST_SHARE

    @property
    def slow(self) -> bool:
        """Whether it missed its SLO."""
        return self.used > 1


@dataclass
class Lessons:
    """What requests have taught.

    Replicas of one pool run the same engine on the same devices, so they may share it, and a new
    one does not begin from the profile.
    """

    predictor: Predictor = field(default_factory=Predictor)
    margin: Margin = field(default_factory=Margin)
    envelope: Envelope = field(default_factory=Envelope)
    certified: CertificateCount = field(default_factory=CertificateCount)
    stopping: StopCost = field(default_factory=StopCost)


@dataclass(slots=True)
class _Mark:
    """A request under way.

    Attributes:
        arrived_ns, first_ns: open time of the gate up to its arrival and to its first token.
        leads: it met the replica empty; ``met_open``: and the gate open.
        promised: that gate's certificate.
        refused: the certificate for which the gate was shut, or open for short chunks alone.
        behind_s: prefill of what came close behind it.
        stop_s: what rollouts took to stop for it; None = they have not yet.
        shared_s: of that, for how long they computed; None = nobody knows.
    """

    arrived_ns: int
    first_ns: int | None = None
    leads: bool = False
    met_open: bool = False
    promised: TtftCertificate | None = None
    refused: TtftCertificate | None = None
    behind_s: float = 0.0
    stop_s: float | None = None
    shared_s: float | None = None


class Experience:
    """Follows one replica's requests and learns from them; single-threaded.

    Args:
        now_ns: the beginning.
        predictor: to start from.
        lessons: shared with other replicas; replaces ``predictor``.
    """

    def __init__(
        self, now_ns: int, predictor: Predictor | None = None, *, lessons: Lessons | None = None
    ) -> None:
        self.lessons = lessons or Lessons(predictor or Predictor())
        self.open_time = OpenTime(now_ns)
        self._marks: dict[int, _Mark] = {}
        self._leader: _Mark | None = None
        self._led_ns = 0
        self._certificate: TtftCertificate | None = None
        self._slowdown: tuple[StopCost, float] | None = None  # of what was taught by then

    @property
    def predictor(self) -> Predictor:
        """Cost of prefill and decode, as learned."""
        return self.lessons.predictor

    @property
    def margin(self) -> Margin:
        """How much of a budget is kept back, as learned."""
        return self.lessons.margin

    @property
    def slowdown(self) -> float:
        """How many times slower serving is beside rollouts, as idle gaps have taught.

        In tenths: routers are told of every change.
        """
        stopping, known = self.lessons.stopping, self._slowdown
        if known is None or known[0] is not stopping:
            found = stopping.slowdown(self.predictor.profile.shared_prefill)
            known = self._slowdown = stopping, round(found, 1)
        return known[1]

    @property
    def followed(self) -> int:
        """Requests under way."""
        return len(self._marks)

    def begin(self, number: int, now_ns: int) -> None:
        """Begin to follow a request; a second time for the same one changes nothing."""
        if number in self._marks:
            return
        mark = _Mark(self.open_time.at(now_ns))
        if not self._marks:
            self._leader, self._led_ns = mark, now_ns
            mark.leads, mark.met_open = True, self.open_time.is_open(now_ns)
            certificate = self._certificate
            if mark.met_open and certificate is not None and certificate.learned:
                mark.promised = certificate
            if certificate is not None and (
                certificate.chunk_divisor > 1 if mark.met_open else not certificate.holds
            ):
                mark.refused = certificate
        self._marks[number] = mark

    def note_size(self, number: int, size: int, now_ns: int) -> None:
        """A request's size is known; what comes close behind another may share its batch."""
        leader, follower = self._leader, self._marks.get(number)
        if leader is None or follower is None or follower is leader:
            return
        if now_ns - self._led_ns <= self.lessons.envelope.longest_stop_s * 1e9:
            leader.behind_s += self.predictor.prefill_s(size, shared=False)

    def note_stop(
        self, seconds: float, chunk_divisor: int = 1, *, had_turns: bool | None = None
    ) -> None:
        """An arrival has stopped the engine beside this replica.

        The first stop after a request met the replica empty and the gate open was for that one.
        Later ones are for requests that came while it was under way and the gate open again: its
        own time to the first token has none of them.

        Args:
            seconds: from the arrival.
            chunk_divisor: of its permit.
            had_turns: the engine; without any it computed nothing. None = not known.
        """
        self.lessons.envelope.note_stop(seconds, chunk_divisor)
        leader = self._leader
        if leader is not None and leader.met_open and leader.stop_s is None:
            leader.stop_s = seconds
            leader.shared_s = None if had_turns is None else seconds * had_turns

    def certificate(
        self, goals: LatencyObjective, percentile: int, *, whole: bool = False
    ) -> TtftCertificate | None:
        """What the next request on the empty replica is promised; None: the pool names no TTFT.

        Args:
            goals: the pool's SLO.
            percentile: share of requests that has to keep it, percent.
            whole: an engine beside this replica cannot shorten its prefill chunks.
        """
        ask = self.lessons.envelope.certificate
        certificate = (
            ask(goals.ttft_s, percentile, goals.alone_s, whole=whole) if goals.ttft_s else None
        )
        self._certificate = certificate
        return certificate

    @property
    def last_certificate(self) -> TtftCertificate | None:
        """The certificate that the gate was judged by last."""
        return self._certificate

    def note_first_token(self, number: int, now_ns: int) -> None:
        """Note when its first token left."""
        if mark := self._marks.get(number):
            mark.first_ns = self.open_time.at(now_ns)

    def dismiss(self, number: int) -> None:
        """Stop following what was not a generating request after all."""
        self._marks.pop(number, None)

    def forget(self) -> None:
        """Requests under way cannot be followed to their end any more."""
        self._marks.clear()
        self._leader = None

    def learn(self, done: FinishedRequest, goals: LatencyObjective, others: int) -> RequestExposure:
        """A request is over.

        Args:
            done: the request.
            goals: the pool's SLO; 0 = not given.
            others: requests still under way.
        """
        exceeded = self._lead(done)
        prefill, decode = self._shares(done)
        # By what was known before it: a late request must not be its own witness.
        lost = (
            prefill and prefill * self.predictor.loss(decoding=False),
            decode and decode * self.predictor.loss(decoding=True),
        )
        taught = self.lessons
        if done.ttft_s is not None:
            learn_prefill = taught.predictor.learn_prefill
            taught.predictor = learn_prefill(done.size, done.ttft_s, share=prefill)
        if done.tpot_s is not None:
            learn_decode = taught.predictor.learn_decode
            taught.predictor = learn_decode(1 + others, done.tpot_s, share=decode)
        met = RequestExposure(
            *(prefill, decode),
            *_used(done, goals, *lost),
            exceeded=exceeded,
        )
        if met.used and met.exposed:
            taught.margin = taught.margin.learn(met.used, met.rollouts)
        return met

    def _lead(self, done: FinishedRequest) -> bool | None:
        """Learn from a request that met the replica empty; whether it exceeds its certificate."""
        mark, ttft = self._marks.get(done.number), done.ttft_s
        if mark is None or not mark.leads:
            return None
        taught = self.lessons
        # Also one without a TTFT (not streamed, failed): some pools have no other.
        if mark.refused is not None:
            taught.envelope.note_refused(mark.refused)
        if ttft is None:
            return None
        seconds = ttft - (mark.stop_s or 0.0) if mark.met_open else ttft + mark.behind_s
        taught.envelope.note_next(seconds)
        shared_s = mark.shared_s if mark.met_open else 0.0
        if shared_s is not None:
            predictor = taught.predictor
            scale_s = predictor.profile.prefill_s(done.size)
            alone_s = predictor.prefill_s(done.size, shared=False)
            taught.stopping = taught.stopping.learn(done.size, ttft, shared_s, scale_s, alone_s)
        return taught.certified.add(ttft, mark.promised) if mark.promised else None

    def _shares(self, done: FinishedRequest) -> tuple[float, float]:
        mark = self._marks.pop(done.number, None)
        if mark is None:
            return 0.0, 0.0
        end = self.open_time.at(done.ended_ns)
        first = mark.first_ns if mark.first_ns is not None else end
        prefill = _share(first - mark.arrived_ns, (done.first_ns or done.ended_ns), done.arrived_ns)
        decode = _share(end - first, done.ended_ns, done.first_ns) if done.first_ns else 0.0
        return prefill, decode


def _share(open_ns: int, end_ns: int, start_ns: int) -> float:
    elapsed = end_ns - start_ns
    return min(1.0, max(0.0, open_ns / elapsed)) if elapsed > 0 else 0.0


def _used(
    done: FinishedRequest, goals: LatencyObjective, prefill: float, decode: float
) -> tuple[float, float]:
    """The worse latency / SLO, and which share of that latency rollouts account for."""
    both = ((done.ttft_s, goals.ttft_s, prefill), (done.tpot_s, goals.tpot_s, decode))
    found = ((value / goal, rollouts) for value, goal, rollouts in both if value and goal)
    return max(found, default=(0.0, 0.0))
