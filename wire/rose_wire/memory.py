"""Keeps freed memory in a process that moves large buffers.

glibc gives freed buffers of this size back to the kernel at once, which then clears every page of
the next one: for a stream of weights that costs more than reading and sending them. Processes that
serve or bring weights call ``keep_freed`` when they start.
"""

from __future__ import annotations

import ctypes

# malloc.h
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3

MAPPED_BYTES = 32 << 20
"""Larger buffers still come from the kernel and go back to it."""


def keep_freed(most_bytes: int) -> bool:
    """Keep up to about this much freed memory per heap for the next buffers.

    Returns:
        Whether this C library knows how; without it everything works, slower.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all(
        mallopt(parameter, value) == 1
        for parameter, value in ((_TRIM_THRESHOLD, most_bytes), (_MMAP_THRESHOLD, MAPPED_BYTES))
    )
