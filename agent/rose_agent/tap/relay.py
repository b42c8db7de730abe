"""The node's tap listening to a tap inside a pod (``rose tap --sidecar``).

Where no process of the node may enter pods' namespaces (no SYS_ADMIN, sandboxed runtimes) a pod
brings a tap of its own, which needs NET_RAW only. It listens in a folder of the node's run
directory, ``taps/POD-UID``; the node's tap speaks to it as the guard would, and passes on what it
says about that pod and about nothing else. Whoever may write into that folder speaks for the pod.
Next step: ``parser`` makes relays.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from pathlib import Path

from rose_agent.tap import frames
from rose_agent.tap.frames import Watch
from rose_core.identity import PodUid
from rose_core.telemetry.events import TapEvent

_log = logging.getLogger(__name__)
_NAME = re.compile(r"^[A-Za-z0-9][-A-Za-z0-9._]{0,127}$")


def socket_of(rundir: Path, replica: PodUid) -> Path | None:
    """Where the replica's own tap listens; None when it has none."""
    if not _NAME.match(replica):
        return None
    path = rundir / "taps" / replica / "tap.sock"
    return path if path.exists() else None


class Relay:
    """One connection to a pod's own tap.

    Args:
        path: its socket.
        watch: the replica to follow there; namespace and interfaces are the pod's own.
        deliver: takes its events.
        ended: called with the reason when it is heard no more.
    """

    def __init__(
        self,
        path: Path,
        watch: Watch,
        deliver: Callable[[list[TapEvent]], None],
        ended: Callable[[Watch, str], None],
    ) -> None:
        self.watch = watch
        self._path = path
        self._deliver = deliver
        self._ended = ended
        self._writer: asyncio.StreamWriter | None = None
        self._task = asyncio.create_task(self._run())

    def resend(self) -> None:
        """Send the requests under way to a guard that has just connected."""
        if self._writer is not None:
            watch = Watch(self.watch.replica, 0, self.watch.port, closely=self.watch.closely)
            self._writer.write(frames.pack([watch]))

    def close(self) -> None:
        """Listen no more."""
        self._task.cancel()

    async def _run(self) -> None:
        try:
            await self._session()
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            self._ended(self.watch, f"the pod's own tap at {self._path} is silent: {error}")

    async def _session(self) -> None:
        reader, writer = await asyncio.open_unix_connection(str(self._path))
        self._writer = writer
        _log.info("%s is heard through its own tap", self.watch.replica)
        try:
            self.resend()
            while True:
                events = await frames.read(reader, frames.events)
                self._deliver([e for e in events if e.replica == self.watch.replica])
        finally:
            self._writer = None
            writer.close()
