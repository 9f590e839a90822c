"""The report on a data set, and the binary as a user starts it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny
from scipy.sparse import csr_matrix

from xmc_jax import catalog
from xmc_jax.data.dataset import Split, make_dataset
from xmc_jax.data.readers import canonical, formats
from xmc_jax.data.summaries import summary
from xmc_jax.runs import settings
from xmc_jax.training import training_data

OWN = catalog.default_entry("x", None, None, None, 32)

ROOT = Path(__file__).parent.parent


def run(*arguments, **environment):
    """Starts the binary."""
    return subprocess.run(
        [sys.executable, "-m", "xmc_jax.prepare", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    )


def split_of(texts, rows, num_labels, pairs=()):
    labels = np.zeros((len(rows), num_labels), np.float32)
    for row, ids in enumerate(rows):
        labels[row, ids] = 1
    return Split(texts, csr_matrix(labels), np.array(pairs, dtype=np.int64).reshape(-1, 2))


@pytest.fixture
def small():
    """Training lists (b: a), test asks (A : b); one filter pair hits a positive."""
    train = split_of(["b", "x y z", "q"], [[0, 2], [], [2]], 4, [[0, 1], [2, 2]])
    test = split_of(["A ", "w"], [[1, 3], [2]], 4)
    return make_dataset("small", train, test, ["a", "b", "c c c", "B"], ["a note"])


@pytest.mark.parametrize(("second", "held"), [([0, 2], 100.0), ([0], 0.0)])
def test_describe_compares_label_texts_with_points(second, held):
    """Labels 1 and 2 stand together in two of label 1's three points; a point bears its text."""
    rows = [[1, 2], [1, 2], [1], second]
    train = split_of(["p", "q", "r", "B"], rows, 3)
    dataset = make_dataset("s", train, train.take([0]), ["a", "b", "c"])
    report = "\n".join(summary.summarise(dataset))
    assert "postulate, 1 training points that bear a label's text" in report
    assert f"in {held:.1f} % (expected 66.7 %), its five strongest in {held:.1f} %" in report
    assert ("contradict Gandalf's targets" in report) == (held == 0)


def test_summarise(small):
    report = "\n".join(summary.summarise(small))
    for part in (
        "training rows 3   test rows 2   labels 4",
        "1.00, at most 2, none in 1 rows (training), 1.50, at most 2, none in 0 rows (test)",
        "points a label: 0.75 (training); tail labels (5 points or fewer): 100.0 %",
        "without any: 50.0 %",
        "words a text: 1.67 (training), 1.00 (test), 1.50 (labels)",
        "filter pairs, training: 2, of which positives: 1",
        "filter pairs, test: 0, of which positives: 0",
        "labels whose text is a training text: 50.0 %, a test text: 25.0 %",
        "training rows whose text is a label text: 33.3 %",
        "test rows whose text is a training text: 0.0 %",
        # Both labels with b's text count: (A, b) and (A, B) are answered by (b, a).
        "test answers that training lists the other way round: 66.67 % (2 of 3)",
        "labels that share their text with another one: 1",
        "note: a note",
    ):
        assert part in report


def test_a_canonical_form_keeps_the_propensities_of_its_name(small, tmp_path, monkeypatch):
    named = make_dataset("LF-AmazonTitles-131K", small.train, small.test, small.label_texts)
    canonical.save(named, tmp_path / "prepared", recipe="title")
    config = tiny.config(tmp_path / "prepared")
    entry = training_data.read_dataset(config.dataset, config.data, max_length=config.max_length)[1]
    assert (entry.a, entry.b) == (0.6, 2.6)
    monkeypatch.setattr(summary, "baseline_table", lambda _, entry: [f"{entry.a} {entry.b}"])
    assert list(summary.prepare(str(tmp_path / "prepared")))[-1] == "0.6 2.6"


def test_propensities_are_a_setting(small, tmp_path, monkeypatch):
    """Of `prepare` and of a run; a known name has its own without it."""
    canonical.save(small, tmp_path / "prepared", recipe="title")
    source = str(tmp_path / "prepared")
    monkeypatch.setattr(summary, "baseline_table", lambda _, entry: [f"{entry.a} {entry.b}"])
    assert [*summary.prepare(source)][-1] == "0.55 1.5"
    assert [*summary.prepare(source, propensity="0.5,0.4")][-1] == "0.5 0.4"
    for wrong in ("0.5", "a,b", "-1,2", "1,0", "nan,1"):
        with pytest.raises(ValueError, match=f"--propensity={wrong}: expected two numbers A,B"):
            next(summary.prepare(source, propensity=wrong))
        config = tiny.config(source, propensity=wrong)
        with pytest.raises(settings.PlanError, match="expected two numbers A,B"):
            settings.check(config)


