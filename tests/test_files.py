"""Files and folders are whole or not there, whatever happens while they are written."""

from __future__ import annotations

import ast
import contextlib
import os
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import damage
import pytest

from xmc_jax import files
from xmc_jax.data import texts as text_files


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("shared", [False, True])
def test_a_file_takes_its_place_at_the_end(tmp_path, shared):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with files.replacing(path, shared=shared) as file:
        file.write("né")
        file.flush()
        assert path.read_text() == "old" and len(names(tmp_path)) == 2
    assert path.read_bytes() == "né".encode() and names(tmp_path) == {"a.txt"}
    with files.replacing(path, binary=True, shared=shared) as file:
        file.write(b"\xff")
    assert path.read_bytes() == b"\xff"
    with files.replacing_path(path, shared=shared) as temporary:
        temporary.write_text("by name")
    assert path.read_text() == "by name" and names(tmp_path) == {"a.txt"}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("error", [ValueError, OSError, KeyboardInterrupt])
def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path, shared, error):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(error), files.replacing(path, shared=shared) as file:
        file.write("half")
        raise error
    assert path.read_text() == "old" and names(tmp_path) == {"a.txt"}


def test_a_file_that_cannot_be_written(tmp_path):
    with (
        pytest.raises(OSError, match=r"none/a\.txt cannot be written: No such file"),
        files.replacing(tmp_path / "none" / "a.txt"),
    ):
        pass
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"), files.replacing(tmp_path / "folder") as file:
        file.write("a file cannot take a folder's place")
    assert names(tmp_path) == {"folder"}


def test_two_writers_of_a_shared_file_do_not_meet(tmp_path):
    path = tmp_path / "a.txt"
    with files.replacing(path, shared=True) as one, files.replacing(path, shared=True) as two:
        one.write("one" * 1000)
        two.write("two" * 500)
        one.flush()
        two.flush()
        assert len(names(tmp_path)) == 2
    assert path.read_text() == "one" * 1000 and names(tmp_path) == {"a.txt"}  # the last to end


def test_json_of_what_json_does_not_know(tmp_path):
    files.write_json(tmp_path / "a.json", {"b": Path("x"), "a": memoryview(b"\1\2"), "c": "é"})
    expected = '{\n "a": [\n  1,\n  2\n ],\n "b": "x",\n "c": "\\u00e9"\n}\n'
    assert (tmp_path / "a.json").read_text() == expected
    with pytest.raises(TypeError, match="set cannot be written as JSON"):
        files.write_json(tmp_path / "a.json", {1, 2})
    assert (tmp_path / "a.json").read_text() == expected and names(tmp_path) == {"a.json"}


def test_a_folder_replaces_what_was_there(tmp_path):
    path = tmp_path / "new" / "made"
    for content in ("first", "second"):
        leftover = path.with_name("made.tmp")  # of a kill
        leftover.mkdir(parents=True)
        (leftover / "half").touch()
        with files.replacing_folder(path) as temporary:
            assert temporary == leftover and not names(temporary)
            (temporary / content).mkdir()
        assert names(path) == {content} and names(path.parent) == {"made"}
    with pytest.raises(KeyboardInterrupt), files.replacing_folder(path) as temporary:
        (temporary / "third").touch()
        raise KeyboardInterrupt
    assert names(path) == {"second"} and names(path.parent) == {"made"}


def publish(path: Path, content: str = "a", *, whole: bool = True):
    return files.publishing_folder(path, whole=lambda _: whole, advice="Do this.")


def test_a_published_folder(tmp_path):
    path = tmp_path / "cache" / "made"
    with publish(path) as temporary:
        (temporary / "one").touch()
        assert names(path.parent) == {temporary.name} and temporary.name.startswith(".made.")
    assert names(path) == {"one"} and names(path.parent) == {"made"}
    with pytest.raises(KeyboardInterrupt), publish(tmp_path / "cache" / "other") as temporary:
        raise KeyboardInterrupt
    assert names(path.parent) == {"made"}
    (tmp_path / "file").touch()
    with (
        pytest.raises(OSError, match=r"file cannot be written to \(.*\)\. Do this\."),
        publish(tmp_path / "file" / "x"),
    ):
        pass


