"""Freed memory stays with the process, where the C library is glibc."""

from __future__ import annotations

import platform
import subprocess
import sys

SCRIPT = """
import resource, sys, threading
import numpy as np
from xmc_jax.host import allocator

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
told = sys.argv[1] == "keep" and allocator.keep_freed_memory()
faults(size)
again = faults(size)
allocator.give_back()
print(int(told), again, faults(size))
"""


def run(argument: str) -> list[int]:
    command = [sys.executable, "-c", SCRIPT, argument]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [int(value) for value in done.stdout.split()]


def test_blocks_are_used_again_without_page_faults_until_given_back():
    _, plain, _ = run("leave")
    told, kept, returned = run("keep")
    assert told == (platform.libc_ver()[0] == "glibc")
    if told:
        assert 4 * kept < min(plain, returned)
