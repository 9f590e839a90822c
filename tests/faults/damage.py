"""Damage to files that are read back: it is noticed and the file named, or nothing comes of it.

python -m tests.faults.damage --cases=100 --seed=0 [--root=CHECKOUT]

A case damages one file of a stopped run, of its data set in canonical form, or of its cache. Then
the run is continued, evaluated, asked for labels, or its data prepared again. What ends well must
give what it gives without the damage. The last line is JSON: the number of cases by class.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.faults.runs import (
    FAMILIES,
    Place,
    differences,
    end_of,
    ended,
    last_step,
    write_data,
)

Rng = np.random.Generator
GOOD = ("same result", "refused", "fell back")
NOT_READ = ("tensorboard", "eval-", "points.tsv", "texts")


def one_bit(content: bytes, rng: Rng) -> bytes:
    """Another content of equal size."""
    at = int(rng.integers(len(content)))
    return content[:at] + bytes([content[at] ^ (1 << int(rng.integers(8)))]) + content[at + 1 :]


def swapped_blocks(content: bytes, rng: Rng) -> bytes:
    """The first and second half of the last three quarters change places."""
    start = len(content) // 4
    half = (len(content) - start) // 2
    parts = content[:start], content[start : start + half], content[start + half : start + 2 * half]
    return parts[0] + parts[2] + parts[1] + content[start + 2 * half :]


DAMAGE: dict[str, Callable[[bytes, Rng], bytes | None]] = {
    "deleted": lambda content, rng: None,
    "empty": lambda content, rng: b"",
    "cut": lambda content, rng: content[: len(content) // 2],
    "one bit": one_bit,
    "swapped": swapped_blocks,
    "zeros": lambda content, rng: bytes(len(content)),
    "other": lambda content, rng: b"something else\n",
}


def kinds(folder: Path) -> dict[str, list[Path]]:
    """Files below a folder that are read back, by what they are: their path without numbers."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and not any(word in name for word in NOT_READ):
            found.setdefault(re.sub(r"[0-9a-f]{16,}|\d+", "N", name), []).append(path)
    return found


class Campaign:
    """A sound place for each family; a case works on a copy of it."""

    def __init__(self, root: Path, scratch: Path, seed: int) -> None:
        """Prepare data, train half a run of each family, and do everything once."""
        self._root, self._scratch, self._seed = root, scratch, seed
        self._here = Place(root, scratch / "here")  # where a case lies: paths are in meta.json
        self._sound: dict[tuple[str, str], Any] = {}
        for family in FAMILIES:
            self._make(family)
            for what in self.commands(family):
                shutil.rmtree(self._here.folder, ignore_errors=True)
                shutil.copytree(scratch / family, self._here.folder)
                done, result = self._do(family, what)
                assert done.returncode == 0, done.stderr
                self._sound[family, what] = result

    def commands(self, family: str) -> dict[str, list[object]]:
        """What is done after the damage, by name."""
        folder = self._here.folder
        run = f"--workdir={folder / 'run'}"
        training = self._here.training(family, folder / "prepared", folder / "run")
        return {
            "train": ["train", *training],
            "evaluate": ["evaluate", run],
            "predict": ["predict", run, f"--input={folder / 'texts'}"],
            "prepare": ["prepare", f"--input={folder / 'prepared'}"],
        }

    def _make(self, family: str) -> None:
        shutil.rmtree(self._here.folder, ignore_errors=True)
        folder = self._here.folder
        folder.mkdir()
        data = write_data(folder / "points.tsv")
        (folder / "texts").write_text("red apple or old\nwild castle\n")
        made = self._here.run("prepare", f"--input={data}", f"--output={folder / 'prepared'}")
        assert made.returncode == 0, made.stderr
        process = self._here.start(*self.commands(family)["train"])
        while last_step(folder / "run") < 18 and process.poll() is None:
            time.sleep(0.002)
        process.send_signal(signal.SIGTERM)
        done = ended(process)
        assert done.returncode in (0, 143), done.stderr
        folder.rename(self._scratch / family)

    def _do(self, family: str, what: str) -> tuple[subprocess.CompletedProcess[str], Any]:
        done = self._here.run(*self.commands(family)[what])
        if done.returncode:
            return done, None
        if what == "train":
            return done, end_of(self._here.folder / "run", log=False)
        return done, {"output": done.stdout}

    def run(self, number: int) -> tuple[str, str, str]:
        """One case: what it was, its class, and what shows it."""
        rng = np.random.default_rng([self._seed, number])
        family = list(FAMILIES)[number % 2]
        what = str(rng.choice(list(self.commands(family))))
        shutil.rmtree(self._here.folder, ignore_errors=True)
        shutil.copytree(self._scratch / family, self._here.folder)
        read = kinds(self._here.folder)
        if what == "prepare":
            read = {kind: paths for kind, paths in read.items() if kind.startswith("prepared")}
        kind = str(rng.choice(sorted(read)))
        path = read[kind][int(rng.integers(len(read[kind])))]
        how = str(rng.choice(list(DAMAGE)))
        content = DAMAGE[how](path.read_bytes() or b"\0", rng)
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
        done, result = self._do(family, what)
        name = f"{family} {what}; {path.relative_to(self._here.folder)} {how}"
        return name, *self._judge(done, result, self._sound[family, what], path)

    def _judge(self, done, result: Any, sound: Any, path: Path) -> tuple[str, str]:
        last = done.stderr.strip().splitlines()[-1:]
        if "Traceback" in done.stderr:
            return "traceback", last[0][:200]
        if done.returncode not in (0, 1):
            return "exit code", f"{done.returncode} {last}"
        parts = path.relative_to(self._here.folder).parts
        is_named = any(part in done.stderr for part in (parts[-1], "/".join(parts[:3])))
        if done.returncode == 0:
            wrong = differences(result, sound)
            if not wrong:
                return "same result", ""
            if is_named and "output" in result:  # of the checkpoint before
                return "fell back", ", ".join(wrong[:4])
            return "another result", ", ".join(wrong[:4])
        if not is_named:
            return "no place", last[0][:200]
        return "refused", last[0][:200]


def campaign(root: Path, seed: int, numbers: range) -> Iterator[tuple[int, str, str, str]]:
    """Cases one after the other: number, what it was, class, what shows it."""
    scratch = Path(tempfile.mkdtemp(prefix="xmc-damage-"))
    try:
        cases = Campaign(root, scratch, seed)
        for number in numbers:
            yield number, *cases.run(number)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def main() -> None:
    """By hand."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2])
    options = parser.parse_args()
    classes: collections.Counter[str] = collections.Counter()
    for number, what, kind, shown in campaign(
        options.root.resolve(), options.seed, range(options.cases)
    ):
        classes[kind] += 1
        print(f"{number}: {what}: {kind} {shown}".rstrip(), flush=True)
    print(json.dumps({"cases": options.cases, "seed": options.seed, "classes": dict(classes)}))
    sys.exit(any(kind not in GOOD for kind in classes))


if __name__ == "__main__":
    main()
