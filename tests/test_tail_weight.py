"""``tail_weight``: labels ranked by score + t ln w, against plain arithmetic."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny

from xmc_jax import evaluation, open_runs, predictor, propensity, ranking, report, runs

TEXTS = ["red apple or old river", "wild castle", "copper", "loud violin and round planet"]


@pytest.fixture
def copy(mini_run, tmp_path) -> Path:
    return Path(shutil.copytree(mini_run, tmp_path / "run"))


def weights(opened: open_runs.OpenRun) -> np.ndarray:
    entry = opened.meta["entry"]
    labels = opened.load_data().dataset.train.labels
    return propensity.inverse_propensity(labels, a=entry["a"], b=entry["b"])


@pytest.mark.parametrize("head", evaluation.HEADS)
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
    products = other.encode(TEXTS, head=head) @ other.label_vectors(head=head).T
    np.testing.assert_allclose(products, expected, atol=1e-5)
    assert (plain.predict_ids(TEXTS, k=5, head=head)[0] != ids).any()


@pytest.mark.parametrize("kind", ["hnsw", "ivf"])
def test_other_indexes_find_the_same(copy, kind):
    opened = open_runs.open_run(copy, tail_weight=0.1)
    exact = open_runs.evaluate_run(opened)["heads"]["concat"]["filtered"]
    found = open_runs.evaluate_run(opened, kind=kind)["heads"]["concat"]["filtered"]
    assert abs(found["PSP@5"] - exact["PSP@5"]) < 1


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
        assert ("tail weight" in report.table(result)) == (weight != 0)
    assert means == sorted(means) and means[2] > means[0] + 0.5
    assert path.read_bytes() == before
    names = {p.name for p in copy.glob("eval-test-*")} - {path.name}
    step = opened.step
    assert names == {f"eval-test-{step}-concat{end}.json" for end in ("", "-tail-0.2", "-tail0.2")}


def test_labels_that_came_later_count_as_never_seen(trained):
    more = predictor.load(trained, new_labels=["quiet harp"], tail_weight=0.5)
    opened = open_runs.open_run(trained)
    added, entry = more.label_vectors()[:, -1], opened.meta["entry"]
    points = opened.load_data().dataset.train.labels.shape[0]
    w = propensity.weights_of(np.zeros(1), points, a=entry["a"], b=entry["b"])
    np.testing.assert_allclose(added[-1:], 0.5 * np.log(w), rtol=1e-6)
    np.testing.assert_allclose(added[:-1], 0.5 * np.log(weights(opened)), rtol=1e-6)


def test_a_configuration_holds_it_for_the_whole_run(own_data, tmp_path, trained):
    """Held-out rows, the end of training and prediction rank by it; training does not read it."""
    folder = tmp_path / "run"
    runs.start(tiny.config(own_data, tail_weight=0.2), folder)
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    values = {line["step"]: line["held_out"] for line in logged if "held_out" in line}
    kept = open_runs.open_run(folder)
    assert kept.step == max(values, key=lambda step: (values[step]["P@5"], step))
    plain = open_runs.open_run(trained, step=kept.step, tail_weight=0.2)
    same = jax.tree.map(np.array_equal, (kept.params, kept.table), (plain.params, plain.table))
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


def test_bad_values_and_a_run_of_before(trained, tmp_path):
    for value in (np.nan, np.inf):
        with pytest.raises(ValueError, match=r"tail_weight: found (nan|inf), expected a number"):
            ranking.tail_bonus(value, np.ones(3))
    folder = Path(shutil.copytree(trained, tmp_path / "run"))
    (folder / "label_frequency.npy").unlink()
    meta = json.loads((folder / "meta.json").read_text())
    for part in ("config", "resolved"):
        del meta[part]["tail_weight"]
    (folder / "meta.json").write_text(json.dumps(meta))
    assert predictor.load(folder).predict(TEXTS) == predictor.load(trained).predict(TEXTS)
    with pytest.raises(ValueError, match=r"tail_weight = 0.1: .*npy is missing; .* Train again"):
        predictor.load(folder, tail_weight=0.1)
