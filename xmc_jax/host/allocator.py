"""Large arrays on a CPU without page faults: freed memory stays with the process."""

from __future__ import annotations

import ctypes

# Numbers of mallopt's parameters in glibc's malloc.h.
_TRIM_THRESHOLD = -1
_MMAP_MAX = -4
_ARENA_MAX = -8


def keep_freed_memory() -> bool:
    """Tell glibc to keep what is freed, for the next allocation, instead of giving it back.

    By default every block over 32 MB is mapped when it is allocated and unmapped when it is freed:
    XLA's buffers on a CPU come anew as zeroed pages in every step, which costs as much as the
    arithmetic of a memory-bound operation. All threads then share one arena, for a block over 64 MB
    does not fit one of a thread's own and would be mapped after all. The process holds what it once
    had until it ends, or until :func:`give_back` is called. Call it before threads are started.

    Returns:
      Whether the C library is one that can be told; with another one nothing happens.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # not glibc: musl, macOS, Windows
        return False
    return (
        bool(mallopt(_ARENA_MAX, 1))
        and bool(mallopt(_MMAP_MAX, 0))
        and bool(mallopt(_TRIM_THRESHOLD, -1))
    )


def give_back() -> None:
    """Return all free memory to the system now, the gaps between blocks in use included.

    For the border between two phases of a run: the blocks of one hardly fit those of the other.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):  # not glibc
        return
