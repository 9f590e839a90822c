"""Files and folders that are whole or not there: written beside their place, then renamed.

They are on the disk before they are renamed: after a power cut the old or the new one is there.
What was damaged since is found by its checksum (`damage`, `read_record`).

`replacing` and `replacing_folder` have one writer at a time, whose leftovers of a kill the next one
replaces. With ``shared=True``, and with `publishing_folder`, several processes may write the same
thing at once: each has a temporary name of its own, locked while it writes. Links are followed, and
a device or pipe is written into.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import json
import logging
import os
import secrets
import shutil
import stat
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

_BLOCK_BYTES = 1 << 22
_STALE_SECONDS = 6 * 3600  # frozen layers may be at one part of a store for an hour
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_UNNAMED = (*_NO_ROOM, errno.EFBIG, errno.EPIPE)


class WriteError(OSError):
    """A file or folder could not be written; the message names it."""


def cache_folder() -> Path:
    """``$XMC_CACHE``, else a folder of the user's cache: canonical data sets and token stores.

    Raises:
      OSError: it would lie in the home folder, and there is none.
    """
    given = os.environ.get("XMC_CACHE") or "~/.cache/xmc_jax"
    folder = os.path.expanduser(given)
    if given.startswith("~") and (folder.startswith("~") or not os.environ.get("HOME", "unset")):
        raise OSError(
            f"{given}: found no home folder to keep data in. Set the environment variable "
            "XMC_CACHE to a folder that can be written to."
        )
    return Path(folder)


def remedy(error: OSError) -> str:
    """What to do where something could not be written; NumPy gives a short write no number."""
    no_room = error.errno in (None, *_NO_ROOM)
    return "Free some space there" if no_room else "Make it writable"


@contextlib.contextmanager
def removing_new_parents(path: Path) -> Iterator[None]:
    """If it fails, remove the folders above a path that were not there before; they are empty."""
    new = [folder for folder in path.parents if not folder.exists()]
    try:
        yield
    except BaseException:
        for folder in new:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


@contextlib.contextmanager
def naming(path: str | os.PathLike[str], advice: str = "") -> Iterator[None]:
    """Say what was being written when the disk got full or a reader left: the system does not.

    Raises:
      WriteError: in the place of such an `OSError`.
    """
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        # NumPy gives a number of bytes, and no reason.
        if error.errno not in _UNNAMED and "written" not in str(error):
            raise
        raise _unwritten(path, error, advice) from error


def _unwritten(path: str | os.PathLike[str], error: OSError, advice: str = "") -> WriteError:
    if error.errno in _NO_ROOM and not advice:
        advice = f"{remedy(error)}."
    wrong = WriteError(f"{path} cannot be written: {error.strerror or error}. {advice}".rstrip())
    wrong.errno = error.errno
    return wrong


@contextlib.contextmanager
def replacing(
    path: str | os.PathLike[str], *, binary: bool = False, shared: bool = False
) -> Iterator[IO[Any]]:
    """Open a file under a temporary name; it takes the path's place if all goes well.

    What is no regular file (a device, a pipe) is written into.

    Raises:
      OSError: it cannot be written; nothing half-written is left.
    """
    place = contextlib.nullcontext(Path(path)) if is_special(path) else None
    with naming(path), place or replacing_path(path, shared=shared) as target:
        try:
            file = target.open("wb") if binary else target.open("w", encoding="utf-8")
        except OSError as error:
            raise _unwritten(path, error) from error
        with file:
            yield file


def is_special(path: str | os.PathLike[str]) -> bool:
    """Whether there is a device, pipe or socket: its readers hold on to it, so it must stay."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _followed(path: str | os.PathLike[str]) -> Path:
    """The end of a chain of links, so that a rename replaces the file and not the link."""
    return Path(os.path.realpath(path)) if os.path.islink(path) else Path(path)


