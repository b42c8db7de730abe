"""What the guard of a node talks to and writes to; the same from its start to its end.

Next step: ``matching`` makes replicas and slots of it, ``loop`` steps them.
"""

from __future__ import annotations

from dataclasses import dataclass

from rose_agent.devices.watch import DeviceWatch
from rose_agent.guard.blackbox import BlackBox
from rose_agent.guard.hostlink import HostLink
from rose_agent.guard.pools import Pools
from rose_agent.guard.recorder import Recorder
from rose_agent.guard.settings import Settings
from rose_agent.guard.taplink import TapLink
from rose_agent.guard.whole import WholeReplicas
from rose_core.guard.crossover import Schedule
from rose_engines.rundir import RunDir


@dataclass(frozen=True)
class Neighbours:
    """The guard's neighbours and books.

    Attributes:
        rundir: the node's run directory.
        settings: see ``Settings``.
        recorder: the last seconds, for whoever asks why.
        blackbox: writes the recorder down when serving missed its SLO.
        pools: what is shared by the replicas of a pool.
        schedule: when the gate stays shut to see serving alone.
        devices: GPUs of the node.
        whole: replicas that are lent as a whole.
        host: the engine host of the node.
        tap: its wire tap.
    """

    rundir: RunDir
    settings: Settings
    recorder: Recorder
    blackbox: BlackBox
    pools: Pools
    schedule: Schedule
    devices: DeviceWatch
    whole: WholeReplicas
    host: HostLink
    tap: TapLink
