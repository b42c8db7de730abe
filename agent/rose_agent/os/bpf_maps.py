"""Maps of BPF programs, by the kernel's own calls: what is handed a map needs no library for it.

Since Linux 5.19 the holder of a map's descriptor may use it without a capability. Next step:
``rose_agent.tap.kernel_counts`` keeps streams in one.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterator

_libc = ctypes.CDLL(None, use_errno=True)
CALLS = {"x86_64": 321, "aarch64": 280}
"""Numbers of the system call, by machine."""
_LOOKUP, _UPDATE, _TAKE, _BATCH = 1, 2, 21, 24
COMMANDS = frozenset({_LOOKUP, _UPDATE, _TAKE, _BATCH})
"""What is done with a map here, for a filter of system calls that allows nothing else."""
_ELEMENT = struct.Struct("=IIQQQ")
_MANY = struct.Struct("=QQQQIIQQ")
_COUNT_AT = 32  # offset of the number of entries in ``_MANY``


def call(command: int, attributes: ctypes.Array[ctypes.c_char]) -> None:
    """The system call; what it answers it writes into ``attributes``.

    Raises:
        OSError: the kernel refuses, or the machine is unknown.
    """
    number = CALLS.get(platform.machine(), -1)
    if _libc.syscall(number, command, attributes, len(attributes)):
        error = ctypes.get_errno()
        raise OSError(error, f"bpf: {os.strerror(error)}")


class HashMap:
    """A hash map; owns its descriptor.

    Args:
        descriptor: of the map.
        key: bytes of a key.
        value: bytes of a value.
        most: entries it has room for.
    """

    def __init__(self, descriptor: int, key: int, value: int, most: int) -> None:
        self._descriptor = descriptor
        self._key = ctypes.create_string_buffer(key)
        self._value = ctypes.create_string_buffer(value)
        self._most = most
        self._keys = ctypes.create_string_buffer(key * most)
        self._values = ctypes.create_string_buffer(value * most)
        self._position = ctypes.create_string_buffer(8)
        self._one_key, self._one_value = struct.Struct(f"={key}s"), struct.Struct(f"={value}s")

    def close(self) -> None:
        """Give the map back."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def get(self, key: bytes) -> bytes | None:
        """A value; None where there is none.

        Raises:
            OSError: the kernel does not let this process.
        """
        return self._value.raw if self._do(_LOOKUP, key) else None

    def take(self, key: bytes) -> bytes | None:
        """Remove an entry and return what it was at that moment; None where there is none.

        Raises:
            OSError: as ``get``.
        """
        return self._value.raw if self._do(_TAKE, key) else None

    def put(self, key: bytes, value: bytes) -> bool:
        """Make or replace an entry; False where the map is full, or the kernel out of memory.

        Raises:
            OSError: as ``get``.
        """
        self._value.raw = value
        return self._do(_UPDATE, key)

    def all(self) -> Iterator[tuple[bytes, bytes]]:
        """Every entry, key and value, by one call.

        Raises:
            OSError: as ``get``.
        """
        found = self._look_up_all()
        keys, values = memoryview(self._keys), memoryview(self._values)
        for (key,), (value,) in zip(
            self._one_key.iter_unpack(keys[: found * len(self._key)]),
            self._one_value.iter_unpack(values[: found * len(self._value)]),
            strict=True,
        ):
            yield key, value

    def values(self) -> bytes:
        """Every value, one behind the other, by one call.

        Raises:
            OSError: as ``get``.
        """
        return ctypes.string_at(self._values, self._look_up_all() * len(self._value))

    def _look_up_all(self) -> int:
        """Fill both buffers; how many entries there are."""
        attributes = ctypes.create_string_buffer(
            _MANY.pack(
                *(0, ctypes.addressof(self._position)),
                *(ctypes.addressof(self._keys), ctypes.addressof(self._values)),
                *(self._most, self._descriptor, 0, 0),
            ),
            _MANY.size,
        )
        _ask(_BATCH, attributes)
        (found,) = struct.unpack_from("=I", attributes, _COUNT_AT)
        return int(found)

    def _do(self, command: int, key: bytes) -> bool:
        self._key.raw = key
        attributes = ctypes.create_string_buffer(
            _ELEMENT.pack(
                *(self._descriptor, 0),
                *(ctypes.addressof(self._key), ctypes.addressof(self._value), 0),
            ),
            _ELEMENT.size,
        )
        return _ask(command, attributes)


def _ask(command: int, attributes: ctypes.Array[ctypes.c_char]) -> bool:
    try:
        call(command, attributes)
    except OSError as error:
        # No such entry (or, of a batch: no more), no room, none for the moment: the kernel makes
        # entries in a context in which it cannot wait for memory.
        if error.errno in {errno.ENOENT, errno.E2BIG, errno.ENOMEM}:
            return False
        raise
    return True
