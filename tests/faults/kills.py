"""SIGKILL at any moment: what is started again must end as if nothing had happened, bit for bit.

python -m tests.faults.kills --runs=100 --seed=0 [--root=CHECKOUT]

A run is killed once or twice: before the n-th operation on files (anywhere, in a save, in a
refresh, in the cache that it shares with another run), at a time, or while `prepare` writes. The
last line is JSON: the number of runs by class.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tests.faults.runs import FAMILIES, Place, differences, end_of, ended, write_data

# Runs in the killed process alone: counts what touches files, and ends it before the n-th of those
# whose path holds a word.
SITE = """
import atexit, builtins, io, json, os, signal
word, last, below = os.environ["KILL_IN"], int(os.environ["KILL_AT"]), os.environ["KILL_BELOW"]
WORDS, seen = ("", "/checkpoints/", "/refresh/", "/cache/"), {}
def counted(function, is_change=lambda *a, **k: True):
    def call(path, *arguments, **options):
        name = os.path.abspath(path) if isinstance(path, (str, os.PathLike)) else ""
        if name.startswith(below) and is_change(*arguments, **options):
            for each in WORDS:
                if each in name + "/":
                    seen[each] = seen.get(each, 0) + 1
            if last and seen.get(word) == last:
                os.kill(os.getpid(), signal.SIGKILL)
        return function(path, *arguments, **options)
    return call
writes = lambda mode="r", *a, **k: any(letter in mode for letter in "wax+")
for name in ("rename", "replace", "mkdir", "unlink", "remove", "rmdir"):
    setattr(os, name, counted(getattr(os, name)))
