"""How a reward ends: scored, masked or lost, and never a zero that nobody has computed.

| outcome | means | asked again |
|---|---|---|
| scored | the function has judged the answer | the same result |
| masked | it has run, and what came of it must not be trained on | the same result |
| lost | it has not run to its end, whatever was tried | tried anew |

Next step: ``rose_rewards.gateway`` makes them, a trainer trains on those that are scored.
"""

from __future__ import annotations

import sys

import msgspec


class Scored(msgspec.Struct, frozen=True, tag="scored", tag_field="outcome", omit_defaults=True):
    """The function has judged the answer.

    Attributes:
        reward: a finite number.
        correct: whether the answer counts as a correct one.
        seconds: that the function took.
        reason: why it is no better, where the function says; of a program the case that it failed.
    """

    reward: float
    correct: bool
    seconds: float
    reason: str = ""


class Masked(msgspec.Struct, frozen=True, tag="masked", tag_field="outcome"):
    """There is a result that must not be used; ``reason`` says why."""

    reason: str
    seconds: float


class Lost(msgspec.Struct, frozen=True, tag="lost", tag_field="outcome"):
    """There is no result; ``reason`` says what went wrong and how often it was tried."""

    reason: str


Result = Scored | Masked | Lost

_MOST = sys.float_info.max  # whole numbers beyond it are no floats, and NaN is not below it


def result_of(returned: object, correct_from: float, seconds: float) -> Result:
    """What a function's answer means.

    Args:
        returned: a number, an object with ``reward`` and perhaps ``correct``; None = no verdict.
        correct_from: rewards from here on are of correct answers, where the function does not say.
        seconds: that it took.
    """
    if returned is None:
        return Masked("NoVerdict: the function gave none", seconds)
    fields = returned if isinstance(returned, dict) else {"reward": returned}
    reward = fields.get("reward")
    if isinstance(reward, bool):
        reward = float(reward)
    if not isinstance(reward, int | float) or not -_MOST <= reward <= _MOST:
        return Lost(f"NoNumber: the function gave {returned!r:.80}; expected a finite number")
    correct = fields.get("correct", reward >= correct_from)
    if not isinstance(correct, bool):
        return Lost(f"NoNumber: correct is {correct!r:.80}; expected true or false")
    return Scored(float(reward), correct, seconds)
