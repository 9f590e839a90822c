"""Frugal runs from end to end: train, evaluate, predict, and go on after a kill as if none was."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tiny

from xmc_jax import metrics, predictor
from xmc_jax.data.summaries import baselines
from xmc_jax.runs import launch, open_runs
from xmc_jax.systems.frugal import mining
from xmc_jax.systems.frugal.step import TABLE
from xmc_jax.systems.frugal.system import FrugalSystem
from xmc_jax.training import loop
from xmc_jax.training.source import BatchSource

TEXTS = ["red apple or old river", "copper", "loud violin"]
TWO_PHASES = dict(
    phases=((1, False, "pifa"), (1, True, "text")), epochs=4, eval_epochs=2, gandalf__enabled=True
)


class Killed(Exception):
    """In place of a signal."""


@pytest.fixture(scope="module")
def switched() -> list:
    """States before and after each change of phases of `whole`."""
    return []


@pytest.fixture(scope="module")
def whole(own_data, switched, tmp_path_factory) -> Path:
    """A finished run of ECLARE's parts in two phases, with Gandalf."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    usual = FrugalSystem.begin_stage

    def begin_stage(self, data, state, stage, before):
        old = jax.tree.map(np.array, state)
        z1 = self.embedder.texts(state.weights, data.label_tokens)
        after = usual(self, data, state, stage, before)
        table = state.tables[TABLE]
        assert table.state.m.is_deleted() and not table.values.is_deleted()
        switched.append((stage.first, old, jax.tree.map(np.array, after), z1))
        return after

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FrugalSystem, "begin_stage", begin_stage)
        launch.start(tiny.frugal_config("eclare", own_data, **TWO_PHASES), folder)
    return folder


def test_a_budget_is_reckoned_by_the_steps_of_the_last_phase(own_data, tmp_path, monkeypatch):
    def killed(*_):
        raise Killed

    batches, usual = [], BatchSource.ahead

    def ahead(self, stage, epoch, first_step):
        for made in usual(self, stage, epoch, first_step):
            batches.append((epoch, made[0].free_weights is not None))
            yield made

    monkeypatch.setattr(BatchSource, "ahead", ahead)
    monkeypatch.setattr(launch, "train", killed)
    config = tiny.frugal_config("eclare", own_data, **TWO_PHASES, max_minutes=1.0)
    with pytest.raises(Killed):
        launch.start(config, tmp_path / "run")
    assert batches[0] == (0, False) and set(batches[1:]) == {(2, True)}  # first: for the memory


def arrays(folder: Path) -> dict[str, np.ndarray]:
    newest = max((folder / "checkpoints").iterdir(), key=lambda path: int(path.name))
    with ocp.StandardCheckpointer() as reader:
        trees = {part: reader.restore(newest / part) for part in ("model", "optimizer")}
    leaves = jax.tree_util.tree_leaves_with_path(trees)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def popularity(data) -> float:
    """P@5 of the most frequent training labels, on the test rows."""
    ids = baselines.popularity(data.dataset.train.labels, len(data.test.rows), 5)
    return metrics.evaluate(ids, data.test.truth, ks=(5,))["P@5"]


def steps_per_epoch(folder: Path) -> int:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return next(line["epoch_steps"] for line in lines if "epoch_steps" in line)


def kill_at(monkeypatch, step: int) -> None:
    """After this step the state is saved, as by a timer, and the run ends."""
    usual = loop._Loop._stop_or_save

    def stop(self, state, epoch):
        if int(state.step) == step:
            self.save(state, epoch)
            raise Killed
        usual(self, state, epoch)

    monkeypatch.setattr(loop._Loop, "_stop_or_save", stop)


def kill_in_refresh(monkeypatch, epoch: int) -> None:
    """The run ends when this epoch's refresh is half written."""
    usual = mining.write

    def stop(folder, at, *rest):
        if at == epoch:
            (folder / "label_clusters.npy").write_bytes(b"half")
            raise Killed
        return usual(folder, at, *rest)

    monkeypatch.setattr(mining, "write", stop)


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
            launch.start(config, tmp_path / "run")
    launch.start(config, tmp_path / "run")
    found, expected = arrays(tmp_path / "run"), arrays(whole)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    (first,), (second,) = (f.glob("eval-test-*.json") for f in (whole, tmp_path / "run"))
    assert first.read_bytes() == second.read_bytes()


