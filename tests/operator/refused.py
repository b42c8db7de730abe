"""What the tables of fields share: a field that is refused, and a look at a part of something."""

from dataclasses import dataclass
from functools import reduce


@dataclass(frozen=True)
class Refused:
    """The API server refuses it where it would have no effect, by this rule."""

    rule: str


def part(thing: object, path: str) -> object:
    """What stands at a dotted path of attributes."""
    return reduce(getattr, path.split("."), thing)
