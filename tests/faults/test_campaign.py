"""Two minutes of the campaigns; thousands of cases are for a person to start (see each module)."""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.faults import bases, damage, inputs, kills, mutations

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.campaign]


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
    lines, row = campaign("inputs", "--cases=340", "--seed=1")
    assert row["classes"].keys() <= set(inputs.GOOD), lines
    assert min(row["classes"][kind] for kind in inputs.GOOD) > 60  # the campaign is not idle


def test_kills():
    lines, row = campaign("kills", "--runs=6", "--seed=1")
    assert row["classes"].keys() <= set(kills.GOOD), lines
    assert row["classes"]["same end"] >= 3


def test_damage():
    lines, row = campaign("damage", "--cases=8", "--seed=1")
    assert row["classes"].keys() <= set(damage.GOOD), lines


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


def test_every_mutation_is_tried():
    """In the thousands that are run by hand; one that never applies would be no test."""
    seen = collections.Counter(
        name.partition(" (")[0] for number in range(2000) for name in inputs.make(0, number).names
    )
    assert seen.keys() == mutations.MUTATIONS.keys()
