"""``tail_weight``: labels ranked by score + t ln w, against plain arithmetic."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny

from xmc_jax import predictor
from xmc_jax.data.search import exact_search, index
from xmc_jax.metrics import propensity
from xmc_jax.runs import launch, open_runs, result_tables
from xmc_jax.systems.unidec import ranking

TEXTS = ["red apple or old river", "wild castle", "copper", "loud violin and round planet"]


@pytest.fixture
def copy(mini_run, tmp_path) -> Path:
    return Path(shutil.copytree(mini_run, tmp_path / "run"))


def weights(opened: open_runs.OpenRun) -> np.ndarray:
    entry = opened.meta["entry"]
    labels = opened.load_data().dataset.train.labels
    return propensity.inverse_propensity(labels, a=entry["a"], b=entry["b"])


@pytest.mark.parametrize("head", ranking.HEADS)
@pytest.mark.parametrize("weight", [0.3, -0.3])
def test_scores_are_those_without_it_and_t_ln_w(trained, head, weight):
    plain, other = predictor.load(trained), predictor.load(trained, tail_weight=weight)
    added = weight * np.log(weights(open_runs.open_run(trained)))
    assert np.ptp(added) > 0.05
    expected = plain.encode(TEXTS, head=head) @ plain.label_vectors(head=head).T + added
    order = np.argsort(-expected, axis=1, kind="stable")[:, :5]
    ids, scores = other.predict_ids(TEXTS, k=5, head=head)
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_allclose(scores, np.take_along_axis(expected, order, axis=1), atol=1e-5)
    assert (plain.predict_ids(TEXTS, k=5, head=head)[0] != ids).any()
    np.testing.assert_array_equal(other.encode(TEXTS, head=head), plain.encode(TEXTS, head=head))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_on_an_accelerator_as_on_the_host(dtype):
    rng = np.random.default_rng(0)
    queries, labels = (rng.normal(size=(n, 6)).astype(np.float32) for n in (9, 50))
    bonus = rng.normal(size=50).astype(dtype)
    scores, ids = exact_search.exact_search_jax(queries, labels, 7, block=16, bonus=bonus)
    expected = queries @ labels.T + bonus
    np.testing.assert_array_equal(ids, np.argsort(-expected, axis=1)[:, :7])
    np.testing.assert_allclose(scores, -np.sort(-expected, axis=1)[:, :7], rtol=1e-5)
    host = exact_search.exact_search(queries, labels, 7, bonus.astype(np.float32))
    np.testing.assert_array_equal(host[1], ids)
    np.testing.assert_allclose(host[0], scores, rtol=1e-5)


def test_labels_are_searched_exactly(trained, caplog):
    """Others miss labels that are far away; also ``auto``, whose choice is not asked."""
    for kind in ("hnsw", "ivf"):
        with pytest.raises(ValueError, match=f"index '{kind}': with a tail weight, .* exactly"):
            predictor.load(trained, kind=kind, tail_weight=0.1)
        with pytest.raises(ValueError, match=f"index '{kind}': scores with a tail weight need"):
            index.Index.build(np.eye(3), kind, seed=0, bonus=np.zeros(3, np.float32))
    auto = predictor.load(trained, kind="auto", tail_weight=0.1)
    assert auto.predict(TEXTS) == predictor.load(trained, tail_weight=0.1).predict(TEXTS)


def test_rarer_labels_come_as_it_grows(copy):
    """Mean weight of the first label; and the file of the plain evaluation stays as it was."""
    (path,) = copy.glob("eval-test-*.json")
    before, means = path.read_bytes(), []
    for weight in (-0.2, 0, 0.2):
        opened = open_runs.open_run(copy, tail_weight=weight)
        keep: dict = {}
        result = open_runs.evaluate_run(opened, heads=("concat",), keep=keep)
        means.append(weights(opened)[keep["concat"][0][:, 0]].mean())
        assert result["tail_weight"] == weight
        assert ("tail weight" in result_tables.table(result)) == (weight != 0)
    assert means == sorted(means) and means[2] > means[0] + 0.5
    assert path.read_bytes() == before
    names = {p.name for p in copy.glob("eval-test-*")} - {path.name}
    step = opened.step
    assert names == {f"eval-test-{step}-concat{end}.json" for end in ("", "-tail-0.2", "-tail0.2")}


def test_labels_that_came_later_count_as_never_seen(trained):
    plain = predictor.load(trained, new_labels=["quiet harp"])
    more = predictor.load(trained, new_labels=["quiet harp"], tail_weight=0.5)
    (before,), (after,) = (m.predict(["quiet harp"], k=1) for m in (plain, more))
    opened = open_runs.open_run(trained)
    points, entry = opened.load_data().dataset.train.labels.shape[0], opened.meta["entry"]
    w = propensity.weights_of(np.zeros(1), points, a=entry["a"], b=entry["b"])
    assert w >= weights(opened).max() and before[0][0] == after[0][0] == "quiet harp"
    assert after[0][1] - before[0][1] == pytest.approx(0.5 * np.log(w[0]), abs=1e-5)


def test_a_configuration_holds_it_for_the_whole_run(own_data, tmp_path, trained):
    """Held-out rows, the end of training and prediction rank by it; training does not read it."""
    folder = tmp_path / "run"
    launch.start(tiny.config(own_data, tail_weight=0.2), folder)
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    values = {line["step"]: line["held_out"] for line in logged if "held_out" in line}
    kept = open_runs.open_run(folder)
    assert kept.step == max(values, key=lambda step: (values[step]["P@5"], step))
    plain = open_runs.open_run(trained, step=kept.step, tail_weight=0.2)
    same = jax.tree.map(np.array_equal, kept.weights, plain.weights)
    assert jax.tree.all(same)
    found = open_runs.evaluate_run(plain, split="held_out")["heads"]["concat"]["filtered"]
    assert found == values[kept.step]
    now = predictor.load(folder).predict(TEXTS)
    assert now == predictor.load(trained, step=kept.step, tail_weight=0.2).predict(TEXTS)


def test_binaries(trained, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "run")
    done = tiny.run("evaluate", f"--workdir={folder}", "--tail_weight=0.2")
    assert done.returncode == 0 and "tail weight 0.2; percent" in done.stdout
    done = tiny.run("predict", f"--workdir={folder}", "--tail_weight=0.2", stdin="wild castle\n")
    first, score = predictor.load(folder, tail_weight=0.2).predict(["wild castle"])[0][0]
    label = json.loads(done.stdout)["labels"][0]
    assert (label["text"], label["score"]) == (first, round(score, 6))


@pytest.mark.parametrize("gandalf", [False, True])
def test_a_frugal_run(own_data, tmp_path, gandalf):
    """Frequencies are those of all original training rows: no held-out row, no label text less."""
    config = tiny.frugal_config(
        "astec", own_data, gandalf__enabled=gandalf, tail_weight=0.5, epochs=1
    )
    launch.start(config, tmp_path / "run")
    model = predictor.load(tmp_path / "run")
    plain = predictor.load(tmp_path / "run", tail_weight=0)
    opened = open_runs.open_run(tmp_path / "run")
    size = len(plain.label_texts)
    ids, scores = plain.predict_ids(TEXTS, k=size)
    expected = np.empty_like(scores)
    np.put_along_axis(expected, ids, scores, axis=1)
    expected = expected * weights(opened) ** 0.5
    ids, scores = model.predict_ids(TEXTS, k=size)
    np.testing.assert_allclose(np.take_along_axis(expected, ids, axis=1), scores, rtol=1e-4)
    assert (np.diff(scores, axis=1) <= 0).all()
    logged = [
        json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    ]
    values = [line["held_out"] for line in logged if "held_out" in line]
    found = open_runs.evaluate_run(opened, split="held_out")["heads"]["clf"]["filtered"]
    assert found == values[-1]


@pytest.mark.parametrize("value", [np.nan, np.inf, 11, -11])
def test_bad_values(trained, value):
    with pytest.raises(ValueError, match=r"tail_weight: found -?(nan|inf|11.0), expected a number"):
        open_runs.open_run(trained, tail_weight=value)


def test_a_run_of_before(trained, own_data, tmp_path):
    """It has neither the field nor the frequencies; training, called again, writes them."""
    folder = Path(shutil.copytree(trained, tmp_path / "run"))
    kept = (folder / open_runs.FREQUENCY).read_bytes()
    (folder / open_runs.FREQUENCY).unlink()
    meta = json.loads((folder / "meta.json").read_text())
    del meta["format"]
    for part in ("config", "resolved"):
        del meta[part]["tail_weight"]
    (folder / "meta.json").write_text(json.dumps(meta))
    assert predictor.load(folder).predict(TEXTS) == predictor.load(trained).predict(TEXTS)
    with pytest.raises(ValueError, match=r"= 0.1: .*npz is missing, .* once more: it writes"):
        predictor.load(folder, tail_weight=0.1)
    before = json.loads(next(folder.glob("eval-test-*.json")).read_text())
    again = launch.start(tiny.config(own_data, tail_weight=0.3), folder, overrides=())
    assert again == before and open_runs.open_run(folder).tail_weight == 0
    assert (folder / open_runs.FREQUENCY).read_bytes() == kept
