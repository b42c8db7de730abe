"""Puts together what the slots of a host share (``Site``), from the flags and what the node offers.

A host that is root does everything itself, and first ends what an earlier host left behind. One
without privileges is given a root helper, which has done that already and makes cgroups, users and
processes in its place. Next step: ``main`` serves with what was put together here.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rose_agent.devices.access import located
from rose_agent.devices.driver import DeviceDriver
from rose_agent.devices.driver_limit import SmiLimits
from rose_agent.devices.opening import open_driver
from rose_agent.devices.static import StaticDriver
from rose_agent.devices.usage import meter_for
from rose_agent.errors import DeviceError, NoDevices
from rose_agent.host import metrics
from rose_agent.host.enforcement.enforcer import Enforcer
from rose_agent.host.helper.client import HelpedAccounts, HelpedKvFolders, Helper
from rose_agent.host.memory.footprints import Footprints
from rose_agent.host.memory.sizing import Sizer
from rose_agent.host.options.arguments import kv_folders_of, limiter_of, limits_of
from rose_agent.host.processes.classes import LAUNCHERS
from rose_agent.host.processes.repair import forget_slot, repair
from rose_agent.host.sharing.mps import MpsNode
from rose_agent.host.sharing.sharing import SharingMeans, free_leftovers, out_of_reach
from rose_agent.host.slots.site import Site
from rose_agent.host.users.accounts import Accounts
from rose_agent.host.users.kernel_caches import UNKNOWN, made_by
from rose_agent.host.users.kv_folders import KvFolders
from rose_agent.os.freezers import Freezer, own_base
from rose_agent.os.limits import Limiter
from rose_engines.node.rundir import RunDir, SlotDir

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeFacts:
    """What a host finds on its node.

    Attributes:
        freezer: the way to stop trees here.
        devices: the driver of the node's GPUs.
        broken: why the driver that was asked for does not work; empty when it does.
    """

    arguments: argparse.Namespace
    rundir: RunDir
    freezer: Freezer
    devices: DeviceDriver
    broken: str

    @classmethod
    def gather(cls, arguments: argparse.Namespace, freezer: Freezer) -> NodeFacts:
        """Make the run directory and open the driver.

        A host without its GPUs stays up, so that its capabilities can say what is wrong.

        Raises:
            OSError: the run directory cannot be made.
        """
        rundir = RunDir(arguments.rundir).create()
        try:
            devices, broken = open_driver(arguments.devices), ""
        except NoDevices as error:
            _log.error("%s", error)
            devices, broken = StaticDriver.open(None), str(error)
        return cls(arguments, rundir, freezer, devices, broken)

    @property
    def on_gpus(self) -> bool:
        """Engines hold their memory on GPUs, not in the node's."""
        return self.devices.name == "nvml"

    def kernels_key(self) -> str:
        """What makes the engines' kernels here; neither image nor driver changes under a host."""
        try:
            version = self.devices.version()
        except DeviceError as error:
            _log.warning("the driver does not say its version, so kernels are made anew: %s", error)
            return UNKNOWN
        return made_by(self.arguments.engine_python, version.driver if version else None)

    def logs(self) -> Path:
        """Folder of the engines' logs, made."""
        folder = self.rundir.root / "logs"
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder


@dataclass(frozen=True)
class HostPrivileges:
    """How this host does what takes root: by itself, or through its helper.

    Attributes:
        means: how engines can share GPUs.
        limiter: holds engines to what they may take of the node.
        accounts: users that engines run as.
        forget: removes what a slot's engine left.
        kv_folders: where the engines of a lease keep keys for each other.
        helper: starts engines in the host's place; None = the host does.
    """

    means: SharingMeans
    limiter: Limiter
    accounts: Accounts
    forget: Callable[[SlotDir, bool], None] = forget_slot
    kv_folders: KvFolders = field(default_factory=KvFolders)
    helper: Helper | None = None

    @classmethod
    async def as_root(cls, facts: NodeFacts) -> HostPrivileges:
        """The host is root: end what an earlier host left, then see how engines can be held.

        Raises:
            NoLimits: a limit that was asked for cannot be set.
        """
        arguments, rundir, freezer = facts.arguments, facts.rundir, facts.freezer
        first, *rest = arguments.mps_program.split()
        mps = MpsNode(arguments.mps_root, facts.devices, [located(first), *rest])
        limits = SmiLimits(lambda: own_base(2), freezer.prefix) if facts.on_gpus else None
        ways = SharingMeans(mps, limits)
        await asyncio.to_thread(free_leftovers, ways, rundir)
        repaired = await asyncio.to_thread(repair, rundir, freezer)
        if repaired:
            _log.warning("ended %d engines of an earlier host", repaired)
        limiter = limiter_of(arguments, freezer.prefix)
        limiter.sweep()
        accounts = Accounts(arguments.engine_uid, await asyncio.to_thread(facts.kernels_key))
        accounts.open(rundir)
        folders = kv_folders_of(arguments)
        folders.sweep()
        return cls(ways, limiter, accounts, kv_folders=folders)

    @classmethod
    async def with_helper(cls, facts: NodeFacts, helper: Helper) -> HostPrivileges:
        """The host is not root: the helper is, and has repaired."""
        kernels = await asyncio.to_thread(facts.kernels_key)
        return cls(
            SharingMeans(MpsNode(None, facts.devices), elastic=out_of_reach),
            helper.limiter(limits_of(facts.arguments)),
            HelpedAccounts(helper, facts.arguments.engine_uid, kernels),
            helper.forget,
            HelpedKvFolders(helper, facts.arguments.kv_store),
            helper,
        )


def site_of(facts: NodeFacts, rights: HostPrivileges) -> Site:
    """What the slots of this host share; its enforcer has not been started."""
    arguments, rundir = facts.arguments, facts.rundir
    metrics.KV_STORE_BYTES.set_function(rights.kv_folders.used)
    return Site(
        models=arguments.models,
        python=arguments.engine_python,
        freezer=facts.freezer,
        enforcer=Enforcer(rundir.stop.exists, rundir.enforcer_bell),
        launchers=LAUNCHERS,
        logs=facts.logs(),
        dedicated=arguments.dedicated is not None,
        meter=meter_for(facts.devices),
        sizer=Sizer(facts.devices if facts.on_gpus else None, Footprints(rundir.footprints)),
        accounts=rights.accounts,
        limiter=rights.limiter,
        means=rights.means,
        spawner=rights.helper,
        forget=rights.forget,
        kv_folders=rights.kv_folders,
    )
