"""Labelled points that a trained run is told of: they count at once, and can be taken back."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny

from xmc_jax import predictor
from xmc_jax.runs import launch, remembered

FIXED = {
    "retrieval__enabled": True,
    "retrieval__points": 0.5,
    "retrieval__labels": 0.25,
    "retrieval__lexical": 0.25,
    "epochs": 8,
}
NEW = "purple saxophone"
ABOUT = [f"purple saxophone or brass tune number {n}" for n in range(10)]


@pytest.fixture(scope="module")
def run(own_data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fixed") / "run"
    launch.start(tiny.config(own_data, **FIXED), folder)
    return folder


@pytest.fixture
def copy(run, tmp_path):
    return Path(shutil.copytree(run, tmp_path / "copy"))


def hits(model, opened_texts, truth, k=5) -> np.ndarray:
    ids, _ = model.predict_ids(opened_texts, k=k)
    return np.array([[label in truth[row].indices for label in of] for row, of in enumerate(ids)])


def test_ten_points_of_a_new_label_make_it_the_first_answer(copy):
    model = predictor.load(copy)
    data = model._run.load_data()
    texts, truth = list(data.dataset.test.texts), data.dataset.test.labels
    before = hits(model, texts, truth).mean(axis=1)
    number = model.add(ABOUT, [[NEW]] * 10)
    assert number == 1 and model.remembered == {1: 10} and model.label_texts[-1] == NEW
    for again in (model, predictor.load(copy)):
        for text in ("a purple saxophone tune", "brass purple saxophone number 77"):
            ((label, _),) = again.predict([text], k=1)[0]
            assert label == NEW
        difference = hits(again, texts, truth).mean(axis=1) - before
        error = before.std(ddof=1) / np.sqrt(len(before))
        assert abs(difference.mean()) < error
    assert any(
        voter["text"] in ABOUT
        for voter in model.explain(["purple saxophone tune"], k=1)[0][0]["because"]["points"]
    )
    model.forget(1)
    assert model.remembered == {} and NEW not in model.label_texts
    np.testing.assert_array_equal(hits(model, texts, truth).mean(axis=1), before)


def test_new_points_of_a_known_label_count_too(copy):
    model = predictor.load(copy)
    known = model.label_texts[3]
    model.add(["zither zither zither"] * 3, [[known]] * 3)
    assert model.predict(["zither zither"], k=1)[0][0][0] == known
    assert len(model.label_texts) == model.num_known


def test_the_binary(copy, tmp_path):
    (tmp_path / "new.tsv").write_text("".join(f"{text}\t{NEW}|old apple\n" for text in ABOUT))
    done = tiny.run("remember", f"--workdir={copy}", f"--input={tmp_path}/new.tsv")
    assert done.returncode == 0, done.stderr
    assert "1: 10 points" in done.stdout and "1 labels came after training" in done.stdout
    done = tiny.run("predict", f"--workdir={copy}", "--k=1", stdin="purple saxophone tune\n")
    assert json.loads(done.stdout)["labels"][0]["text"] == NEW
    done = tiny.run("remember", f"--workdir={copy}", "--forget=7")
    assert done.returncode == 1 and "nothing is remembered by number 7; known: 1." in done.stderr
    done = tiny.run("remember", f"--workdir={copy}", "--forget=1")
    assert done.returncode == 0 and "0 labels came" in done.stdout


def test_a_frugal_classifier_takes_points_and_no_labels(own_data, tmp_path):
    config = tiny.frugal_config("astec", own_data, **{**FIXED, "epochs": 1})
    launch.start(config, tmp_path / "run")
    model = predictor.load(tmp_path / "run")
    with pytest.raises(ValueError, match="labels that came after training have no cluster"):
        model.add(ABOUT, [[NEW]] * 10)
    assert model.remembered == {}
    model.add(["red apple"], [[model.label_texts[0]]])
    assert model.predict(["red apple"], k=1)


@pytest.mark.parametrize(
    ("texts", "labels", "message"),
    [
        (["a"], [], "1 texts, 0 lists of labels"),
        ([], [], "no points"),
        ([" "], [["x"]], r"text 0 \(counted from 0\) is ' '"),
        (["a"], ["x"], r"labels of text 0 \(counted from 0\) are 'x'"),
        (["a"], [[]], r"labels of text 0 \(counted from 0\) are \[\]"),
        (["a"], [[""]], r"a label of text 0 \(counted from 0\) is ''"),
    ],
)
def test_what_is_no_labelled_point_is_told(tmp_path, texts, labels, message):
    with pytest.raises(ValueError, match=message):
        remembered.add(tmp_path, remembered.Points(texts, labels))
    assert not list(tmp_path.iterdir())


def test_without_retrieval_it_is_told(trained, tmp_path):
    copy = Path(shutil.copytree(trained, tmp_path / "copy"))
    with pytest.raises(ValueError, match=r"config\.retrieval\.enabled=True"):
        predictor.load(copy).add(["a b"], [["c"]])
    assert predictor.load(copy).predict(["red apple"], k=1)


def test_a_damaged_file_is_named(copy):
    predictor.load(copy).add(["zither"], [["red apple"]])
    path = copy / "remembered" / "000001.json"
    path.write_text(path.read_text().replace("zither", "bither"))
    with pytest.raises(ValueError, match=r"000001\.json is damaged"):
        predictor.load(copy)


KILLED = """
import os, sys
from pathlib import Path
from xmc_jax import files
from xmc_jax.runs import remembered
link, count = os.link, [0]
def killed(*arguments):
    count[0] += 1
    if count[0] > {calls}:
        os.kill(os.getpid(), {signal})
    link(*arguments)
os.link = killed
for number in range(3):
    remembered.add(Path({folder!r}), remembered.Points([f"text {{number}}"], [["label"]]))
"""


def test_a_kill_loses_nothing_that_was_remembered(tmp_path):
    program = KILLED.format(calls=2, signal=int(signal.SIGKILL), folder=str(tmp_path))
    environment = {**os.environ, "PYTHONPATH": str(tiny.ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert remembered.read_all(tmp_path).texts == ["text 0", "text 1"]
    assert remembered.add(tmp_path, remembered.Points(["text 3"], [["x"]])) == 3
    assert remembered.numbers(tmp_path) == [1, 2, 3]
