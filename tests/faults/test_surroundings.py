"""Streams that are closed or full, locales, another user: a plain word, never a traceback."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

pytestmark = pytest.mark.campaign
STREAMS = {  # what a shell makes of them; whether standard output is lost
    "all are there": ("", False),
    "standard output is closed": (">&-", True),
    "standard output is full": (">{devices}/full", True),
    "one line is read": ("| head -1", True),
    "nothing is read": ("| true", True),
    "standard error is closed": ("2>&-", False),
    "standard error is full": ("2>{devices}/full", False),
    "standard input is closed": ("<&-", False),
    "all are closed": ("<&- >&- 2>&-", True),
}
LOCALES = [
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    {"LC_ALL": "xx_XX.UTF-99"},
    {"PYTHONIOENCODING": "ascii"},
    {"PYTHONIOENCODING": "utf-16"},
]
NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
TEXT = "röd 苹果 🍎"


def in_shell(command: list[object], streams: str, **environment: str):
    """A binary behind a shell's redirections; the code is the binary's."""
    line = f"{shlex.join(map(str, command))} {streams}; exit ${{PIPESTATUS[0]}}"
    env = {**os.environ, "PYTHONPATH": str(tiny.ROOT), **environment}
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, cwd=tiny.ROOT, env=env, timeout=240
    )


def binary(module: str, *arguments: object) -> list[object]:
    return [sys.executable, "-m", f"xmc_jax.{module}", *arguments]


@pytest.fixture(scope="module")
def commands(own_data, trained, tmp_path_factory) -> dict[str, list[object]]:
    """Each binary with work for a moment."""
    texts = tmp_path_factory.mktemp("texts") / "texts.txt"
    texts.write_text(f"{TEXT}\n" * 3, encoding="utf-8")
    data = tmp_path_factory.mktemp("data") / "points.tsv"
    lines = own_data.read_text(encoding="utf-8").replace("red", "röd").splitlines(keepends=True)
    data.write_text("".join(lines[:60]), encoding="utf-8")
    return {
        "prepare": binary("prepare", f"--input={data}"),
        "predict": binary("predict", f"--workdir={trained}", f"--input={texts}"),
        "evaluate": binary("evaluate", f"--workdir={trained}"),
        "inspect_labels": binary("inspect_labels", f"--workdir={trained}"),
    }


def assert_plain(done: subprocess.CompletedProcess[bytes], *, lost: bool) -> None:
    err = done.stderr.decode("utf-8", "replace")
    for word in ("Traceback", "Exception ignored", "Error:", "Fatal Python"):
        assert word not in err, err
    # A shell's code of a closed pipe is 128 + SIGPIPE.
    assert done.returncode in ((0, 1, 141) if lost else (0,)), (done.returncode, err)


@pytest.mark.slow
@pytest.mark.parametrize("module", ["prepare", "predict", "evaluate"])
@pytest.mark.parametrize("streams", STREAMS)
def test_streams(module, streams, commands, devices):
    redirections, lost = STREAMS[streams]
    done = in_shell(commands[module], redirections.format(devices=devices))
    assert_plain(done, lost=lost)
    if not lost:
        assert done.stdout
    if streams in ("standard output is closed", "standard output is full"):
        assert done.returncode == 1 and b"standard output" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("module", ["prepare", "predict", "evaluate"])
@pytest.mark.parametrize("locale", LOCALES, ids=str)
def test_locales(module, locale, commands):
    done = in_shell(commands[module], "", **locale)
    assert_plain(done, lost=False)
    if module == "predict":
        rows = [json.loads(line) for line in done.stdout.decode("utf-8").splitlines()]
        assert [row["text"] for row in rows] == [TEXT] * 3


def readable(folder: Path) -> None:
    """Let others read what is there, whatever the umask."""
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def as_nobody(*command: object) -> subprocess.CompletedProcess[str]:
    """A binary of another user, who has no home."""
    environment = {name: value for name, value in os.environ.items() if name != "HOME"}
    environment["XMC_CACHE"] = "/proc/no cache here"
    environment["JAX_ENABLE_COMPILATION_CACHE"] = "0"
    return subprocess.run(
        [*NOBODY, *map(str, command)],
        capture_output=True,
        text=True,
        cwd=tiny.ROOT,
        env=environment,
        timeout=240,
    )


@pytest.fixture
def open_place(tmp_path):
    """A folder that others may pass, where this process may become another user."""
    if os.getuid() or not shutil.which("setpriv"):
        pytest.skip("to become another user takes root and setpriv")
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    if as_nobody(sys.executable, "-c", "import absl, xmc_jax").returncode:
        pytest.skip("another user cannot read this environment")
    return tmp_path


def test_another_user_prepares(open_place):
    data = tiny.write_tsv(open_place / "points.tsv", rows=40)
    readable(open_place)
    secret = tiny.write_tsv(open_place / "secret.tsv", rows=40)
    secret.chmod(0o600)
    told = as_nobody(*binary("prepare", f"--input={secret}"))
    assert told.returncode == 1 and "Traceback" not in told.stderr and str(secret) in told.stderr
    told = as_nobody(*binary("prepare", f"--input={data}", f"--output={open_place / 'out'}"))
    assert told.returncode == 1 and "Traceback" not in told.stderr
    assert str(open_place) in told.stderr and sorted(p.name for p in open_place.iterdir()) == [
        "points.tsv",
        "secret.tsv",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("module", ["train", "evaluate", "predict"])
def test_another_user_opens_a_run(module, open_place, own_data, trained):
    """What may be read is used; what would be written there is told."""
    run = shutil.copytree(trained, open_place / "run")
    data = shutil.copy(own_data, open_place / "points.tsv")
    (open_place / "texts").write_text("red apple\n")
    readable(open_place)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    arguments = {
        "train": [f"--config=unidec:{data}", *tiny.flags(), f"--workdir={run}"],
        "evaluate": [f"--workdir={run}", f"--data={data}"],
        "predict": [f"--workdir={run}", f"--input={open_place / 'texts'}"],
    }
    done = as_nobody(*binary(module, *arguments[module]))
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == (0 if module == "predict" else 1), done.stderr
    if module != "predict":  # the tokens' cache, or the work directory
        assert "cannot be written" in done.stderr or "Permission denied" in done.stderr
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    unreadable: Path = run / "labels"
    unreadable.chmod(0o600)
    told = as_nobody(*binary("predict", f"--workdir={run}", f"--input={open_place / 'texts'}"))
    assert told.returncode == 1 and "Traceback" not in told.stderr
    assert str(unreadable) in told.stderr
