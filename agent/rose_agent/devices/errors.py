"""Exceptions of the device drivers.

DeviceError
├── NoDevices      the driver cannot work on this machine at all
├── UnknownGpu     no GPU with that UUID here
├── QueryFailed    the driver could not answer now; what was asked is unknown
└── MpsError       the MPS control daemon does not answer, or refuses
"""


class DeviceError(Exception):
    """Base of everything the device drivers raise."""


class NoDevices(DeviceError):
    """The driver cannot work on this machine at all; says why."""


class UnknownGpu(DeviceError):
    """No GPU with that UUID on this node."""


class MpsError(DeviceError):
    """The MPS control daemon does not answer, or refuses; says what it said."""


class QueryFailed(DeviceError):
    """The driver could not answer now; what was asked is unknown."""
