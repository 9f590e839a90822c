"""The contracts are enough: a family that the package does not know goes through all its doors."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import third_family
import tiny

from xmc_jax import predictor
from xmc_jax.host.signals import Interrupted
from xmc_jax.runs import device_memory, launch, open_runs
from xmc_jax.runs.settings import PlanError
from xmc_jax.systems import FAMILIES
from xmc_jax.training import checkpoints


@pytest.fixture(scope="module", autouse=True)
def family():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "linear", third_family.LinearFamily())
        yield


@pytest.fixture(scope="module")
def whole(family, own_data, tmp_path_factory) -> Path:
    """Work directory of a finished run; not to be changed."""
    folder = tmp_path_factory.mktemp("linear") / "run"
    launch.start(third_family.get_config(str(own_data)), folder)
    return folder


def changed(source: Path, **changes: object):
    config = third_family.get_config(str(source))
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in changes.items()})
    return config


def arrays(workdir: Path, step: int) -> dict[str, np.ndarray]:
    """All arrays of a checkpoint: parameters, model state, tables, their moments."""
    with ocp.StandardCheckpointer() as reader:
        folder = workdir / "checkpoints" / str(step)
        trees = {part: reader.restore(folder / part) for part in ("model", "optimizer")}
    leaves = jax.tree_util.tree_leaves_with_path(trees)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def test_it_learns_and_its_evaluation_is_kept(whole):
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < 0.5 * losses[0]
    opened = open_runs.open_run(whole)
    kept = json.loads((whole / f"eval-test-{opened.step}.json").read_text())
    assert list(kept["heads"]) == ["logits"]
    assert kept["heads"]["logits"]["filtered"]["P@1"] > 50  # of 64 labels, one or two are right
    assert open_runs.evaluate_run(opened) == kept
    assert np.abs(opened.weights.params["gains"]).sum() > 0


@pytest.mark.parametrize("at", [(0, 4), (5, 3)])
def test_a_stopped_run_goes_on_to_the_same_bits(at, whole, own_data, tmp_path, monkeypatch):
    config, make = third_family.get_config(str(own_data)), third_family.LinearBatches.make

    def stopping(self, queries, stage, epoch, step):
        if (epoch, step) == at and stage.epochs > 1:  # not while shapes are chosen
            os.kill(os.getpid(), signal.SIGTERM)
        return make(self, queries, stage, epoch, step)

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(third_family.LinearBatches, "make", stopping)
        launch.start(config, tmp_path)
    last = checkpoints.steps(whole)[-1]
    assert 0 < checkpoints.steps(tmp_path)[-1] < last
    launch.start(config, tmp_path)
    found, expected = arrays(tmp_path, last), arrays(whole, last)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    assert any("mu" in name for name in found)  # Optax's moments, of parameters and of the table
    (evaluation,) = whole.glob("eval-*.json")
    assert (tmp_path / evaluation.name).read_bytes() == evaluation.read_bytes()


def test_its_device_memory_is_stated(own_data, tmp_path, monkeypatch):
    config = third_family.get_config(str(own_data))
    begun = launch.prepare(config, tmp_path, None)
    sizes, labels, buckets = device_memory.sizes(begun.run), begun.run.data.num_labels, 256
    table = 4 * labels * buckets
    assert sizes["table"] == table and sizes["moments"] == 2 * table + 4  # a count
    of_params = 4 * (buckets + labels)
    assert sizes["parameters"] - 3 * of_params - 4 * buckets in range(0, 17)  # counts
    assert sizes["activations"] >= 4 * 32 * buckets  # the bags of a batch
    assert len(device_memory.state(begun.run, begun.config)) == 1

    monkeypatch.setattr(device_memory, "available_bytes", lambda: int(0.95 * sum(sizes.values())))
    with pytest.raises(PlanError) as error:
        device_memory.state(begun.run, begun.config)
    advice = str(error.value).split("Settings that would fit:")[1]
    assert "--config.buckets=128" in advice and "pool" not in advice


def test_too_little_memory_while_training_names_what_it_has(own_data, tmp_path, monkeypatch):
    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(launch, "train", full)
    with pytest.raises(RuntimeError, match=r"Take a smaller config\.batch_size, smaller vectors, "):
        launch.start(third_family.get_config(str(own_data)), tmp_path)


def test_epochs_are_chosen_by_the_clock(own_data, tmp_path):
    launch.start(changed(own_data, max_minutes=0.05, epochs=2), tmp_path)
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert 1 <= meta["epochs"] <= 2
    (evaluation,) = tmp_path.glob("eval-*.json")
    idf = open_runs.open_run(tmp_path).weights.model_state["idf"]
    assert np.isfinite(idf).all() and evaluation.stat().st_size


def test_it_predicts(whole):
    model = predictor.load(whole)
    texts = ["red apple or old number 3", "cold garden", " "]
    ids, scores = model.predict_ids(texts, k=5)
    products = np.take_along_axis(model.encode(texts) @ model.label_vectors().T, ids, axis=1)
    np.testing.assert_allclose(scores[:2], products[:2], rtol=1e-5)
    assert (ids[2] == -1).all()  # a blank text
    best = [label for label, _ in model.predict(texts, k=3)[0]]
    assert "red apple" in best and all(label.endswith(" apple") for label in best[:2])
    ranker = open_runs.open_run(whole)
    ranker = ranker.ranker(ranker.load_data().label_tokens)
    again = ranker.score(model.encode(texts), "logits", ids)
    np.testing.assert_allclose(again[:2], scores[:2], rtol=1e-5)
    rare = predictor.load(whole, tail_weight=5.0).predict_ids(texts, k=5)[1]
    assert not np.allclose(rare[:2], scores[:2])


def test_what_it_lacks_is_said(whole):
    with pytest.raises(ValueError, match=r"expected one of \('logits',\); a linear classifier has"):
        predictor.load(whole).predict(["apple"], head="other")
    with pytest.raises(ValueError, match="came after training have no weights"):
        predictor.load(whole, new_labels=["blue apple"])
    with pytest.raises(ValueError, match=r"tail_weight: found 11\.0, expected a number from -10"):
        predictor.load(whole, tail_weight=11)
    with pytest.raises(ValueError, match="no such head; expected one of logits"):
        open_runs.evaluate_run(open_runs.open_run(whole), split="held_out", heads=("other",))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("idf", "smoth", r"config\.idf = 'smoth': expected one of smooth, none\. Did you mean"),
        ("buckets", 0, r"config\.buckets = 0: expected at least 1\."),
        ("lr.table", 0.0, r"config\.lr\.table = 0: a linear classifier is its table"),
        ("family", "liner", r"config\.family = 'liner': expected one of unidec, frugal, linear"),
    ],
)
def test_a_wrong_value_is_told_before_anything_is_made(field, value, message, own_data, tmp_path):
    with pytest.raises(PlanError, match=message):
        launch.start(changed(own_data, **{field: value}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_another_value_of_an_option_is_another_run(whole, own_data, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    with pytest.raises(ValueError, match="idf: there 'smooth', now 'none'"):
        launch.start(changed(own_data, idf="none"), tmp_path / "run")


def test_an_open_option_is_chosen_by_the_data(own_data, tmp_path):
    config = third_family.get_config(str(own_data))
    config.buckets = None
    begun = launch.prepare(config, tmp_path, None)
    assert begun.config.buckets == begun.run.system.dim == begun.run.data.num_labels


def test_it_starts_from_another_run(whole, own_data, tmp_path):
    begun = launch.prepare(changed(own_data, init_from=str(whole), seed=1), tmp_path / "a", None)
    theirs = open_runs.open_run(whole).weights
    np.testing.assert_array_equal(begun.weights.params["gains"], theirs.params["gains"])
    assert (np.asarray(begun.weights.params["bias"]) == -3).all()  # labels may be others
    with pytest.raises(ValueError, match=r"gains has shape \(256,\) there, \(128,\) here"):
        launch.prepare(changed(own_data, init_from=str(whole), buckets=128), tmp_path / "b", None)


@pytest.mark.slow
def test_through_the_binaries(own_data, tmp_path):
    """As a user would: train, evaluate, predict, each in a process of its own."""
    runner = str(Path(third_family.__file__))

    def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, runner, *arguments]
        environment = {**os.environ, "PYTHONPATH": str(tiny.ROOT)}
        return subprocess.run(
            command, input=stdin, capture_output=True, text=True, env=environment, check=False
        )

    def output(*arguments: str, stdin: str = "") -> str:
        done = run(*arguments, stdin=stdin)
        assert done.returncode == 0, done.stderr
        return done.stdout

    workdir = f"--workdir={tmp_path / 'run'}"
    flags = (f"--config={runner}:{own_data}", "--config.epochs=8", "--config.buckets=128", workdir)
    said = output("train", *flags)
    assert "a batch, " in said and "hashing, 32 queries and 64 labels" in said
    assert "logits" in output("evaluate", workdir, "--split=held_out")
    labels = json.loads(output("predict", workdir, "--k=2", stdin="red apple or old\n"))["labels"]
    assert all(label["text"].endswith(" apple") for label in labels) and len(labels) == 2
    wrong = run("train", *flags, "--config.idf=non")
    assert wrong.returncode and "Did you mean 'none'?" in wrong.stderr
    assert "Traceback" not in wrong.stderr
