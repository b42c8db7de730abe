"""Watches whether this container reaches the node's GPUs, and reports what it found.

``rose_agent.devices.access`` has the table of what can be found. What changes it is the container
itself, so the guard ends, and the kubelet starts a new one: engines that run are adopted.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

from rose_agent.devices import access
from rose_agent.devices.driver import DeviceDriver
from rose_agent.devices.opening import open_driver
from rose_agent.errors import AccessChanged, DeviceError, NoDevices
from rose_agent.guard.metrics import DEVICE_ACCESS

_log = logging.getLogger(__name__)
PERIOD_SECONDS = 10.0


async def watch_access(
    on_absence: Callable[[str], None], on_presence: Callable[[str], None], driver: DeviceDriver
) -> None:
    """Report what was found, then look until something has changed.

    Args:
        on_absence: takes why there are no GPUs, as the state and the reason.
        on_presence: takes what is found where there are some.
        driver: the one that was opened.

    Raises:
        AccessChanged: a driver has appeared, or the device files have been taken away.
    """
    if isinstance(driver, access.AbsentDriver):
        await _until_a_driver_appears(on_absence, driver.diagnosis)
    elif driver.name == "nvml":
        DEVICE_ACCESS.labels(state="Found").set(1)
        try:
            text = await asyncio.to_thread(_seen, driver)
        except DeviceError as error:
            _log.warning("GPUs: %s", error)
        else:
            on_presence(text)
            _log.info("found: %s", text)
        await _until_access_is_lost()


def _seen(driver: DeviceDriver) -> str:
    """``8 GPUs through NRI, driver 550.163.01``."""
    count, version = len(driver.gpus()), driver.version()
    mode = os.environ.get(access.ACCESS, "")
    through = f" through {mode}" if mode else ""
    return f"{count} GPUs{through}, driver {version.driver if version else 'unknown'}"


async def _until_a_driver_appears(report: Callable[[str], None], found: access.Diagnosis) -> None:
    """The reason may become another one meanwhile: a kernel driver is loaded, without a library."""
    _announce(report, found)
    while True:
        await asyncio.sleep(PERIOD_SECONDS)
        try:
            driver = await asyncio.to_thread(open_driver, "nvml")
        except NoDevices as error:
            now = await asyncio.to_thread(access.diagnose, str(error))
            if now != found:
                DEVICE_ACCESS.remove(found.state.value)
                found = now
                _announce(report, found)
            continue
        driver.close()
        raise AccessChanged("a driver has appeared on this node; starting anew with it")


def _announce(report: Callable[[str], None], found: access.Diagnosis) -> None:
    text = f"{found.state.value}: {found.text}"
    report(text)
    DEVICE_ACCESS.labels(state=found.state.value).set(1)
    _log.warning("idle, no GPU is watched: %s", text)


async def _until_access_is_lost() -> None:
    """A hook's devices are lost; those of the container's own specification never are."""
    if access.denied():
        return  # it was never let in, and NVML answers all the same: nothing to wait for
    while True:
        await asyncio.sleep(PERIOD_SECONDS)
        lost = await asyncio.to_thread(access.denied)
        if lost:
            names = ", ".join(map(str, lost))
            raise AccessChanged(
                f"AccessLost: this container may not open {names} any more (a systemctl "
                "daemon-reload does that where a hook has shown the GPUs); starting anew"
            )
