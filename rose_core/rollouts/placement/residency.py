"""Which sessions' keys lie on which engine, so that new ones do not push out those that come back.

An engine's KV pool holds the contexts of the turns under way and, as long as there is room, those
of sessions whose environment is answering. Sending one session more than fits evicts another that
will be prefilled whole when it returns; on agent traces that is ten times a turn's own prompt. So
an engine takes a session that is not at home there only while the contexts fit.

    turn begins --> live --turn ends--> idle, newest --next turn there--> live
                                         |--pool full, or IDLE_SECONDS--> not counted any more
                                         |--next turn elsewhere, or over--> forgotten

An engine with little to do takes any session: with a quarter of its places in use it decodes so few
that the lost time outweighs a prefill. Without a known pool size there is always room. A session
that is over is rarely announced; its keys count until it has been idle for longer than most tools
take. Contexts grow: a young session counts as much as sessions usually have.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from rose_core.rollouts.placement.selection import EngineView, TurnView

IDLE_SHARE = 0.25  # of its places: below, an engine decodes so little that a prefill costs less
IDLE_SECONDS = 30.0  # longer than most tools take; few sessions say that they are over
_WEIGHT = 0.01  # of a new turn in the usual size (EWMA): about the last hundred turns


@dataclass
class _Engine:
    pool: int
    live: dict[str, int] = field(default_factory=dict)
    idle: OrderedDict[str, tuple[int, float]] = field(default_factory=OrderedDict)
    used: int = 0

    def drop(self, session: str) -> None:
        self.used -= self.live.pop(session, 0) + self.idle.pop(session, (0, 0.0))[0]

    def expire(self, now: float) -> None:
        while self.idle and (
            self.used > self.pool or next(iter(self.idle.values()))[1] < now - IDLE_SECONDS
        ):
            self.used -= self.idle.popitem(last=False)[1][0]


class Residents:
    """The sessions by engine, as the router believes them to be."""

    def __init__(self) -> None:
        self._usual = 0.0
        self._engines: dict[str, _Engine] = {}
        self._where: dict[str, str] = {}

    def set_pool(self, engine: str, tokens: int) -> None:
        """Set the size of the engine's KV pool in tokens, 0 = unknown."""
        self._engines.setdefault(engine, _Engine(tokens)).pool = tokens

    def drop_engine(self, engine: str) -> None:
        """Forget the engine with every key on it."""
        known = self._engines.pop(engine, None)
        for session in (*known.live, *known.idle) if known else ():
            self._where.pop(session, None)

    def begin_turn(self, engine: str, session: str, tokens: int) -> None:
        """Count a turn that begins there, and will need keys of so many tokens in the end."""
        if session:
            self.drop_session(session)
        self._usual += (tokens - self._usual) * (_WEIGHT if self._usual else 1.0)
        known = self._engines.get(engine)
        if known is not None and session:
            known.live[session] = size = max(tokens, round(self._usual))
            known.used += size
            self._where[session] = engine

    def end_turn(self, engine: str, session: str, tokens: int, now: float) -> None:
        """Count the turn's keys as idle: they stay while there is room."""
        known = self._engines.get(engine)
        if known is None or session not in known.live:
            return
        known.drop(session)
        size = max(tokens, round(self._usual))
        known.idle[session] = (size, now)
        known.used += size

    def drop_session(self, session: str) -> None:
        """Stop counting the session's keys: they are of no more use."""
        engine = self._engines.get(self._where.pop(session, ""))
        if engine is not None:
            engine.drop(session)

    def without_room(
        self, turn: TurnView, engines: Iterable[EngineView], now: float
    ) -> frozenset[str]:
        """Engines on which the turn would push out keys that are still wanted."""
        crowded = []
        for engine in engines:
            known = self._engines.get(engine.name)
            if known is None or not known.pool or engine.name == turn.home:
                continue
            if engine.live < IDLE_SHARE * engine.cap:
                continue
            known.expire(now)
            if known.used + max(turn.context + turn.expected, self._usual) > known.pool:
                crowded.append(engine.name)
        return frozenset(crowded)