@pytest.mark.parametrize("write", [publish, files.replacing_folder])
def test_folders_that_were_made_for_nothing_go_again(tmp_path, write):
    (tmp_path / "old").mkdir()
    with pytest.raises(KeyboardInterrupt), write(tmp_path / "old" / "new" / "deep" / "made"):
        raise KeyboardInterrupt
    assert names(tmp_path) == {"old"} and names(tmp_path / "old") == set()
    with pytest.raises(KeyboardInterrupt), write(tmp_path / "new" / "deep" / "made"):
        (tmp_path / "new" / "another's").touch()
        raise KeyboardInterrupt
    assert names(tmp_path / "new") == {"another's"}


def test_another_process_finishes_first(tmp_path):
    path = tmp_path / "made"
    with publish(path) as slow:
        (slow / "slow").touch()
        with publish(path) as fast:
            (fast / "fast").touch()
    assert names(path) == {"fast"} and names(tmp_path) == {"made"}
    with pytest.raises(OSError, match="not empty"), publish(path, whole=False) as slow:
        (slow / "slow").touch()
    assert names(path) == {"fast"} and names(tmp_path) == {"made"}


def test_leftovers_of_killed_processes(tmp_path):
    for path in (tmp_path / "a[1]", tmp_path / "a1"):  # names are no patterns
        for name, age in (("dead", 7 * 3600), ("alive", 3600)):
            leftover = tmp_path / f".{path.name}.{name}.tmp"
            leftover.mkdir() if name == "dead" else leftover.touch()
            os.utime(leftover, (time.time() - age, time.time() - age))
    with files.replacing(tmp_path / "a[1]", shared=True):
        pass
    assert names(tmp_path) == {"a[1]", ".a[1].alive.tmp", ".a1.dead.tmp", ".a1.alive.tmp"}
    (tmp_path / ".a1.dead.tmp" / "busy").touch()  # an old folder in which something is written
    files.remove_stale(tmp_path / "a1")
    assert ".a1.dead.tmp" in names(tmp_path)


