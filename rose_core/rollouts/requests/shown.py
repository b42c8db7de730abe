"""What a complaint shows of a value that a caller has sent: a few of its entries.

To write out a list of three million numbers for its first hundred characters holds everybody for
0.3 s, in a thread as well. Next step: ``fields`` complains of what no engine bears.
"""

from __future__ import annotations

import reprlib
from itertools import islice
from typing import Any


class _Beginning(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 100

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        """As its base, which sorts all entries first."""
        return super().repr_dict(dict(islice(x.items(), self.maxdict + 1)), level)


_BEGINNING = _Beginning()


def shown(value: object, most: int = 100) -> str:
    """The beginning of a value, as Python writes it, in at most so many characters."""
    return _BEGINNING.repr(value)[:most]