@contextlib.contextmanager
def replacing_path(path: str | os.PathLike[str], *, shared: bool = False) -> Iterator[Path]:
    """Give the temporary name itself, for a writer that opens its files by name."""
    path = _followed(path)
    if shared:
        remove_stale(path)
    temporary = _own_name(path) if shared else path.with_name(f"{path.name}.tmp")
    lock = _locked(temporary, os.O_CREAT) if shared else contextlib.nullcontext()
    try:
        with naming(path), lock:
            yield temporary
            _sync(temporary)
        with contextlib.suppress(OSError):  # there is none yet
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
        _sync_names(path.parent)
    except BaseException:
        unlink(temporary)
        raise


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write JSON under a temporary name, then rename.

    Raises:
      OSError: the disk is full or read-only; nothing half-written is left.
    """
    with replacing(path) as file:
        file.write(json.dumps(value, indent=1, sort_keys=True, default=plain) + "\n")


def write_record(path: str | os.PathLike[str], value: Mapping[str, Any]) -> None:
    """`write_json` of an object together with the CRC-32 that `read_record` verifies.

    Raises:
      OSError: as `write_json`.
    """
    write_json(path, {**value, "crc32": content_crc32(value)})


def read_record(path: Path) -> dict[str, Any]:
    """An object as it was written; one without a CRC-32, of an earlier version, as it is.

    Raises:
      OSError: it cannot be read.
      ValueError: it is no JSON object, or it was changed since it was written.
    """
    value = read_object(path)
    if value.pop("crc32", None) not in (None, content_crc32(value)):
        raise ValueError("it was changed since it was written")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
      OSError: it cannot be read.
      ValueError: it is none.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def content_crc32(value: Mapping[str, Any]) -> int:
    """CRC-32 of what JSON keeps of an object, but for an entry ``crc32``."""
    kept = json.loads(json.dumps(value, default=plain))
    kept.pop("crc32", None)
    return zlib.crc32(json.dumps(kept, sort_keys=True).encode())


def checksums(folder: Path, *names: str) -> dict[str, list[int]]:
    """Size and CRC-32 of every file below a folder.

    Args:
      folder: where.
      names: of the files and folders in it that count; none = all.

    Returns:
      ``{name: [size, crc32]}``, names relative to the folder.

    Raises:
      OSError: a file cannot be read.
    """
    roots = [folder / name for name in names] if names else [folder]
    entries = [path for root in roots for path in (root.rglob("*") if root.is_dir() else [root])]
    paths = sorted(path for path in entries if path.is_file())
    return dict(zip((str(path.relative_to(folder)) for path in paths), _checksums(paths)))


def damage(folder: Path, record: Mapping[str, Any], *, contents: bool = True) -> str | None:
    """What is wrong with the files of a folder: "NAME: found ...; expected ..."; None = nothing.

    Args:
      folder: where.
      record: of `checksums`; an entry may be a size alone, as in earlier versions.
      contents: False compares sizes alone, which takes no time.
    """
    written = {
        name: entry if isinstance(entry, list) else [entry] for name, entry in record.items()
    }
    try:
        for name, entry in written.items():
            if not (folder / name).is_file():
                return f"{name}: found no such file; expected {entry[0]} bytes"
            size = (folder / name).stat().st_size
            if size != entry[0]:
                return f"{name}: found {size} bytes; expected {entry[0]}, as written"
        if contents:
            known = [name for name, entry in written.items() if len(entry) > 1]
            for name, entry in zip(known, _checksums([folder / name for name in known])):
                if entry != written[name]:
                    return f"{name}: found other bytes than were written"
    except OSError as error:
        return f"{error.filename}: cannot be read ({error.strerror})"
    return None


def _checksums(paths: list[Path]) -> Iterator[list[int]]:
    """Size and CRC-32 of each file; several are read at a time."""
    with ThreadPoolExecutor(4) as pool:
        yield from pool.map(_checksum, paths)


def _checksum(path: Path) -> list[int]:
    size = crc32 = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            size, crc32 = size + len(block), zlib.crc32(block, crc32)
    return [size, crc32]


def plain(value: Any) -> Any:
    """What ``json`` does not know: arrays, NumPy scalars, paths."""
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


@contextlib.contextmanager
def replacing_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a new folder beside ``path``, which takes the path's place if all goes well.

    Raises:
      OSError: it cannot be made; whatever the error, nothing half-written is left.
    """
    path = _followed(path)
    temporary = path.with_name(f"{path.name}.tmp")
    remove(temporary)  # a kill left it
    with removing_new_parents(temporary):
        try:
            temporary.mkdir(parents=True)
            yield temporary
            _sync_all(temporary)
            remove(path)
            os.rename(temporary, path)
            _sync_names(path.parent)
        except BaseException:
            remove(temporary)
            raise


@contextlib.contextmanager
def publishing_folder(
    path: str | os.PathLike[str], *, whole: Callable[[Path], bool], advice: str
) -> Iterator[Path]:
    """Give a new folder beside ``path``, which is renamed to it unless another process was first.

    Args:
      path: must not exist, or be empty, or become what is written by other processes meanwhile.
      whole: whether what another process put there is as good.
      advice: what to do where nothing can be written, for the message.

    Raises:
      OSError: it cannot be made, or the path holds something else.
    """
    path = _followed(path)
    temporary = _own_name(path)
    with removing_new_parents(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_stale(path)
            temporary.mkdir()
        except OSError as error:
            reason = f"{path.parent} cannot be written to ({error.strerror}). {advice}"
            raise OSError(reason) from error
        try:
            with naming(path.parent, advice), _locked(temporary):
                yield temporary
                _sync_all(temporary)
            try:
                os.rename(temporary, path)
            except OSError:
                if not whole(path):
                    raise
                logging.info("%s was written by another process meanwhile", path)
            _sync_names(path.parent)
        finally:
            remove(temporary)


def set_aside(path: Path, suffix: str) -> None:
    """Rename a file or folder out of the way, over what was set aside before."""
    aside = path.with_name(path.name + suffix)
    remove(aside)
    os.rename(path, aside)


def remove_stale(path: Path) -> None:
    """Clear what killed processes left of a shared file or folder; a live one's is locked.

    It is younger, too, for file systems without locks; of clocks that jump the lock knows nothing.
    """
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        try:
            times = [entry.stat().st_mtime for entry in [leftover, *leftover.glob("*")]]
        except OSError:  # renamed or removed meanwhile: it was a live one
            continue
        if abs(time.time() - max(times)) > _STALE_SECONDS and not _is_locked(leftover):
            remove(leftover)


@contextlib.contextmanager
def _locked(temporary: Path, flags: int = 0) -> Iterator[None]:
    """Hold a lock on what is being written; a kill lets go of it."""
    handle = os.open(temporary, os.O_RDONLY | flags, 0o666)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _is_locked(leftover: Path) -> bool:
    try:
        handle = os.open(leftover, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(handle)


def unlink(path: Path) -> None:
    """Remove a file if that is possible."""
    with contextlib.suppress(OSError):
        path.unlink()


def _sync_all(folder: Path) -> None:
    """Wait until a folder with all that is in it is on the disk."""
    for path in [*folder.rglob("*"), folder]:
        if path.is_dir():
            _sync_names(path)
        else:
            _sync(path)


def _sync_names(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, where the file system can say so."""
    with contextlib.suppress(OSError):
        _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _own_name(path: Path) -> Path:
    """A hidden name beside the path, which no other process and no thread has."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def remove(path: Path) -> None:
    """Remove a folder or a file; what cannot be removed makes the next step fail, and say why."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        unlink(path)
