"""Mutated inputs of `xmc_jax.prepare`, each in a process of its own that never loads JAX.

python -m tests.faults.inputs --cases=5000 --seed=0 [--first=0] [--cover] [--root=CHECKOUT]
python -m tests.faults.inputs --case=N --seed=0 [--keep=FOLDER]

A case is poor if it ends in a traceback, a signal or a message without a place, if it leaves
anything half-written, or if what was accepted is not what stands in the files. The last line is
JSON: the number of cases by class.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import importlib
import itertools
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from tests.faults import bases, mutations
from tests.faults.mutations import ACCEPTED, REFUSED, Case

CPU_SECONDS, MEMORY_BYTES = 30, 4 << 30
MOST_ERROR_LINES, MOST_ERROR_BYTES = 30, 8_000
READERS = ("xmc_jax.data.readers.formats", "xmc_jax.data.formats")  # now; in commit 6654296
REPORTS = ("xmc_jax.data.summaries.summary", "xmc_jax.data.summary")
GOOD = ("accepted", "refused")


@dataclasses.dataclass
class Outcome:
    """What a process did: exit code (below 0: a signal), output, and what it accepted."""

    code: int
    out: str
    err: str
    facts: dict[str, Any] | None


def first_module(names: tuple[str, ...]) -> Any:
    """The first of these modules that there is."""
    for name in names:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    raise ModuleNotFoundError(names)


def load_package(root: Path) -> None:
    """Import what `prepare` needs from a checkout; it must not need JAX."""
    sys.path.insert(0, str(root))
    prepare = importlib.import_module("xmc_jax.prepare")
    assert Path(prepare.__file__).is_relative_to(root), prepare.__file__
    first_module(READERS), first_module(REPORTS)
    assert "jax" not in sys.modules, "reading and preparing need no JAX"


def write(case: Case, folder: Path) -> None:
    """The files of a case."""
    for name, content in case.files.items():
        path = folder / name
        if content == bases.FOLDER:
            path.mkdir()
        elif content == bases.FIFO:
            os.mkfifo(path)
        elif content == bases.DANGLING:
            path.symlink_to(folder / "is not there")
        else:
            packed = name in case.packed
            path.write_bytes(content if packed else bases.on_disk(name, content))


def listing(folder: Path) -> dict[str, Any]:
    """Everything below a folder: kinds and times."""
    entries = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        entries[str(path.relative_to(folder))] = status.st_mode, status.st_size, status.st_mtime_ns
    return {name: entry for name, entry in entries.items() if not os.path.isdir(folder / name)} | {
        name: None for name, entry in entries.items() if os.path.isdir(folder / name)
    }


def prepare(given: Path, output: Path) -> NoReturn:
    """In a child: the binary, then what it wrote, as facts beside it."""
    module = importlib.import_module("xmc_jax.prepare")
    sys.argv = ["prepare", f"--input={given}", f"--output={output}"]
    try:
        module.console.run(module.main)
        code: Any = 0
    except SystemExit as error:
        code = error.code
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    if not code:
        dataset = first_module(READERS).load(output)
        labels = list(dataset.label_texts)
        rows = []
        for split in (dataset.train, dataset.test):
            ids = np.split(split.labels.indices, split.labels.indptr[1:-1])
            assert len(split.texts) == split.labels.shape[0]
            rows += [(text, [labels[i] for i in some]) for text, some in zip(split.texts, ids)]
        (output.parent / "facts.json").write_text(json.dumps({"rows": rows, "labels": labels}))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def in_child(scratch: Path, given: Path) -> Outcome:
    """Fork, limit, prepare, wait."""
    child = os.fork()
    if child == 0:
        try:
            for number, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(scratch / name, os.O_WRONLY | os.O_CREAT, 0o600), number)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.environ |= {"XMC_CACHE": str(scratch / "cache"), "HOME": str(scratch / "home")}
            signal.alarm(2 * CPU_SECONDS)  # it may wait, as for a pipe
            prepare(given, scratch / "prepared")
        except BaseException:
            sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
        finally:
            os._exit(99)
    _, status = os.waitpid(child, 0)
    read = lambda name: (scratch / name).read_text(errors="replace")
    facts = scratch / "facts.json"
    return Outcome(
        os.waitstatus_to_exitcode(status),
        read("out"),
        read("err"),
        json.loads(facts.read_text()) if facts.exists() else None,
    )


def plain(text: str) -> str:
    """A text without what readers may change in it."""
    return " ".join(text.replace("\ufeff", "").split())


def kept_rows(case: Case) -> dict[str, frozenset[str]]:
    """Rows that must be there where the case is accepted: all, or those that no fault touched."""
    base = case.base
    if case.all_rows:
        return dict(base.rows.values())
    if case.loose:
        return {}
    split = lambda files, name: files[name].split(b"\n") if name in files else []
    old = {name: split(base.files, name) for name in case.text_files() if name in base.files}
    new = {name: split(case.files, name) for name in old}
    lines = {name: set(rows) for name, rows in new.items()}

    def stays(name: str, line: int, *, fixed: bool) -> bool:
        if name not in new:
            return False
        row = old[name][line]
        if fixed:
            return new[name][line : line + 1] == [row]
        return row in lines[name]

    matrices = [name for name in base.files if name.endswith((".npz", "_X_Y.txt"))]
    if any(base.files[name] != case.files.get(name) for name in matrices):
        return {}
    label_stays = {label: stays(*place, fixed=True) for label, place in base.label_lines.items()}
    return {
        text: labels
        for (name, line), (text, labels) in base.rows.items()
        if stays(name, line, fixed=base.fixed) and all(label_stays.get(x, True) for x in labels)
    }


def changed_rows(case: Case, facts: dict[str, Any]) -> str:
    """What an accepted case lacks, or has too much; "" if it is consistent."""
    found: dict[str, set[str]] = {}
    for text, labels in facts["rows"]:
        found.setdefault(plain(text), set()).update(map(plain, labels))
    for text, labels in kept_rows(case).items():
        if plain(text) not in found:
            return f"lost rows: {text[:60]!r}"
        if {plain(label) for label in labels} != found[plain(text)]:
            return f"wrong labels: {text[:60]!r} has {sorted(found[plain(text)])[:4]}"
    more = {plain(label) for label in facts["labels"]} - {plain(x) for x in case.base.labels}
    if len(more) > case.more_labels:
        return f"labels from nowhere: {sorted(more)[:3]}"
    if case.all_rows and len(facts["rows"]) > len(case.base.rows):
        return f"rows from nowhere: {facts['rows'][0]}"
    return ""


def judge(case: Case, outcome: Outcome, changed: list[str], folder: Path) -> tuple[str, str]:
    """The class of an outcome, and what shows it."""
    err = outcome.err.strip()
    last = err.splitlines()[-1][:200] if err else ""
    if "Traceback (most recent call last)" in err:
        return "traceback", last
    if outcome.code < 0:
        return f"ended by {signal.Signals(-outcome.code).name}", last
    if outcome.code not in (0, 1):
        return "exit code", str(outcome.code)
    if changed:
        return "half-written", ", ".join(changed[:5])
    if case.mentions and case.mentions not in outcome.err + outcome.out:
        return "no advice", f"{case.mentions} is not named; {last}"
    if outcome.code == 0:
        if case.expect == REFUSED:
            return "accepted what is broken", ""
        assert outcome.facts is not None
        wrong = changed_rows(case, outcome.facts)
        return (wrong.partition(":")[0], wrong) if wrong else ("accepted", "")
    if case.expect == ACCEPTED:
        return "refused what is sound", last
    message = err[err.rfind("\nreading ") + 1 :]
    if len(err) > MOST_ERROR_BYTES or len(err.splitlines()) > MOST_ERROR_LINES:
        return "long message", f"{len(err)} bytes"
    if str(folder) not in message and not any(name in message for name in case.base.files):
        return "no place", last
    if case.has_line and not re.search(r"\blines? \d", message):
        return "no line", last
    return "refused", last


def run_case(case: Case, scratch: Path) -> tuple[str, str]:
    """Write, prepare, judge."""
    folder = scratch / "data"
    for name in ("data", "cache", "home"):
        (scratch / name).mkdir(parents=True)
    write(case, folder)
    before = listing(scratch)
    outcome = in_child(scratch, folder / case.base.given)
    after = listing(scratch)
    ours = {"out", "err", "facts.json"}
    if outcome.code == 0:
        ours |= {name for name in after if name.split("/")[0] == "prepared"}
    changed = [
        name
        for name in sorted(before.keys() | after.keys())
        if name not in ours and before.get(name, "-") != after.get(name, "-")
    ]
    return judge(case, outcome, changed, folder)


def make(seed: int, number: int) -> Case:
    """Case of that number."""
    rng = np.random.default_rng([seed, number])
    layouts = list(bases.LAYOUTS)
    return mutations.make_case(bases.make(layouts[number % len(layouts)], rng), rng)


def covering(seed: int, cases: int) -> list[int]:
    """The first cases, and later ones that have a layout or a mutation which none before has."""
    missing, numbers = {*bases.LAYOUTS, *mutations.MUTATIONS}, []
    for number in itertools.count():
        if number >= cases and not missing:
            return numbers
        case = make(seed, number)
        has = {case.base.layout, *(name.partition(" (")[0] for name in case.names)}
        if number < cases or has & missing:
            numbers.append(number)
        missing -= has
    raise AssertionError


def campaign(seed: int, numbers: Sequence[int]) -> Iterator[tuple[int, Case, str, str]]:
    """Runs cases one after the other; `load_package` comes first."""
    for number in numbers:
        case = make(seed, number)
        scratch = Path(tempfile.mkdtemp(prefix="xmc-case-"))
        try:
            yield number, case, *run_case(case, scratch)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def main() -> None:
    """By hand."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0, help="case to go on from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2])
    parser.add_argument("--cover", action="store_true", help="every layout and mutation, too")
    parser.add_argument("--case", type=int, help="only this one")
    parser.add_argument("--keep", type=Path, help="write the files of --case here, run nothing")
    options = parser.parse_args()
    if options.keep:
        options.keep.mkdir(parents=True)
        write(case := make(options.seed, options.case), options.keep)
        print(case.names, options.keep / case.base.given)
        return
    load_package(options.root.resolve())
    one = options.case is not None
    numbers: Sequence[int] = [options.case] if one else range(options.first, options.cases)
    if options.cover and not one:
        numbers = covering(options.seed, options.cases)
    classes: collections.Counter[str] = collections.Counter()
    started = time.monotonic()
    for number, case, kind, shown in campaign(options.seed, numbers):
        classes[kind] += 1
        if kind not in GOOD or one:
            print(f"{number}: {case.base.layout}; {', '.join(case.names)}: {kind}: {shown}")
            sys.stdout.flush()
    seconds = round(time.monotonic() - started)
    counted = dict(sorted(classes.items()))
    row = {"cases": len(numbers), "seed": options.seed, "seconds": seconds, "classes": counted}
    print(json.dumps(row))
    sys.exit(any(kind not in GOOD for kind in classes))


if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    main()
