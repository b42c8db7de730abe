"""Process trees of MPS clients: they stop by their own permit and leave the server before they die.

Nobody has measured what a frozen client does to the other clients of its server, and killing one
with work under way can hang them all. So the host never freezes such a tree. The plugin inside
waits at its permit and reports that it rests (``Status.resting``); the host asks for that while the
tree should stand still. A tree that does not report it in time is killed like any other
(``enforcement.tree``), after the server was asked to end its work.

| asked | what is true |
|---|---|
| no control socket yet | standing still: it is loading, within its share, and has no turns |
| ``resting``, permit not open | standing still |
| anything else, or no answer | not standing still |
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Collection
from pathlib import Path

from rose_agent.errors import GroupError
from rose_agent.os.groups import ProcessGroup
from rose_core.unreadable import UNREADABLE
from rose_engines.weights.calls import LENGTH, GetStatus, Status, answers, frame

_log = logging.getLogger(__name__)
_ASK_SECONDS = 0.5
_POLL_SECONDS = 0.005


class ClientGroup:
    """A tree whose processes leave their MPS server before they are killed.

    Args:
        tree: the tree itself.
        let_go: takes processes from the server; blocks until they have left.
    """

    def __init__(self, tree: ProcessGroup, let_go: Callable[[Collection[int]], None]) -> None:
        self._tree = tree
        self._let_go = let_go

    @property
    def driver(self) -> str:
        """Driver of the process tree, which the client shares."""
        return self._tree.driver

    @property
    def directory(self) -> Path | None:
        """Directory of the process tree, which the client shares."""
        return self._tree.directory

    def pids(self) -> tuple[int, ...]:
        """Processes of the tree, the client among them."""
        return self._tree.pids()

    def freeze(self) -> None:
        """Nothing: the permit stops it."""

    def thaw(self) -> None:
        """Whoever froze it from outside is undone."""
        self._tree.thaw()

    def is_frozen(self) -> bool:
        """Whether the kernel holds it, which here nobody of ours asks for."""
        return self._tree.is_frozen()

    def cpu_ns(self) -> int | None:
        """Not known: what runs on the GPU needs no processor."""
        return None

    def kill(self) -> None:
        """Take every process from the server, then kill the tree."""
        self._let_go(self.pids())
        self._tree.kill()

    def remove(self) -> None:
        """Remove the process tree."""
        self._tree.remove()


class SteeredGroup(ClientGroup):
    """The same tree for the enforcer, whose thread must wait for nobody.

    Args:
        tree: the tree.
        let_go: see ``ClientGroup``.
        control: control socket of the plugin inside.
    """

    def __init__(
        self, tree: ProcessGroup, let_go: Callable[[Collection[int]], None], control: Path
    ) -> None:
        super().__init__(tree, let_go)
        self._control = control
        self._stopping = threading.Event()
        self._resting = False
        self._asker: threading.Thread | None = None
        self._killer: threading.Thread | None = None

    def freeze(self) -> None:
        """Begin to ask whether it rests."""
        self._resting = False
        self._stopping.set()
        if self._asker is None or not self._asker.is_alive():
            self._asker = threading.Thread(target=self._ask, name="resting", daemon=True)
            self._asker.start()

    def thaw(self) -> None:
        """Ask no more; it goes on by its permit."""
        self._stopping.clear()
        self._resting = False
        super().thaw()

    def is_frozen(self) -> bool:
        """The plugin's last word, or nobody is left."""
        return self._resting or not self.pids()

    def kill(self) -> None:
        """Begin to end it, once."""
        if self._killer is None or not self._killer.is_alive():
            self._killer = threading.Thread(target=self._end, name="end client", daemon=True)
            self._killer.start()

    def _end(self) -> None:
        try:
            super().kill()
        except GroupError as error:
            _log.error("%s", error)

    def _ask(self) -> None:
        while self._stopping.is_set() and self.pids():
            resting = is_resting(self._control)
            self._resting = resting and self._stopping.is_set()
            threading.Event().wait(_POLL_SECONDS * (10 if resting else 1))


def is_resting(control: Path) -> bool:
    """Ask the plugin behind a control socket; see the module's table."""
    if not control.exists():
        return True
    try:
        status = ask(control)
    except (OSError, EOFError, *UNREADABLE):
        return False
    return status.resting and status.permit_open is not True


def ask(control: Path) -> Status:
    """One question on a connection of its own, from any thread.

    Raises:
        OSError, EOFError, msgspec.MsgspecError: no answer, or none that is understood.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_ASK_SECONDS)
        connection.connect(str(control))
        connection.sendall(frame(GetStatus()))
        with connection.makefile("rb") as stream:
            head = stream.read(LENGTH.size)
            if len(head) < LENGTH.size:
                raise EOFError(f"{control} hung up")
            answer = answers.decode(stream.read(LENGTH.unpack(head)[0]))
    if isinstance(answer, Status):
        return answer
    raise EOFError(f"{control} answered {type(answer).__name__}")