def test_checksums_say_what_was_changed(tmp_path):
    (tmp_path / "b").mkdir()
    contents = {"a": b"", "b/large": bytes(range(256)) * 40_000, "b/small": b"xy"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    record = files.checksums(tmp_path)
    assert record == {name: [len(c), zlib.crc32(c)] for name, c in contents.items()}
    assert files.checksums(tmp_path, "a", "none") == {"a": [0, 0]}
    assert files.checksums(tmp_path, "b").keys() == {"b/large", "b/small"}
    assert files.damage(tmp_path, record) is None
    (tmp_path / "more").touch()
    assert files.damage(tmp_path, record) is None
    for kind in (damage.flip, damage.swap):
        kind(tmp_path / "b/large")
        sizes = {name: size for name, (size, _) in record.items()}
        assert files.damage(tmp_path, record) == "b/large: found other bytes than were written"
        assert files.damage(tmp_path, record, contents=False) is None
        assert files.damage(tmp_path, sizes) is None  # of earlier versions
        (tmp_path / "b/large").write_bytes(contents["b/large"])
    damage.cut(tmp_path / "b/small")
    for known in (record, sizes):
        found = files.damage(tmp_path, known)
        assert found == "b/small: found 1 bytes; expected 2, as written"
    damage.remove(tmp_path / "a")
    assert files.damage(tmp_path, record) == "a: found no such file; expected 0 bytes"


def test_a_record_knows_when_it_was_changed(tmp_path):
    path, value = tmp_path / "a.json", {"b": [1.5, None], "a": {"c": Path("x"), "é": float("inf")}}
    files.write_record(path, value)
    assert files.read_record(path) == {**value, "a": {"c": "x", "é": float("inf")}}
    text = path.read_text()
    for old, new in (("1.5", "1.25"), ("null", "true"), ('"b"', '"d"')):
        path.write_text(text.replace(old, new))
        with pytest.raises(ValueError, match="it was changed since"):
            files.read_record(path)
    path.write_text('{"b": 1}')  # of an earlier version
    assert files.read_record(path) == {"b": 1}
    for bad in ("", "[]", "7", "[" * 100_000, '{"a": 1'):
        path.write_text(bad)
        with pytest.raises(ValueError):
            files.read_record(path)


def test_what_is_renamed_is_on_the_disk_and_then_its_name(tmp_path, monkeypatch):
    done = []
    names_of = {}
    real_open, real_sync = os.open, os.fsync

    def opened(path, *arguments, **options):
        descriptor = real_open(path, *arguments, **options)
        names_of[descriptor] = Path(path).name
        return descriptor

    def synced(descriptor):
        done.append(names_of[descriptor])
        real_sync(descriptor)

    def renaming(real):
        def rename(source, target):
            done.append(f"to {Path(target).name}")
            real(source, target)

        return rename

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "fsync", synced)
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, renaming(getattr(os, name)))
    here = tmp_path.name
    with files.replacing(tmp_path / "a") as file:
        file.write("x")
    assert done == ["a.tmp", "to a", here]
    for kind in (files.replacing_folder, publish):
        done.clear()
        with kind(tmp_path / kind.__name__) as temporary:
            (temporary / "b").mkdir()
            (temporary / "b" / "c").write_text("x")
        assert sorted(done[:3]) == sorted(["b", "c", temporary.name])
        assert done[3:] == [f"to {kind.__name__}", here]


KILLED = """
import sys, time
from pathlib import Path
from xmc_jax import files
with getattr(files, sys.argv[1])(sys.argv[2]) as made:
    (Path(made.name) if hasattr(made, "write") else made / "part").write_text("half")
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("kind", ["replacing", "replacing_folder"])
def test_a_kill_leaves_the_old_one_and_the_next_writer_clears_up(tmp_path, kind):
    path = tmp_path / "made"
    command = [sys.executable, "-c", KILLED, kind, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGKILL)
    assert names(tmp_path) == {"made.tmp"}
    with getattr(files, kind)(path):
        pass
    assert names(tmp_path) == {"made"}


def test_the_cache_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/houses/someone")
    for value, expected in (
        ("/big/disk", "/big/disk"),
        ("~/cache", "/houses/someone/cache"),
        ("relative", "relative"),
        ("", "/houses/someone/.cache/xmc_jax"),
    ):
        monkeypatch.setenv("XMC_CACHE", value)
        assert files.cache_folder() == Path(expected)
    monkeypatch.delenv("XMC_CACHE")
    assert files.cache_folder() == Path("/houses/someone/.cache/xmc_jax")
    for name, value in (("HOME", ""), ("XMC_CACHE", "~no-such-user/x")):
        monkeypatch.setenv(name, value)
        with pytest.raises(OSError, match=r"no home folder .* XMC_CACHE to a folder"):
            files.cache_folder()
    monkeypatch.setenv("XMC_CACHE", "/big/disk")
    assert files.cache_folder() == Path("/big/disk")


def test_links_are_followed_and_rights_stay(tmp_path):
    (tmp_path / "far").mkdir()
    for name in ("there", "not_yet"):
        target, link = tmp_path / "far" / name, tmp_path / name
        link.symlink_to(target)
        if name == "there":
            target.write_text("old")
            target.chmod(0o640)
        with files.replacing(link) as file:
            file.write("new")
        assert link.is_symlink() and target.read_text() == "new"
    assert (tmp_path / "far" / "there").stat().st_mode & 0o777 == 0o640
    (tmp_path / "far" / "folder").mkdir()
    (tmp_path / "folder").symlink_to(tmp_path / "far" / "folder")
    for make in (files.replacing_folder, publish):
        with make(tmp_path / "folder") as temporary:
            (temporary / "new").touch()
        assert (tmp_path / "folder").is_symlink() and names(tmp_path / "folder") == {"new"}
        (tmp_path / "far" / "folder" / "new").unlink()
    assert names(tmp_path / "far") == {"there", "not_yet", "folder"}


def test_a_pipe_is_written_into(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    for shared in (False, True):
        with files.replacing(tmp_path / "pipe", binary=True, shared=shared) as file:
            file.write(b"some")
        assert os.read(reader, 10) == b"some" and files.is_special(tmp_path / "pipe")
    with (
        pytest.raises(files.WriteError, match=r"pipe cannot be written: Broken pipe\."),
        files.replacing(tmp_path / "pipe") as file,
    ):
        os.close(reader)
        file.write("nobody reads it")
    assert names(tmp_path) == {"pipe"}
    assert not any(map(files.is_special, (tmp_path, tmp_path / "none", files.__file__)))


FULL = """
import sys, numpy as np
from xmc_jax import files
for kind in sys.argv[2:]:
    try:
        if kind == "file":
            with files.replacing(sys.argv[1], binary=True) as file:
                file.write(bytes(1 << 17))
        elif kind == "inner":
            with files.replacing(sys.argv[1] + "2"), files.replacing(sys.argv[1]) as file:
                file.write(" " * (1 << 17))
        else:
            with files.publishing_folder(sys.argv[1], whole=bool, advice="Do this.") as made:
                np.save(made / "x.npy", np.zeros(1 << 16))
    except files.WriteError as error:
        print(error)
