"""Who may publish and read which runs, by the names in the callers' certificates.

A JSON file (``--access``): name -> what it may do, names and runs as shell patterns::

    {
      "spiffe://train/grpo": {"publish": ["grpo*"], "read": ["*"]},
      "relay.serving": {"read": ["grpo*"]}
    }

Without a file everybody who gets in may do everything. Blocks are named by their content and have
no run: whoever may read some run may fetch a block whose name it knows, and such a name is known
from the manifest of a run alone. Next step: ``service`` asks here before it does anything.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from rose_weights.errors import Forbidden

Right = Literal["publish", "read"]


class Rights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one name may do; runs as shell patterns."""

    publish: tuple[str, ...] = ()
    read: tuple[str, ...] = ()

    def allow(self, right: Right, run: str | None) -> bool:
        """Whether a run is among them; None asks for any run at all."""
        patterns = self.publish if right == "publish" else self.read
        if run is None:
            return bool(patterns)
        return any(fnmatch.fnmatchcase(run, pattern) for pattern in patterns)


class Access:
    """The rules of one service.

    Args:
        rules: name, as a shell pattern -> rights; None allows everything.
    """

    def __init__(self, rules: Mapping[str, Rights] | None = None) -> None:
        self._rules = rules

    @classmethod
    def load(cls, path: Path | None) -> Access:
        """Read the file.

        Raises:
            ValueError: it is no such file; says where it differs.
            OSError: it cannot be read.
        """
        if path is None:
            return cls()
        try:
            return cls(msgspec.json.decode(path.read_bytes(), type=dict[str, Rights]))
        except msgspec.MsgspecError as error:
            message = f"{path} does not say who may do what: {error}"
            raise ValueError(message) from error

    def check(self, names: Iterable[str], right: Right, run: str | None) -> None:
        """Refuse who may not.

        Args:
            names: of the caller, from its certificate.
            right: what it wants to do.
            run: with which run; None = with blocks.

        Raises:
            Forbidden: none of the names may.
        """
        if self._rules is None:
            return
        known = tuple(names)
        if not any(rights.allow(right, run) for rights in self._of(known)):
            message = (
                f"{' / '.join(known) or 'a caller without a certificate'} may not {right} "
                f"{f'run {run!r}' if run is not None else 'anything'} here; --access says who may"
            )
            raise Forbidden(message)

    def _of(self, names: Iterable[str]) -> Iterator[Rights]:
        """What any of the names may do."""
        for name in names:
            for pattern, rights in (self._rules or {}).items():
                if fnmatch.fnmatchcase(name, pattern):
                    yield rights