def test_other_heads_are_refused(whole):
    opened = open_runs.open_run(whole)
    with pytest.raises(ValueError, match="head de: this run has no such head; expected one of clf"):
        open_runs.evaluate_run(opened, heads=("de",))
    assert not list(whole.glob("eval-*-de.json"))


def test_what_a_new_phase_keeps(whole, switched):
    """Appendix A.4: new clusters on z1, a new meta-classifier, free weights that start at z1."""
    ((epoch, before, after, z1),) = switched
    assert epoch == 2 and int(before.step) == int(after.step) == 2 * steps_per_epoch(whole)
    phases = [state.model_state["phase"] for state in (before, after)]
    assert not phases[0]["free_weights"] and not before.tables[TABLE].values.any()
    assert int(before.tables[TABLE].state.step) == 0  # never updated in phase I
    assert phases[1]["free_weights"]
    np.testing.assert_allclose(after.tables[TABLE].values, z1, atol=1e-6)
    clusters = [phase["label_clusters"] for phase in phases]
    assert (clusters[0] != clusters[1]).any()
    for found in clusters:
        assert np.ptp(np.bincount(found)) <= 1  # balanced
    same = {"tokens", "queries", "text", "graph", "attention", "offset"}
    assert before.params.keys() == same | {"meta"}
    assert before.model_state.keys() == {"moving", "phase"}
    jax.tree.map(
        np.testing.assert_array_equal, before.model_state["moving"], after.model_state["moving"]
    )
    for name in same:
        jax.tree.map(np.testing.assert_array_equal, before.params[name], after.params[name])
    assert (before.params["meta"]["kernel"] != after.params["meta"]["kernel"]).any()
    assert not any(leaf.any() for leaf in jax.tree.leaves(after.opt_state))
    assert not any(leaf.any() for leaf in jax.tree.leaves(after.tables[TABLE].state))
    last = open_runs.open_run(whole).weights
    assert last.model_state["phase"]["free_weights"]
    assert (np.asarray(last.tables[TABLE]) != z1).any()


def test_evaluation_is_that_of_the_end_of_training(whole):
    (path,) = whole.glob("eval-test-*.json")
    kept = json.loads(path.read_text())
    opened = open_runs.open_run(whole)
    result = open_runs.evaluate_run(opened)
    assert result == kept and list(result["heads"]) == ["clf"]
    assert result["heads"]["clf"]["filtered"]["P@5"] > 2 * popularity(opened.load_data())


def test_prediction(whole):
    model = predictor.load(whole)
    assert model.heads == ("clf",)
    assert model.predict([" "], k=5) == [[]]
    ids, scores = model.predict_ids(TEXTS, k=5)
    assert ids.shape == (3, 5) and (np.diff(scores, axis=1) <= 0).all()
    assert ((scores >= 0) & (scores <= 1)).all()
    vectors, labels = model.encode(TEXTS), model.label_vectors()
    dim = labels.shape[1]
    assert vectors.shape == (3, 2 * dim)
    opened = open_runs.open_run(whole)
    params, phase = opened.weights.params, opened.weights.model_state["phase"]
    gamma = opened.options.clusters.weight
    assert gamma == 0.5
    sigmoid = lambda x: 1 / (1 + np.exp(-np.asarray(x, np.float64)))
    clusters = vectors[:, dim:] @ params["meta"]["kernel"] + params["meta"]["bias"]
    dense = sigmoid(vectors[:, :dim] @ labels.T + params["offset"])
    dense *= sigmoid(clusters)[:, phase["label_clusters"]] ** gamma
    expected = np.take_along_axis(dense, ids, axis=1)
    np.testing.assert_allclose(scores, expected, rtol=1e-4)
    np.testing.assert_allclose(scores[:, 0], dense.max(axis=1), rtol=1e-4)
    assert model.predict(TEXTS, k=2)[0][0][0] in (
        "red apple",
        "old apple",
        "red river",
        "old river",
    )
    with pytest.raises(
        ValueError, match=r"head 'de': expected one of .*a frugal classifier has no other"
    ):
        model.predict(TEXTS, head="de")
    with pytest.raises(ValueError, match=r"labels that came after training have no cluster"):
        predictor.load(whole, new_labels=["quiet harp"])
