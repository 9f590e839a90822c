"""A minute of the campaigns; thousands of cases are for a person to start (see each module)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.faults import bases, damage, inputs, mutations
from xmc_jax.data.readers import formats

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def campaign(module: str, *arguments: str) -> tuple[list[str], dict]:
    """A campaign in a process of its own, which forks or kills: its cases, and its last line."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.faults.{module}", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    *lines, last = done.stdout.splitlines() or [done.stderr]
    assert last.startswith("{"), done.stdout + done.stderr
    return lines, json.loads(last)


def test_inputs():
    """Over every layout and every mutation."""
    lines, row = campaign("inputs", "--cases=80", "--cover", "--seed=1")
    assert row["classes"].keys() <= set(inputs.GOOD), lines
    assert min(row["classes"][kind] for kind in inputs.GOOD) > 20  # the campaign is not idle


@pytest.mark.parametrize("number", [2, 10], ids=["at a save", "at a preparation"])
def test_kills(number):
    lines, row = campaign("kills", f"--first={number}", "--runs=1", "--seed=4")
    assert row["classes"] == {"same end": 1}, lines


def damaged(folder: Path, do: Callable[[], object], named: Callable[[], str]) -> Counter[str]:
    """Damages a file of each kind below a folder, one after the other, and does something.

    Args:
      folder: where.
      do: what reads the files.
      named: what it has logged since the last call.

    Returns:
      How often it was refused with the file's name, came to the same end, or fell back.
    """
    sound, seen, rng = do(), Counter(), np.random.default_rng(0)
    for number, paths in enumerate(damage.kinds(folder).values()):
        path = paths[int(rng.integers(len(paths)))]
        content = path.read_bytes()
        how = list(damage.DAMAGE)[number % len(damage.DAMAGE)]
        changed = damage.DAMAGE[how](content, rng)
        path.unlink() if changed is None else path.write_bytes(changed)
        named()
        try:
            same = do() == sound
        except (ValueError, OSError) as error:
            assert path.name in f"{error} {named()}", (path, how, error)
            seen["refused"] += 1
        else:
            assert same or path.name in named(), (path, how)
            seen["same" if same else "fell back"] += 1
        path.write_bytes(content)
    return seen


def test_damage_of_each_kind_of_file_of_a_run(trained, tmp_path, caplog):
    from xmc_jax import predictor  # here, for it loads JAX

    folder = Path(shutil.copytree(trained, tmp_path / "run"))
    predict = lambda: predictor.load(folder).predict(["red apple", "old castle"], k=3)
    seen = damaged(folder, predict, lambda: take(caplog))
    assert seen["refused"] >= 3 and seen["same"] >= 5 and seen["fell back"] >= 1, seen


def test_damage_of_each_kind_of_file_of_a_data_set(own_data, tmp_path, caplog):
    folder = tmp_path / "prepared"
    formats.save(formats.load(own_data), folder)
    read = lambda: formats.load(folder).digest
    assert damaged(folder, read, lambda: take(caplog)).keys() == {"refused"}


def take(caplog) -> str:
    """What was logged, which is forgotten."""
    text = caplog.text
    caplog.clear()
    return text


def test_bases_are_read_as_they_are(tmp_path):
    """Without a mutation each layout is accepted, whole; else the judge would prove nothing."""
    command = "import sys; from tests.faults.test_campaign import sound; sound(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", command, str(tmp_path)], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr


def sound(scratch: str) -> None:
    """Every layout as it is made."""
    inputs.load_package(ROOT)
    for number, layout in enumerate(bases.LAYOUTS):
        base = bases.make(layout, np.random.default_rng(number))
        case = mutations.Case(
            base, dict(base.files), expect=mutations.ACCEPTED, all_rows=True, more_labels=0
        )
        found = inputs.run_case(case, Path(scratch) / str(number))
        assert found == ("accepted", ""), (layout, found)


def outcome(code: int, err: str = "", facts: dict | None = None) -> inputs.Outcome:
    return inputs.Outcome(code, "", err, facts)


def test_the_judge_sees_what_is_poor():
    base = bases.make("tsv", np.random.default_rng(0))
    case = mutations.Case(base, dict(base.files), ["none"], all_rows=True, more_labels=0)
    folder = Path("/data")
    rows = [(text, sorted(labels)) for text, labels in base.rows.values()]
    facts = {"rows": rows, "labels": sorted(base.labels)}
    place = f"{folder}/points.tsv, line 3: found nothing"

    def judged(code: int, err: str = "", given=None, changed=(), **changes) -> str:
        changed_case = mutations.dataclasses.replace(case, **changes)
        return inputs.judge(changed_case, outcome(code, err, given), list(changed), folder)[0]

    assert judged(0, given=facts) == "accepted"
    assert judged(1, place) == judged(1, place, has_line=True) == "refused"
    assert judged(1, "Traceback (most recent call last):\n ValueError") == "traceback"
    assert judged(-9) == "ended by SIGKILL"
    assert judged(3) == "exit code"
    assert judged(1, place, changed=["prepared/train.txt"]) == "half-written"
    assert judged(1, "something is wrong") == "no place"
    assert judged(1, f"{folder}/points.tsv: found nothing", has_line=True) == "no line"
    assert judged(1, place + "\n." * 99) == "long message"
    assert judged(1, place, expect=mutations.ACCEPTED) == "refused what is sound"
    assert judged(0, given=facts, expect=mutations.REFUSED) == "accepted what is broken"
    assert judged(1, place, mentions="--separator") == "no advice"
    assert judged(0, given={**facts, "rows": rows[1:]}) == "lost rows"
    assert judged(0, given={**facts, "rows": [(rows[0][0], ["x"]), *rows[1:]]}) == "wrong labels"
    assert judged(0, given={**facts, "labels": ["new"]}) == "labels from nowhere"
    assert judged(0, given={**facts, "rows": [("new", []), *rows]}) == "rows from nowhere"


def test_cases_are_the_same_at_every_start():
    for number in range(40):
        one, two = inputs.make(5, number), inputs.make(5, number)
        assert one.names == two.names and one.files == two.files
