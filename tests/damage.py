"""What disks and people do to files: a bit, a cut, halves swapped; each changes the content."""

from __future__ import annotations

from pathlib import Path


def flip(path: Path) -> None:
    """Flips one bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    """Cuts off the second half."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def swap(path: Path) -> None:
    """Swaps two blocks of 8 bytes that differ, such as rows; the size stays."""
    content = path.read_bytes()
    first = next(i for i in range(0, len(content) - 8, 8) if content[i : i + 8] != content[-8:])
    middle = content[first + 8 : -8]
    path.write_bytes(content[:first] + content[-8:] + middle + content[first : first + 8])


def remove(path: Path) -> None:
    """Deletes it."""
    path.unlink()


KINDS = (flip, cut, swap, remove)
