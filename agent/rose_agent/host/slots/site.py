"""What the slots of an engine host share: the node's folders, its drivers, its ways to stop.

Next step: ``lifecycle`` runs one engine with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from rose_agent.devices.usage import MemoryMeter, ResidentMeter
from rose_agent.host.enforcement.enforcer import Enforcer
from rose_agent.host.memory.sizing import Sizer
from rose_agent.host.processes.launchers import Launcher
from rose_agent.host.processes.process import Spawner
from rose_agent.host.processes.repair import forget_slot
from rose_agent.host.sharing.sharing import SharingMeans
from rose_agent.host.users.accounts import Accounts
from rose_agent.host.users.kv_folders import KvFolders
from rose_agent.os.freezers import Freezer
from rose_agent.os.limits import Limiter, Limits
from rose_core.identity import SlotUid
from rose_core.rollouts.engines.kv_store import KvPoolSpec
from rose_engines.node.rundir import SlotDir

# Most time an engine may need to become ready, counted while it may run.
START_LIMIT_SECONDS = 600.0

Answer = TypeVar("Answer")


@dataclass
class Site:
    """What the host's slots share.

    Attributes:
        models: folder of the node's models.
        python: Python of the engine environment.
        logs: folder of the engines' logs.
        dedicated: the host itself holds the permits open.
        meter: measures what engines hold.
        sizer: tells whether an engine fits on its GPUs.
        accounts: who engines run as.
        kv_folders: where the engines of a lease keep keys for each other.
        kv_pool: where those of other nodes find them; None = nowhere.
        limiter: what each of them may take of the node.
        means: how they share GPUs beside time-slicing.
        spawner: who starts engines in the host's place; None = the host itself.
        forget: removes what a slot's engine left; True = its permit too.
        cut: breaks every turn that runs through a slot's data route.
        reader: the one thread that asks the driver of the GPUs for these slots.
    """

    models: Path
    python: Path
    freezer: Freezer
    enforcer: Enforcer
    launchers: dict[str, Launcher]
    logs: Path
    dedicated: bool = False
    start_limit_seconds: float = START_LIMIT_SECONDS
    meter: MemoryMeter = field(default_factory=ResidentMeter)
    sizer: Sizer = field(default_factory=Sizer)
    accounts: Accounts = field(default_factory=Accounts)
    kv_folders: KvFolders = field(default_factory=KvFolders)
    kv_pool: KvPoolSpec | None = None
    limiter: Limiter = field(default_factory=lambda: Limiter(Limits(), {}, ""))
    means: SharingMeans = field(default_factory=SharingMeans)
    spawner: Spawner | None = None
    forget: Callable[[SlotDir, bool], None] = forget_slot
    cut: Callable[[SlotUid], None] = lambda _: None
    reader: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "gpus"))

    async def ask(self, question: Callable[[], Answer]) -> Answer:
        """Ask what may have to ask the driver, which answers after seconds where a GPU is lost.

        Meanwhile the host goes on answering the guard. Whoever is cancelled waits for the answer
        all the same: what it has claimed (``Sizer``) is given up after it, never before.
        """
        future = asyncio.get_running_loop().run_in_executor(self.reader, question)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait({future})
            raise
