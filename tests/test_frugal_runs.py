"""Frugal runs from end to end: train, evaluate, predict, and go on after a kill as if none was."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tiny

from configs import frugal
from xmc_jax import frugal_mining, predictor, runs, train_loop

TEXTS = ["red apple or old river", "copper", ""]
TWO_PHASES = dict(
    phases=((1, False, "pifa"), (1, True, "text")), epochs=4, eval_epochs=2, gandalf__enabled=True
)


class Killed(Exception):
    """In place of a signal."""


@pytest.fixture(scope="module")
def whole(own_data, tmp_path_factory) -> Path:
    """A finished run of ECLARE's parts in two phases, with Gandalf."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    runs.start(tiny.frugal_config("eclare", own_data, **TWO_PHASES), folder)
    return folder


def arrays(folder: Path) -> dict[str, np.ndarray]:
    newest = max((folder / "checkpoints").iterdir(), key=lambda path: int(path.name))
    with ocp.StandardCheckpointer() as reader:
        trees = {part: reader.restore(newest / part) for part in ("model", "optimizer")}
    leaves = jax.tree_util.tree_leaves_with_path(trees)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def steps_per_epoch(folder: Path) -> int:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return next(line["epoch_steps"] for line in lines if "epoch_steps" in line)


def kill_at(monkeypatch, step: int) -> None:
    """After this step the state is saved, as by a timer, and the run ends."""
    usual = train_loop._Loop._stop_or_save

    def stop(self, state, epoch):
        if int(state.step) == step:
            self.save(state, epoch)
            raise Killed
        usual(self, state, epoch)

    monkeypatch.setattr(train_loop._Loop, "_stop_or_save", stop)


def kill_in_refresh(monkeypatch, epoch: int) -> None:
    """The run ends when this epoch's refresh is half written."""
    usual = frugal_mining.make

    def stop(folder, at, run, params):
        if at == epoch:
            (folder / "label_clusters.npy").write_bytes(b"half")
            raise Killed
        return usual(folder, at, run, params)

    monkeypatch.setattr(frugal_mining, "make", stop)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["in phase I", "in the refresh of phase II", "in phase II"])
def test_ends_alike_when_killed(moment, whole, own_data, tmp_path, monkeypatch):
    config = tiny.frugal_config("eclare", own_data, **TWO_PHASES)
    per_epoch = steps_per_epoch(whole)
    with monkeypatch.context() as patch:
        if moment == "in the refresh of phase II":
            kill_in_refresh(patch, 2)
        else:
            kill_at(patch, per_epoch + 3 if moment == "in phase I" else 2 * per_epoch + 5)
        with pytest.raises(Killed):
            runs.start(config, tmp_path / "run")
    runs.start(config, tmp_path / "run")
    found, expected = arrays(tmp_path / "run"), arrays(whole)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    (first,), (second,) = (f.glob("eval-test-*.json") for f in (whole, tmp_path / "run"))
    assert first.read_bytes() == second.read_bytes()


def test_phases_leave_what_they_should(whole):
    """Free weights are off and at zero in phase I; phase II clusters and moments are new."""
    per_epoch = steps_per_epoch(whole)
    first, last = runs.open_run(whole, step=2 * per_epoch), runs.open_run(whole, step=4 * per_epoch)
    assert not first.params["phase"]["free_weights"] and not np.asarray(first.table).any()
    assert last.params["phase"]["free_weights"] and np.asarray(last.table).any(axis=1).all()
    clusters = [np.asarray(o.params["phase"]["label_clusters"]) for o in (first, last)]
    assert (clusters[0] != clusters[1]).any()
    for found in clusters:
        assert np.ptp(np.bincount(found)) <= 1  # balanced
    state = arrays(whole)
    (adam,) = {int(v) for k, v in state.items() if "table_state" in k and v.shape == ()}
    assert adam == 2 * per_epoch


def test_evaluation_is_that_of_the_end_of_training(whole):
    (path,) = whole.glob("eval-test-*.json")
    kept = json.loads(path.read_text())
    opened = runs.open_run(whole)
    result = runs.evaluate_run(opened)
    assert result == kept and list(result["heads"]) == ["clf"]
    assert result["heads"]["clf"]["filtered"]["P@1"] > 50  # words of the text are the label's


def test_prediction(whole):
    model = predictor.load(whole)
    assert model.heads == ("clf",)
    ids, scores = model.predict_ids(TEXTS, k=5)
    assert ids.shape == (3, 5) and (np.diff(scores, axis=1) <= 0).all()
    assert ((scores >= 0) & (scores <= 1)).all()
    vectors, labels = model.encode(TEXTS), model.label_vectors()
    dim = labels.shape[1]
    assert vectors.shape == (3, 2 * dim)
    params = runs.open_run(whole).params
    sigmoid = lambda x: 1 / (1 + np.exp(-np.asarray(x, np.float64)))
    clusters = vectors[:, dim:] @ params["meta"]["kernel"] + params["meta"]["bias"]
    dense = sigmoid(vectors[:, :dim] @ labels.T + params["offset"])
    dense *= sigmoid(clusters)[:, params["phase"]["label_clusters"]]
    expected = np.take_along_axis(dense, ids, axis=1)
    np.testing.assert_allclose(scores, expected, rtol=1e-4)
    np.testing.assert_allclose(scores[:, 0], dense.max(axis=1), rtol=1e-4)
    assert model.predict(TEXTS, k=2)[0][0][0] in (
        "red apple",
        "old apple",
        "red river",
        "old river",
    )
    with pytest.raises(ValueError, match=r"head 'de': expected one of .*no dual encoder"):
        model.predict(TEXTS, head="de")
    with pytest.raises(ValueError, match=r"labels that came after training have no cluster"):
        predictor.load(whole, new_labels=["quiet harp"])


@pytest.mark.slow
@pytest.mark.parametrize("system", list(frugal.SYSTEMS))
def test_every_system_trains(system, own_data, tmp_path):
    result = runs.start(tiny.frugal_config(system, own_data), tmp_path / "run")
    assert result["heads"]["clf"]["filtered"]["P@5"] > 5
    assert runs.evaluate_run(runs.open_run(tmp_path / "run")) == result
