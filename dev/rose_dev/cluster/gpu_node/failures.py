"""What can go wrong with a GPU, as actions on the NVML library's state.

| action | takes | what NVML says from then on |
|---|---|---|
| ``lose`` | GPU | Xid 79, then every question fails: it has fallen off the bus |
| ``restore`` | GPU | it is as new |
| ``xid`` | GPU NUMBER | the fault, as an event |
| ``ecc`` | GPU [COUNT] | uncorrected memory errors |
| ``thermal`` | GPU [CELSIUS] | clocks lowered because of heat |
| ``power`` | GPU WATTS | drawn now |
| ``mig`` | GPU | cut into slices |
| ``vgpu`` | GPU | it is a share of a GPU, in a virtual machine |
| ``slow`` | GPU SECONDS | each answer about it takes that long |
| ``hold`` | GPU PID BYTES | a process holds memory |
| ``drop`` | GPU PID | it does not any more |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rose_dev.errors import DevelopmentError
from rose_dev.gpu.state import (
    BARE_METAL,
    IDLE_MILLIWATTS,
    THERMAL_SLOWDOWN,
    VGPU,
    State,
    StateGpu,
)

_HOT = 92


def _restore(gpu: StateGpu) -> None:
    gpu.recover()
    raw = gpu.raw
    raw.ecc_uncorrected = raw.throttle_reasons = raw.delay_microseconds = 0
    raw.mig_current = raw.mig_pending = 0
    raw.virtualization = BARE_METAL
    raw.temperature, raw.power_milliwatts = 34, IDLE_MILLIWATTS


def _ecc(gpu: StateGpu, count: str = "1") -> None:
    gpu.raw.ecc_uncorrected = int(count)


def _thermal(gpu: StateGpu, celsius: str = str(_HOT)) -> None:
    gpu.raw.temperature, gpu.raw.throttle_reasons = int(celsius), THERMAL_SLOWDOWN


def _power(gpu: StateGpu, watts: str) -> None:
    gpu.raw.power_milliwatts = int(watts) * 1000


def _mig(gpu: StateGpu) -> None:
    gpu.raw.mig_current = gpu.raw.mig_pending = 1


def _vgpu(gpu: StateGpu) -> None:
    gpu.raw.virtualization = VGPU


def _slow(gpu: StateGpu, seconds: str) -> None:
    gpu.raw.delay_microseconds = int(float(seconds) * 1e6)


ACTIONS: dict[str, Callable[..., None]] = {
    "lose": lambda gpu: gpu.lose(),
    "restore": _restore,
    "xid": lambda gpu, number: gpu.fault(int(number)),
    "ecc": _ecc,
    "thermal": _thermal,
    "power": _power,
    "mig": _mig,
    "vgpu": _vgpu,
    "slow": _slow,
    "hold": lambda gpu, pid, size: gpu.start(int(pid), int(size)),
    "drop": lambda gpu, pid: gpu.end(int(pid)),
}


def act(state: State, action: str, operands: Sequence[str]) -> str:
    """Do it.

    Returns:
        What was done, for people.

    Raises:
        DevelopmentError: there is no such GPU, or a word is missing or is no number.
    """
    if not operands:
        message = f"{action}: name a GPU by its index or UUID"
        raise DevelopmentError(message)
    gpu = state.gpu(operands[0])
    try:
        ACTIONS[action](gpu, *operands[1:])
    except (TypeError, ValueError) as error:
        message = f"{action} {' '.join(operands)}: {error}"
        raise DevelopmentError(message) from error
    return f"{action} {' '.join(operands)}: {gpu.uuid}"
