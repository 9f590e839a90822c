"""The ledger's rows and tables, the scripts' flags, and statistics on the bundled data."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from ledger_rows import made

from experiments import (
    figure_gandalf_share,
    ledger,
    pool_statistics,
    readme,
    synthetic,
    tables,
)
from experiments.ledger import FRUGAL, Published, Row, Table
from experiments.table_gandalf import TABLE as GANDALF
from experiments.table_hard_negatives import TABLE as HARD_NEGATIVES
from experiments.table_losses import TABLE as LOSSES
from experiments.table_systems import TABLE as SYSTEMS
from xmc_jax.data.readers import formats
from xmc_jax.runs import launch

SCRIPTS = [
    "table_hard_negatives",
    "table_losses",
    "table_batching",
    "table_filter_pairs",
    "pool_statistics",
    "scale_amazontitles13m",
    "table_systems",
    "table_gandalf",
    "figure_gandalf_bins",
    "figure_gandalf_share",
    "table_predictions",
    "table_label_texts",
]
WATCHED = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
OF_GANDALF = (SYSTEMS, GANDALF, figure_gandalf_share.TABLE)
MASKED = Row("masked", {"mask_filter_pairs": True})
OPEN = Row("open", {"mask_filter_pairs": False}, (Published("X", "table 9", {"concat": [1] * 6}),))
TABLE = Table("table_x", "Title", (MASKED, OPEN), heads=("concat", "de"))


def test_rows_are_read_as_written(tmp_path):
    path = tmp_path / "ledger.jsonl"
    assert ledger.read(path) == []
    for row in (made(MASKED, 0, 1.0), made(OPEN, 0, 2.0)):
        ledger.append(row, path)
    rows = ledger.read(path)
    assert [row["metrics"]["concat"]["P@1"] for row in rows] == [1.0, 2.0]
    assert all(row["date"] and row["device"] == "D" and row["commit"] == "c" for row in rows)
    path.write_text(path.read_text() + "{broken\n")
    with pytest.raises(ValueError, match=r"ledger.jsonl, line 3: not JSON"):
        ledger.read(path)


def test_a_run_is_there_by_its_configuration():
    rows = [made(MASKED, 0, 1.0), made(OPEN, 0, 2.0), made(MASKED, 1, 3.0)]

    def found(row, seed, dataset="wordnet-mini"):
        config = ledger.configuration(dataset, row, seed)
        there = ledger.find(rows, dataset, config)
        return there and there["metrics"]["concat"]["P@1"]

    assert found(MASKED, 0) == 1.0 and found(OPEN, 0) == 2.0 and found(MASKED, 1) == 3.0
    assert found(OPEN, 1) is None and found(MASKED, 0, "wordnettitles") is None
    # The row of all defaults is shared by tables that call it by other names.
    assert found(Row("default", {}), 0) == 1.0
    rows.append(made(MASKED, 0, 4.0))
    assert found(MASKED, 0) == 4.0  # the newest counts
    rows[:] = [made(MASKED, 0, 5.0, beta=17)]
    assert found(MASKED, 0) is None  # a default has changed since
    rows[:] = [made(MASKED, 0, 6.0, dropped_field=1)]
    assert found(MASKED, 0) == 6.0
    del rows[0]["config"]["beta"]  # made before that field was added
    assert found(MASKED, 0) == 6.0


def test_where_the_data_lies_does_not_matter():
    config = ledger.configuration("wordnet-mini", MASKED, 3)
    assert config.seed == 3 and "seed" not in ledger.compared(config)
    there = made(MASKED, 3, 1.0)
    config.data = "somewhere/else"
    assert ledger.find([there], "wordnet-mini", config) is there


def test_an_override_must_name_a_field():
    with pytest.raises(KeyError, match=r"no field de\.temprature"):
        ledger.configuration("wordnet-mini", Row("x", {"de.temprature": 1.0}), 0)


def test_table_shows_mean_and_deviation():
    rows = [made(MASKED, 0, 40.0), made(MASKED, 1, 43.0)]
    text = readme.table_of_runs(TABLE, ["wordnet-mini"], rows)
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    lines, settings = lines[:5], lines[5:]
    assert all(line.count("|") == lines[0].count("|") for line in lines)
    masked, missing, published = lines[2:]
    deviation = statistics.stdev([40.0, 43.0])
    assert masked.startswith(f"| wordnet-mini | masked | concat | 41.50 ±{deviation:.2f} |")
    assert masked.endswith(
        "| 2.50 | 60 | 0, 1 | D: c |"
    )  # no line for the head that was not measured
    assert "| open | | not run |" in missing
    assert published.startswith("| X | open | concat | 1.00 |") and "table 9" in published
    assert settings == [
        "| row | settings |",
        "| --- | --- |",
        "| masked | `--config.mask_filter_pairs=True` |",
        "| open | `--config.mask_filter_pairs=False` |",
    ]


@pytest.mark.parametrize("ran_by", ["table_x", "another"])
def test_a_table_shows_other_data_sets_only_if_its_own_script_ran_on_them(tmp_path, ran_by):
    rows = [{**made(MASKED, 0, 40.0, dataset="mobytitles"), "table": ran_by}]
    table = dataclasses.replace(TABLE, datasets=("wordnet-mini",))
    text = readme.runs(rows, tmp_path, table=table)
    assert "| wordnet-mini | masked | | not run |" in text
    assert ("| mobytitles | masked | concat | 40.00 |" in text) == (ran_by == "table_x")


def test_every_row_of_the_tables_is_a_configuration():
    for table in (HARD_NEGATIVES, LOSSES, *OF_GANDALF):
        for row in table.rows:
            for dataset in table.datasets:
                assert ledger.configuration(dataset, row, 1).seed == 1
            for published in row.published:
                assert all(len(v) == len(table.columns) for v in published.heads.values())


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_list_and_run_nothing(script, tmp_path):
    ledger_file = tmp_path / "ledger.jsonl"
    command = [sys.executable, "-m", f"experiments.{script}", "--list"]
    command += [f"--ledger={ledger_file}"]
    done = subprocess.run(command, cwd=ledger.ROOT, capture_output=True, text=True, check=True)
    assert "python -m " in done.stdout
    assert not ledger_file.exists()


def table_command(tmp_path, *flags, run=subprocess.run, **options):
    command = [sys.executable, "-m", "experiments.table_filter_pairs", "--only=not masked"]
    command += ["--dataset=wordnet-mini,debug", "--seeds=5", *flags]
    command += [f"--ledger={tmp_path / 'ledger.jsonl'}"]
    return run(command, **{**WATCHED, "cwd": ledger.ROOT, **options})


@pytest.mark.slow
def test_a_table_is_run_once(tmp_path):
    first, second = table_command(tmp_path), table_command(tmp_path)
    assert (first.returncode, second.returncode) == (0, 0), first.stdout + first.stderr
    assert "to be run" in first.stdout and "there already" in second.stdout
    (row,) = ledger.read(tmp_path / "ledger.jsonl")
    heads = row["metrics"].keys() - {"concat+retrieval"}  # where held-out rows ask for it
    assert heads == {"concat", "de", "clf"} and row["in_batch_positives"] > 0
    assert 0 < row["epoch_seconds"] < row["seconds"] and row["seed"] == 5
    assert json.loads(json.dumps(row["overrides"])) == {"mask_filter_pairs": False}
    text = readme.readme(ledger.read(tmp_path / "ledger.jsonl"), tmp_path)
    assert f"not masked | concat | {row['metrics']['concat']['P@1']:.2f} |" in text


def test_a_run_that_takes_too_long_is_killed_and_not_kept(tmp_path):
    done = table_command(tmp_path, "--minutes=0.005")
    assert done.returncode == 1 and "failed (killed after 0 s)" in done.stdout
    assert ledger.read(tmp_path / "ledger.jsonl") == []


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="no list of processes")
def test_a_table_that_is_stopped_leaves_nothing_running(tmp_path):
    def training():
        commands = [_read(path) for path in Path("/proc").glob("[0-9]*/cmdline")]
        return sum(f"--workdir={tmp_path}/".encode() in command for command in commands)

    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    table = table_command(tmp_path, run=subprocess.Popen, env=environment)
    while not training():
        assert table.poll() is None
        time.sleep(0.05)
    table.terminate()
    table.communicate(timeout=60)
    assert table.returncode == 128 + signal.SIGTERM
    assert not training() and not [*tmp_path.iterdir()]


def _read(path):
    try:
        return path.read_bytes()
    except OSError:  # gone since
        return b""


def test_synthetic_data_has_the_shape_of_the_real_one(tmp_path):
    synthetic.write(tmp_path / "data", 0.002)
    synthetic.write(tmp_path / "data", 0.002)  # is there already
    found = formats.load(tmp_path / "data")
    labels = found.train.labels
    assert labels.shape == (4497, 2611) and len(found.test) == 2000
    counts = np.diff(labels.indptr)
    assert 20 < counts.mean() < 24 and (counts == 0).mean() < 0.01 and (counts > 100).any()
    frequency = np.sort(np.bincount(labels.indices, minlength=labels.shape[1]))
    assert frequency[-26:].mean() > 5 * np.median(frequency[:261])  # heads and tails
    words = [len(found.train.texts[i].split()) for i in range(0, 4497, 5)]
    assert 8.5 < np.mean(words) < 9.5
    for row, label in found.train.filter_pairs[:50]:
        assert found.train.texts[row] == found.label_texts[label] and labels[row, label] == 0
    assert list(tmp_path.iterdir()) == [tmp_path / "data"]


def test_pool_statistics_on_the_bundled_data(tmp_path):
    config = ledger.configuration("wordnet-mini", Row("x", {"batching": "random"}), 0)
    config.encoder.name, config.hard_negatives = "bag", False
    start = launch.prepare(config, tmp_path, None)
    run, params = start.run, start.weights.params
    found = pool_statistics.statistics(
        run.data, run.system.embedder, params, batch_size=200, num_batches=4
    )
    by = {(row["batching"], row["beta"], row["eta"]): row for row in found}
    assert len(by) == 2 * len(pool_statistics.BETAS) * len(pool_statistics.ETAS)
    mean = run.data.labels.nnz / len(run.data.rows)
    for (batching, beta, eta), row in by.items():
        assert 1 <= row["in_batch_positives"] < 1.2 * mean
        assert np.isnan(row["head"]) and 0 <= row["torso"] <= row["complete"] <= row["tail"] <= 1
        # What is sampled beyond gives more positives and a larger pool.
        for more in ((batching, beta + 1, eta), (batching, beta, eta + 3)):
            if more in by:
                assert by[more]["labels"] > row["labels"]
                assert by[more]["in_batch_positives"] > row["in_batch_positives"]
    shown = pool_statistics.show(
        {
            **{"dataset": "d", "points": 1, "labels": 2, "labels_a_point": 3, "batch": 4},
            **{"encoder": "e", "command": "c", "settings": found},
        }
    )
    assert shown.count("\n| random |") == shown.count("\n| clusters |") == len(by) // 2


def test_positives_are_counted_as_a_plain_loop_counts_them(tmp_path):
    """With room for every positive (beta above all), the mean is that of all labels."""
    config = ledger.configuration("wordnet-mini", Row("x", {"batching": "random"}), 0)
    config.encoder.name, config.hard_negatives = "bag", False
    data = launch.prepare(config, tmp_path, None).run.data
    epoch = np.stack([data.rows[:50], data.rows[50:100]]).astype(np.int32)
    epoch[1, -3:] = -1  # empty slots
    mined = np.full((data.labels.shape[0], 30), -1, np.int32)
    most = int(np.diff(data.labels.indptr).max())
    row = pool_statistics._average(data, epoch, mined, most, 0, 0)
    wanted = np.diff(data.labels.indptr)[epoch[epoch >= 0]]
    assert row["in_batch_positives"] == pytest.approx(wanted.mean(), abs=1e-4)
    assert row["complete"] == row["tail"] == 1.0


def test_a_row_may_be_of_another_file_and_differ_by_data_set():
    row = Row(
        "x", {"beta": 2}, config=FRUGAL, prefix="decaf,", by_data={"wordnet-mini": {"eta": 3}}
    )
    config = ledger.configuration("wordnet-mini", row, 0)
    assert (config.family, config.label_text, config.beta, config.eta) == ("frugal", True, 2, 3)
    assert row.on("mobytitles") == row.on("wordnet-mini,debug") == {"beta": 2}
    assert row.on("wordnet-mini,embeddings=X") == {"beta": 2, "eta": 3}
    rows = [made(row, 0, 1.0)]
    assert ledger.measured(rows, "wordnet-mini", row, 0) is rows[0]
    other = dataclasses.replace(row, prefix="astec,")
    assert ledger.measured(rows, "wordnet-mini", other, 0) is None
    # Fields of both families alone would not tell them apart.
    shared = {name: value for name, value in rows[0]["config"].items() if name == "beta"}
    rows = [{**rows[0], "config": {**shared, "family": "frugal"}}]
    assert (
        ledger.find(rows, "wordnet-mini", ledger.configuration("wordnet-mini", MASKED, 0)) is None
    )
    # Rows of UniDEC from before it was named are UniDEC's all the same.
    nameless = made(MASKED, 0, 2.0)
    nameless["config"].pop("family", None)
    config = ledger.configuration("wordnet-mini", MASKED, 0)
    assert ledger.find([nameless, *rows], "wordnet-mini", config) is nameless
    # unidec.py has this option, frugal.py has not: no row of it, and no error.
    assert ledger.measured(rows, "wordnet-mini,encoder=X", row, 0) is None


def test_a_row_older_than_what_is_switched_on_does_not_count():
    row = Row("x", {"gandalf.enabled": True})
    rows = [made(MASKED, 0, 1.0)]
    for name in [name for name in rows[0]["config"] if name.startswith("gandalf")]:
        del rows[0]["config"][name]
    assert ledger.measured(rows, "wordnet-mini", MASKED, 0) is rows[0]
    assert ledger.measured(rows, "wordnet-mini", row, 0) is None


def test_a_table_chooses_columns_facts_and_data_sets():
    small = Row("small", {}, by_data={"wordnet-mini": {"epochs": 3}}, only=("wordnet-mini",))
    older = Row("older", {}, (Published("X", "table 8", {"concat": [1.5, None]}),))
    table = Table(
        *("table_y", "Title", (small, older)),
        columns=("P@1", "C@1"),
        facts=("steps",),
        datasets=("wordnet-mini", "wordnettitles"),
    )
    rows = [{**made(small, 0, 40.0), "steps": 24}, made(older, 0, 50.0)]
    for row in rows:
        row["metrics"]["concat"]["C@1"] = 7.0
    lines = readme.table_of_runs(table, table.datasets, rows).splitlines()
    assert "| P@1 | C@1 | steps | seeds |" in lines[4]
    measured = lines[6 : lines.index("", 6)]
    assert measured[0].startswith("| wordnet-mini | small | concat | 40.00 | 7.00 | 24 | 0 |")
    assert measured[1].startswith("| wordnet-mini | older | concat | 50.00 | 7.00 |  | 0 |")
    assert measured[2].startswith("| wordnettitles | older | | not run |")  # small is not for it
    assert measured[3].startswith("| X | older | concat | 1.50 |  | | | published")
    assert len(measured) == 4 and len({line.count("|") for line in [lines[4], *measured]}) == 1
    assert lines[-4:] == [
        "| row | settings | on wordnet-mini also |",
        "| --- | --- | --- |",
        "| small | the data set's own | `--config.epochs=3` |",
        "| older | the data set's own |  |",
    ]


def test_what_is_kept_of_a_run(tmp_path):
    bins = [{"bin": 1, "labels": 2, "mean_frequency": 3.0, "value": 4.0}]
    evaluation = {"heads": {"clf": {"filtered": {"P@1": 1.0}, "unfiltered": {}}}}
    (tmp_path / "eval-test-20.json").write_text(json.dumps({**evaluation, "bins": {"clf": bins}}))
    log = [
        {"step": 10, "loss": 1.0},
        *(
            {"step": s, "epoch_steps": 10, "seconds": 2.0, "pool": {"in_batch_positives": s / 10}}
            for s in (10, 20)
        ),
        {"step": 20, "epoch": 2, "held_out": {"P@1": 5.0}, "seconds": 1.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    assert tables._results(tmp_path) == {
        **{"metrics": {"clf": {"P@1": 1.0}}, "bins": {"clf": bins}},
        **{"held_out": [{"steps": 20, "P@1": 5.0}], "steps": 20},
        **{"epoch_seconds": 4.0, "in_batch_positives": 2.0},
    }