builtins.open = io.open = counted(builtins.open, writes)
keep = builtins.open
atexit.register(lambda: keep(os.environ["KILL_COUNT"], "w").write(json.dumps(seen)))
"""
MOMENTS = {  # how a run is killed: the word in the paths; None = at a time
    "by operation": "",
    "at a save": "/checkpoints/",
    "at a refresh": "/refresh/",
    "by time": None,
    "with a shared cache": "/cache/",
    "at a preparation": "",
}
GOOD = ("same end", "not killed")


class Campaign:
    """Undisturbed runs, and killed ones that are compared with them."""

    def __init__(self, root: Path, scratch: Path, seed: int) -> None:
        """Write the data; what is compared with is made when it is first needed."""
        self._seed, self._scratch = seed, scratch
        self._place = Place(root, scratch / "whole")
        self._place.folder.mkdir()
        self._data = write_data(scratch / "points.tsv")
        self._long = write_data(scratch / "long.tsv", words=6_000)  # so that its copy is cached
        self._site = scratch / "site"
        self._site.mkdir()
        (self._site / "sitecustomize.py").write_text(SITE)
        self._whole = functools.cache(self._undisturbed)
        self._prepared = functools.cache(self._undisturbed_preparation)

    def _undisturbed_preparation(self) -> tuple[str, dict[str, int], float]:
        started = time.monotonic()
        done = ended(self._started("prepare", *self._preparing(self._place), at=0))
        assert done.returncode == 0, done.stderr
        report = done.stdout.replace(str(self._place.folder), "")
        return report, self._counts(), time.monotonic() - started

    def _undisturbed(self, family: str, data: Path) -> tuple[dict, dict[str, int], float]:
        workdir = self._place.folder / f"{family}-{data.stem}"
        shutil.rmtree(self._place.folder / "cache", ignore_errors=True)
        started = time.monotonic()
        done = ended(self._started("train", *self._place.training(family, data, workdir), at=0))
        assert done.returncode == 0, done.stderr
        return end_of(workdir), self._counts(), time.monotonic() - started

    def _preparing(self, place: Place) -> list[str]:
        return [f"--input={self._long}", f"--output={place.folder / 'prepared'}"]

    def _counts(self) -> dict[str, int]:
        return json.loads((self._scratch / "count.json").read_text())

    def _started(self, module: str, *arguments: str, at: int, word: str = "", place=None):
        place = place or self._place
        return place.start(
            module,
            *arguments,
            PYTHONPATH=f"{self._site}:{place.root}",
            KILL_IN=word,
            KILL_AT=str(at),
            KILL_BELOW=str(place.folder),
            KILL_COUNT=str(self._scratch / "count.json"),
        )

    def run(self, number: int) -> tuple[str, str, str]:
        """One run: what it was, its class, and what shows it."""
        rng = np.random.default_rng([self._seed, number])
        families = list(FAMILIES)
        family = families[number % len(families)]
        moment = list(MOMENTS)[number // len(families) % len(MOMENTS)]
        place = Place(self._place.root, self._scratch / f"run-{number}")
        place.folder.mkdir()
        try:
            if moment == "at a preparation":
                return f"prepare {moment}", *self._prepare(place, rng)
            return f"{family} {moment}", *self._train(place, family, moment, rng)
        finally:
            shutil.rmtree(place.folder, ignore_errors=True)

    def _killed(
        self,
        place: Place,
        command: list[str],
        word: str | None,
        counts: dict[str, int],
        seconds: float,
        rng: np.random.Generator,
    ) -> subprocess.CompletedProcess[str]:
        """Starts a command and kills it, unless it ends before that."""
        most = counts.get(word or "", 0)
        at = int(rng.integers(1, most + 1)) if word is not None and most else 0
        process = self._started(*command, at=at, word=word or "", place=place)
        if word is None:
            deadline = time.monotonic() + rng.uniform(0.1, 0.8) * seconds
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            process.kill()
        return ended(process)

    def _prepare(self, place: Place, rng: np.random.Generator) -> tuple[str, str]:
        expected, counts, seconds = self._prepared()
        command = ["prepare", *self._preparing(place)]
        word = "" if rng.random() < 0.7 else None
        killed = self._killed(place, command, word, counts, seconds, rng)
        left = place.folder / "prepared"
        if left.exists() and not (left / "dataset.json").exists():
            return "half-written", f"{sorted(path.name for path in left.iterdir())}"
        done = place.run(*command)
        if "Traceback" in done.stderr or done.returncode:
            return "not started again", done.stderr[-300:]
        if done.stdout.replace(str(place.folder), "") != expected:
            return "another end", "the report differs"
        return ("same end" if killed.returncode == -signal.SIGKILL else "not killed"), ""

    def _train(self, place: Place, family: str, moment: str, rng) -> tuple[str, str]:
        shared = moment == "with a shared cache"
        data = self._long if shared else self._data
        expected, counts, seconds = self._whole(family, data)
        workdir, word = place.folder / "run", MOMENTS[moment]
        command = ["train", *place.training(family, data, workdir)]
        others = []
        if shared:
            other = place.folder / "other"
            others = [(place.start("train", *place.training(family, data, other)), other)]
        was_killed = False
        for _ in range(int(rng.integers(1, 3))):
            killed = self._killed(place, command, word, counts, seconds, rng)
            was_killed |= killed.returncode == -signal.SIGKILL
            if killed.returncode not in (0, -signal.SIGKILL):
                return "ended by itself", killed.stderr[-300:]
        if rng.random() < 0.25:
            (place.folder / "texts").write_text("red apple\n")
            told = place.run("predict", f"--workdir={workdir}", f"--input={place.folder}/texts")
            if "Traceback" in told.stderr:
                return "traceback of predict", told.stderr[-300:]
        again = place.start(*command)
        for process, folder in [*others, (again, workdir)]:
            done = ended(process)
            if "Traceback" in done.stderr or done.returncode:
                return "not started again", done.stderr[-300:]
            if wrong := differences(end_of(folder), expected):
                return "another end", ", ".join(wrong[:5])
            left = [*folder.rglob("*.tmp"), *folder.rglob(".unfinished")]
            if left:
                return "leftovers", f"{left[:3]}"
        return ("same end" if was_killed else "not killed"), ""


def campaign(root: Path, seed: int, numbers: range) -> Iterator[tuple[int, str, str, str]]:
    """Runs one after the other: number, what it was, class, what shows it."""
    scratch = Path(tempfile.mkdtemp(prefix="xmc-kills-"))
    try:
        runs = Campaign(root, scratch, seed)
        for number in numbers:
            yield number, *runs.run(number)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def main() -> None:
    """By hand."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2])
    options = parser.parse_args()
    classes: collections.Counter[str] = collections.Counter()
    numbers = range(options.first, options.first + options.runs)
    for number, what, kind, shown in campaign(options.root.resolve(), options.seed, numbers):
        classes[kind] += 1
        print(f"{number}: {what}: {kind} {shown}".rstrip(), flush=True)
    print(json.dumps({"runs": len(numbers), "seed": options.seed, "classes": dict(classes)}))
    sys.exit(any(kind not in GOOD for kind in classes))


if __name__ == "__main__":
    main()