def hints_of(texts, label_texts, rows, test_texts=("none",)):
    train = split_of(texts, rows, len(label_texts))
    test = split_of([*test_texts], [[0]] * len(test_texts), len(label_texts))
    report = summary.summarise(make_dataset("x", train, test, label_texts))
    return "\n".join(line for line in report if "note" in line)


def test_what_was_seen_is_named_with_its_switch():
    """Single words; test texts that are label texts; labels as peers or as parents."""
    words = [f"w{i}" for i in range(200)]
    following = [[(i + 1) % 200, (i - 1) % 200] for i in range(200)]
    said = hints_of(words, words, following, words[:5])
    for part in ("encoder.embeddings=FILE", "100 % of the test texts", "100 % of the pairs"):
        assert part in said
    assert "towers=1" in said and "--config.gandalf.enabled=True" in said
    upwards = [[i // 2] if i else [] for i in range(200)]
    assert "like parents: 0 % of the pairs" in hints_of(words, words, upwards)
    long = [f"{word} with some more words" for word in words]
    assert "note" not in hints_of(long, [f"label {i} of these" for i in range(200)], following)


def test_missing_filter_pairs_are_pointed_out(small):
    bare = Split(small.train.texts, small.train.labels, small.train.filter_pairs[:0])
    report = summary.summarise(make_dataset("x", bare, small.test, small.label_texts))
    assert any("no filter pairs" in line for line in report)
    assert not any("no filter pairs" in line for line in summary.summarise(small))


def test_numbers_to_beat_on_mini(mini_folder):
    """Published with the data: popularity 2.67 / 2.00 / 2.08, PSP 1.06 / 1.23 / 1.79."""
    mini = formats.load(mini_folder)
    scores, num_rows, analyzer = summary.baseline_scores(mini, catalog.get("wordnet-mini"))
    assert num_rows == 750 and analyzer == "word"
    columns = ("P@1", "P@3", "P@5", "PSP@1", "PSP@3", "PSP@5")
    found = [round(scores["popularity"][column], 2) for column in columns]
    assert found == [2.67, 2.00, 2.08, 1.06, 1.23, 1.79]
    # Another tokenisation of the words made 34.93 / 26.49 / 21.17 / 37.00 / 39.87 / 41.38.
    found = [scores["TF-IDF nearest label"][column] for column in columns]
    np.testing.assert_allclose(found, [34.93, 26.49, 21.17, 37.00, 39.87, 41.38], atol=1.5)


def test_large_test_sets_are_sampled(monkeypatch):
    test = split_of([f"t{i}" for i in range(40)], [[i % 3] for i in range(40)], 3, [[39, 1]])
    assert summary.sample(test, 3) is test
    monkeypatch.setattr(summary, "SAMPLE_ROWS", 10)
    monkeypatch.setattr(summary, "_FULL_PAIRS", 100)
    some = summary.sample(test, 3)
    assert len(some) == 10 and list(some.texts) == [f"t{i}" for i in some.rows]
    np.testing.assert_array_equal(some.rows, summary.sample(test, 3).rows)
    dataset = make_dataset("x", test, test, ["t0", "t1", "t2"])
    assert "a sample of 10 test rows (seed 0)" in summary.baseline_table(dataset, OWN)[0]


def test_no_test_labels():
    empty = split_of(["a"], [[]], 2)
    dataset = make_dataset("x", split_of(["b"], [[0]], 2), empty, ["c", "d"])
    assert summary.baseline_table(dataset, OWN) == [
        "  no test row with labels, so no numbers to beat"
    ]


def test_binary(tmp_path, mini_folder):
    output = tmp_path / "deep" / "mini"
    done = run("--input=wordnet-mini", f"--output={output}")
    assert done.returncode == 0, done.stderr
    assert "training rows 1,850   test rows 750   labels 1,858" in done.stdout
    assert "nothing to repair" in done.stdout and "popularity" in done.stdout
    assert re.search(r"filter pairs, training: 1,839, of which positives: 0", done.stdout)
    description = json.loads((output / "dataset.json").read_text())
    assert description["digest"] == formats.load(mini_folder).digest
    assert description["name"] == "LF-WordNetTitles-Mini" and description["text"] == "title"
    assert [path.name for path in output.parent.iterdir()] == ["mini"]
    # Again, from the canonical form itself, and only to check.
    for arguments in ((f"--input={mini_folder}", f"--output={output}"), (f"--input={output}",)):
        assert run(*arguments).returncode == 0


def test_binary_says_what_is_wrong(tmp_path):
    (tmp_path / "mine.tsv").write_text("a\tb\nc\n")
    done = run(f"--input={tmp_path / 'mine.tsv'}", f"--output={tmp_path / 'out'}")
    assert done.returncode == 1
    assert "mine.tsv, line 2: found 1 columns; expected 2" in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine.tsv"]
    done = run("--input=amazontitles1.3m", XMC_DATA=str(tmp_path))
    assert done.returncode == 1 and "XMLRepository" in done.stderr


def limited(blocks: int, module: str, *flags: str, **environment: str):
    """Runs a binary that can write no file above so many KiB, as where the disk is full."""
    command = ["bash", "-c", f'ulimit -f {blocks}; exec "$@"', "-", sys.executable, "-m"]
    return subprocess.run(
        [*command, f"xmc_jax.{module}", *flags],
        cwd=tiny.ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_full_disk_while_preparing(tmp_path):
    source, cache = tmp_path / "mine.tsv", tmp_path / "cache"
    text = "word " * 100
    source.write_text("".join(f"{text}{i}\tlabel {i % 9}\n" for i in range(10_000)))
    done = limited(1024, "prepare", f"--input={source}", f"--output={tmp_path / 'made'}")
    *_, message = done.stderr.splitlines()
    assert done.returncode == 1 and message.startswith(f"{tmp_path} cannot be written: ")
    assert "XMC_CACHE" in message and "Choose another folder" in message
    flags = (f"--config=unidec:{source}", f"--workdir={tmp_path / 'run'}")
    done = limited(1024, "train", *flags, XMC_CACHE=str(cache))
    *_, message = done.stderr.splitlines()
    assert done.returncode == 1 and message.startswith(f"{cache}/datasets cannot be written: ")
    assert "XMC_CACHE" in message and "Traceback" not in done.stderr
    assert [*tmp_path.iterdir()] == [source]


def test_where_the_cache_lies(tmp_path):
    """``~`` is the home folder; without one the environment variable is asked for."""
    source = tmp_path / "mine.tsv"
    source.write_text("".join(f"{'word ' * 100}{i}\tlabel {i % 9}\n" for i in range(10_000)))
    flags = (f"--config=unidec:{source}", f"--workdir={tmp_path / 'run'}")
    home = {"HOME": str(tmp_path / "home"), "XMC_CACHE": "~/x"}
    code = "from xmc_jax.data.readers import formats; import sys;"
    code += "print(formats.ensure_canonical(sys.argv[1], text='title'))"
    call = [sys.executable, "-c", code, str(source)]
    environment = {**os.environ, **home, "PYTHONPATH": str(tiny.ROOT)}
    done = subprocess.run(call, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert Path(done.stdout.strip()).parent == tmp_path / "home" / "x", done.stderr
    assert not (tmp_path / "~").exists()
    for homeless in ({"HOME": "", "XMC_CACHE": ""}, {"HOME": "", "XMC_CACHE": "~/x"}):
        done = limited(6000, "train", *flags, **homeless)
        assert done.returncode == 1 and "no home folder to keep data in" in done.stderr
        assert "Traceback" not in done.stderr and not (tmp_path / "run").exists()


def test_binary_says_what_is_not_split_off(tmp_path):
    rows = [f"text {i % 667 if i < 667 else 0}\tlabel {i % 7}|b\n" for i in range(1000)]
    (tmp_path / "points.tsv").write_text("".join(rows))
    done = tiny.run("prepare", f"--input={tmp_path}/points.tsv")
    assert done.returncode == 0 and "training rows 800   test rows 200" in done.stdout, done.stderr
    assert "334 of 1,000 rows have the text 'text 0'" in done.stdout
