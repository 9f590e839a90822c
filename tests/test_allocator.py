"""Freed memory stays with the process, where the C library is glibc."""

from __future__ import annotations

import platform
import subprocess
import sys

SCRIPT = """
import resource, sys, threading
import numpy as np
from xmc_jax import allocator

def work(size):
    for _ in range(4):
        np.ones(size, np.uint8)

def faults(size):
    "Page faults of blocks of a thread that is not the first, as XLA's are."
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    thread = threading.Thread(target=work, args=(size,))
    thread.start()
    thread.join()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

size = 96 * 2**20
first = faults(size)
told = allocator.keep_freed_memory()
faults(size)
again = faults(size)
allocator.give_back()
print(int(told), first, again, faults(size))
"""


def test_blocks_are_used_again_without_page_faults_until_given_back():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    told, before, after, returned = map(int, done.stdout.split())
    assert told == (platform.libc_ver()[0] == "glibc")
    if told:
        assert after < 100 < min(before, returned)