"""


def test_a_full_disk_is_named_with_what_to_do(small_disk):
    path = small_disk.folder / "x"
    with contextlib.suppress(OSError):
        (small_disk.folder / "rest").write_bytes(bytes(1 << 20))
    for write in (
        lambda: files.write_json(path, ["a" * 9000]),
        lambda: text_files.write_lines(path, ["a" * 9000]),
    ):
        with pytest.raises(OSError) as error:
            write()
        expected = f"{path} cannot be written: No space left on device. Free some space there."
        assert str(error.value) == expected and names(small_disk.folder) == {"rest"}


def test_a_full_disk_is_named(tmp_path):
    """A limit on the size of files stands for it."""
    path = tmp_path / "x"
    command = ["bash", "-c", 'ulimit -f 64; exec "$@"', "-", sys.executable, "-c", FULL, str(path)]
    done = subprocess.run(
        [*command, "file", "inner", "folder"], capture_output=True, text=True, check=True
    )
    file, inner, folder = done.stdout.splitlines()
    assert file == inner == f"{path} cannot be written: File too large."
    assert folder.startswith(f"{tmp_path} cannot be written: ") and folder.endswith(" Do this.")
    assert not names(tmp_path)


@pytest.mark.parametrize("jump", [10 * 365 * 86400, -10 * 365 * 86400])
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_clock_that_jumps_removes_nothing_that_is_being_written(
    tmp_path, monkeypatch, jump, kind
):
    path, now = tmp_path / "made", time.time()
    making = publish(path) if kind == "folder" else files.replacing_path(path, shared=True)
    with making as slow:
        (slow / "part" if kind == "folder" else slow).write_text("slow")
        (tmp_path / ".made.dead.tmp").touch()
        monkeypatch.setattr(time, "time", lambda: now + jump)
        files.remove_stale(path)
        assert names(tmp_path) == {slow.name}  # what nobody writes is gone
    assert (path / "part" if kind == "folder" else path).read_text() == "slow"


def test_the_module_needs_the_standard_library_alone():
    tree = ast.parse(Path(files.__file__).read_text(encoding="utf-8"))
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in imported} <= sys.stdlib_module_names
