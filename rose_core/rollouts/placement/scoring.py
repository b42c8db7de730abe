"""What a turn costs on an engine, in seconds; lower is better.

    cost(e) = T_e                            prefill of what e has not cached, decode, short pauses
            + prefill * live                 the turns already there stand still for that prefill
            + decode * live                  by how much one turn more lengthens every step there
            + ahead                          decode of what the trajectory writes in later turns
            + (1 - exp(-h_e T_e)) * (loss)   risk that e is taken back during the turn
            + late_weight * max(0, W_e - F)  the tail of what the trajectory still needs, less the
                                             time until it is too old to train on
            + lent_weight * (k_e - 1) * B_e  time in which a lent GPU computes that would not
            + crowding * live/cap            spreads equal engines

``T_e`` holds the price of leaving the session's home (its cached prefix), so affinity is not a rule
of its own. Prefill and step are measured per engine, so turns that mostly read go to engines that
compute fast and turns that mostly write to those with fast memory. A session stays where it is put,
so a turn's own tokens are not all that hangs on the choice: ``ahead`` counts what is expected of
the rest, up to ``Policy.horizon_tokens``, at the step that the engine has with one turn more.
What serving feels of lending is a request that finds the GPU computing, so ``B_e`` has a price: on
a borrowed engine that has turns a turn adds to the steps of all, on an idle one it has every step
computed that it takes. ``k_e`` is how many times slower serving is meanwhile, as measured by the
guard. Numbers: ``estimates``.
"""

from __future__ import annotations

import math

from rose_core.rollouts.placement.views import EngineView, Policy, TurnView
from rose_core.wire.routing import EngineKind

_UNMEASURED = 2.0  # slowdown; taking turns, which the guard starts from as well
_DEAREST = 3.0  # the price is twice that at 2.0 there: no larger one was tried


def _prefill(turn: TurnView, engine: EngineView) -> float:
    cached = min(turn.cached, turn.context) if engine.name == turn.home else 0
    return (turn.context - cached) * engine.speed.prefill_seconds_per_token


def seconds(turn: TurnView, engine: EngineView) -> float:
    """Expected time of the turn on the engine: prefill of what is not cached, decode, pauses."""
    decode = turn.expected * engine.speed.step_at(engine.live + 1)
    return (_prefill(turn, engine) + decode) / engine.hazard.open_share


def stall(turn: TurnView, engine: EngineView) -> float:
    """Seconds that the turns already on the engine lose to this one, summed.

    What a turn gains by leaving a crowded home, those at its target lose: a move that only looks
    at its own turn makes a whole fleet prefill contexts that were cached elsewhere.
    """
    lost = _prefill(turn, engine) + turn.expected * engine.speed.per_turn_seconds
    return lost * engine.live / engine.hazard.open_share


def _later(turn: TurnView, policy: Policy) -> float:
    """Tokens of the trajectory's later turns that are looked ahead to."""
    return min(max(0.0, turn.rest_tokens - turn.expected), policy.horizon_tokens)


def ahead(turn: TurnView, engine: EngineView, policy: Policy) -> float:
    """Decode of the trajectory's later turns, were it to stay there."""
    return _later(turn, policy) * engine.speed.step_at(engine.live + 1) / engine.hazard.open_share


def lent_seconds(turn: TurnView, engine: EngineView, policy: Policy) -> float:
    """For how much longer a lent GPU computes for this turn and the later ones there; else 0."""
    if engine.kind is EngineKind.DEDICATED:
        return 0.0
    speed, tokens = engine.speed, turn.expected + _later(turn, policy)
    step = speed.per_turn_seconds if engine.live else speed.step_at(1)
    return _prefill(turn, engine) + tokens * step


def lent_price(engine: EngineView, policy: Policy) -> float:
    """Seconds of cost per second for which the lent GPU computes more."""
    # Below 1, or no number: nobody has measured that, and it must not make the time free.
    slowdown = engine.slowdown if engine.slowdown >= 1.0 else _UNMEASURED
    return policy.lent_weight * (min(slowdown, _DEAREST) - 1.0)


def late(turn: TurnView, engine: EngineView, policy: Policy) -> float:
    """What it costs that the whole trajectory may end too old, judged by its tail."""
    if math.isinf(turn.budget_seconds):
        return 0.0
    rest = turn.tail_tokens * engine.speed.step_seconds / engine.hazard.open_share
    return policy.late_weight * max(0.0, rest - turn.budget_seconds)


def cost(turn: TurnView, engine: EngineView, policy: Policy) -> float:
    """The score, in seconds; lower is better."""
    time = seconds(turn, engine)
    crowding = policy.crowding_seconds * engine.live / max(engine.cap, 1)
    total = time + stall(turn, engine) + crowding + late(turn, engine, policy)
    total += ahead(turn, engine, policy)
    total += lent_price(engine, policy) * lent_seconds(turn, engine, policy)
    if engine.kind is EngineKind.DEDICATED:
        return total
    again = (turn.context + turn.expected / 2) * engine.speed.prefill_seconds_per_token
    taken = 1.0 - math.exp(-engine.hazard.per_second * time)
    return total + taken * (again + policy.pause_seconds)
