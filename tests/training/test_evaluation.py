"""Evaluation: the binary gives the numbers at the end of training; what its options do."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny

from xmc_jax import metrics
from xmc_jax.metrics.propensity import inverse_propensity
from xmc_jax.runs import launch, open_runs, result_tables
from xmc_jax.systems.unidec import ranking
from xmc_jax.training import evaluation


@pytest.fixture
def copy(mini_run, tmp_path):
    return Path(shutil.copytree(mini_run, tmp_path / "run"))


def test_binary_equals_the_end_of_training_exactly(copy, mini_run, mini_folder, tmp_path):
    """Also with the data moved; predictions saved are those that were counted."""
    (path,) = copy.glob("eval-test-*.json")
    path.unlink()
    moved = shutil.copytree(mini_folder, tmp_path / "moved")
    saved = tmp_path / "predictions.npz"
    done = tiny.run(
        "evaluate", f"--workdir={copy}", f"--data={moved}", f"--save_predictions={saved}"
    )
    assert done.returncode == 0, done.stderr
    assert path.read_bytes() == (mini_run / path.name).read_bytes()
    result = json.loads(path.read_text())
    for head, values in result["heads"].items():
        shown = re.findall(rf"^  {head} +([\d.]+)", done.stdout, re.MULTILINE)
        assert shown == [f"{values[view]['P@1']:.2f}" for view in ("filtered", "unfiltered")]
    assert "propensity A = 0.55, B = 1.5" in done.stdout
    assert "score thresholds of concat, from" in done.stdout
    assert done.stderr.count("GiB of vectors, and about 60 MB a core") == 1
    arrays = np.load(saved)
    assert set(arrays) == {f"{h}_{w}" for h in ranking.HEADS for w in ("ids", "scores")}
    test = open_runs.open_run(copy).load_data().test
    assert arrays["concat_ids"].shape == (len(test.rows), 100)
    found = metrics.evaluate(arrays["concat_ids"], test.truth, filter_pairs=test.filter_pairs)
    expected = result["heads"]["concat"]["filtered"]
    assert {name: expected[name] for name in found} == found
    assert (np.diff(arrays["concat_scores"], axis=1) <= 0).all()
    assert (np.abs(arrays["concat_scores"]) <= 2 + 1e-5).all()
    assert not list(tmp_path.glob("*.tmp"))


def test_held_out_numbers_are_those_in_the_log(copy, mini_run):
    lines = [json.loads(line) for line in (mini_run / "metrics.jsonl").read_text().splitlines()]
    logged = {line["step"]: line["held_out"] for line in lines if "held_out" in line}
    assert sorted(logged) == [64, 128]
    for step, values in logged.items():
        opened = open_runs.open_run(copy, step=step)
        result = open_runs.evaluate_run(opened, split="held_out", heads=("concat",))
        assert result["heads"]["concat"]["filtered"] == values
        assert (copy / f"eval-held_out-{step}-concat.json").exists()
    best = max(logged, key=lambda step: (logged[step]["P@5"], step))
    assert open_runs.open_run(copy).step == best


def test_options_do_not_overwrite_the_full_evaluation(copy):
    (path,) = copy.glob("eval-test-*.json")
    before = path.read_bytes()
    opened = open_runs.open_run(copy)
    full = json.loads(before)
    one = open_runs.evaluate_run(opened, heads=("de",))
    assert one["heads"]["de"] == full["heads"]["de"] and list(one["heads"]) == ["de"]
    other = open_runs.evaluate_run(opened, ks=(1, 2))
    assert "P@2" in other["heads"]["clf"]["filtered"]
    assert path.read_bytes() == before
    names = {p.name for p in copy.glob("eval-test-*")} - {path.name}
    assert names == {f"eval-test-{opened.step}-de.json", f"eval-test-{opened.step}-at1-at2.json"}


@pytest.mark.parametrize("kind", ["hnsw", "ivf"])
def test_other_indexes_come_close(copy, kind):
    opened = open_runs.open_run(copy)
    exact = open_runs.evaluate_run(opened, heads=("de",))["heads"]["de"]["filtered"]
    found = open_runs.evaluate_run(opened, heads=("de",), kind=kind)
    assert found["index"] == kind
    assert abs(found["heads"]["de"]["filtered"]["P@5"] - exact["P@5"]) < 1
    if kind == "ivf":
        assert open_runs.evaluate_run(opened, heads=("de",), kind=kind) == found


def test_metrics_are_those_of_a_plain_ranking(copy):
    """Scores by one matrix product, ranking by sorting, against what the run says."""
    opened = open_runs.open_run(copy)
    data, ranker = opened.load_data(), opened.ranker()
    full = open_runs.evaluate_run(opened)
    weights = inverse_propensity(data.dataset.train.labels, a=0.55, b=1.5)
    assert tuple(full["heads"]) == ranking.HEADS
    for head in ranking.HEADS:
        queries = ranker.query_vectors(data.test.tokens, data.test.rows, head)
        scores = queries.astype(np.float64) @ ranker.label_vectors(head).T.astype(np.float64)
        ids = np.argsort(-scores, axis=1, kind="stable")[:, :50].astype(np.int32)
        found = evaluation.measure(ids, data.test, weights, (1, 3, 5))
        for view, values in found.items():
            for name, value in values.items():  # rounding may swap two labels of equal score
                assert abs(value - full["heads"][head][view][name]) < 0.3


def test_concat_is_the_sum_of_both_heads(copy):
    opened = open_runs.open_run(copy)
    data, ranker = opened.load_data(), opened.ranker()
    rows = data.test.rows[:20]
    score = lambda head: (
        ranker.query_vectors(data.test.tokens, rows, head) @ ranker.label_vectors(head).T
    )
    np.testing.assert_allclose(score("concat"), score("de") + score("clf"), atol=1e-5)
    assert np.abs(score("clf")).max() <= 1 + 1e-5


def test_bins_add_up(copy):
    result = open_runs.evaluate_run(open_runs.open_run(copy))
    for head, bins in result["bins"].items():
        total = sum(entry["value"] for entry in bins)
        assert abs(total - result["heads"][head]["filtered"]["P@5"]) < 1e-9
    text = result_tables.table(result)
    assert "bin 1:" in text and "bin 5:" in text and "unfiltered" in text


def test_tables_are_100_columns_wide(copy):
    opened = open_runs.open_run(copy)
    for ks in ((1, 3, 5), (1, 2, 3, 4, 5, 10, 20)):
        result = open_runs.evaluate_run(opened, ks=ks)
        brief, full = (result_tables.table(result, full=full) for full in (False, True))
        assert max(map(len, f"{brief}\n{full}".splitlines())) <= 100
        assert "PSnDCG" not in brief and f" P@{ks[-1]}" in brief and "PSP@5" in full
        values = result["heads"]["de"]["filtered"]
        assert all(f"{name}" in full and f"{value:.2f}" in full for name, value in values.items())
    done = tiny.run("evaluate", f"--workdir={copy}", "--full")
    assert done.returncode == 0 and "PSnDCG@5" in done.stdout
    number = len(opened.load_data().held_out.rows)
    assert f"score thresholds of concat, from {number} held-out rows" in done.stdout


def test_test_rows_without_labels_are_said(own_data, tmp_path):
    (tmp_path / "train.tsv").write_bytes(own_data.read_bytes())
    (tmp_path / "test.tsv").write_text("red apple\tred apple\ncold river\t\nwild castle\t\n")
    launch.start(tiny.config(tmp_path, epochs=1), tmp_path / "run")
    result = open_runs.evaluate_run(open_runs.open_run(tmp_path / "run"))
    assert result["rows"] == 3 and result["rows_without_labels"] == 2
    assert "2 of these rows have no label" in result_tables.table(result)


def test_dual_encoder_alone_and_no_held_out_rows(own_data, tmp_path):
    config = tiny.config(own_data, held_out_share=0.0, epochs=1, classifier=False)
    assert list(launch.start(config, tmp_path / "run")["heads"]) == ["de"]
    opened = open_runs.open_run(tmp_path / "run")
    assert opened.weights.tables == {}
    with pytest.raises(ValueError, match=r"head concat: .* expected one of de"):
        open_runs.evaluate_run(opened, heads=("concat",))
    result, thresholds, number = open_runs.evaluate_and_save(opened, split="test", kind="exact")
    assert thresholds == [] and number == 0
    assert "no held-out rows" in result_tables.threshold_table(thresholds, "de", number)
    assert result["rows"] == 60  # a fifth of the rows; rows of one text stay together
    with pytest.raises(ValueError, match="split 'held_out': this run has no such rows"):
        open_runs.evaluate_run(opened, split="held_out")


def test_labels_are_embedded_once(copy, monkeypatch):
    opened = open_runs.open_run(copy)
    usual, made = type(opened).ranker, []
    counting = lambda *a, **o: made.append(usual(*a, **o)) or made[-1]
    monkeypatch.setattr(type(opened), "ranker", counting)
    assert open_runs.evaluate_and_save(opened)[1] and len(made) == 1


def test_minutes_of_a_long_search_are_said():
    """LF-AmazonTitles-1.3M: hours on a CPU; nothing of that size is allocated."""
    vectors = np.broadcast_to(np.float32(0), (1_305_265, 256))
    labels = ranking.LabelVectors(vectors, vectors)
    said = ranking.exact_search_cost(labels, 970_237)
    minutes = 2 * 970_237 * 1_305_265 * 1024 / (3.5e10 * os.cpu_count()) / 60
    assert said.endswith(f"; about {minutes:.0f} minutes") and minutes > 1
    assert "minutes" not in ranking.exact_search_cost(labels, 10)


def test_other_propensities(trained, tmp_path):
    """PSP@k alone changes, and the file says by what."""
    folder = Path(shutil.copytree(trained, tmp_path / "run"))
    opened = open_runs.open_run(folder)
    usual = open_runs.evaluate_run(opened)
    other = open_runs.evaluate_run(opened, propensity="0.6,2.6")
    assert other["propensity"] == {"a": 0.6, "b": 2.6} != usual["propensity"]
    heads = [result["heads"]["concat"]["filtered"] for result in (usual, other)]
    changed = {name for name in heads[0] if heads[0][name] != heads[1][name]}
    assert "PSP@5" in changed and all(name.startswith("PS") for name in changed)
    assert (folder / f"eval-test-{opened.step}-propensity0.6,2.6.json").is_file()


def test_wrong_requests(trained, tmp_path):
    done = tiny.run("evaluate", f"--workdir={trained}", "--ks=1,x")
    assert done.returncode == 1 and "--ks=1,x: expected numbers such as 1,3,5" in done.stderr
    assert "Traceback" not in done.stderr
    before = sorted(trained.glob("eval-*"))
    done = tiny.run("evaluate", f"--workdir={trained}", "--head=nonsense")
    said = "head nonsense: this run has no such head; expected one of concat, de, clf."
    assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr
    assert sorted(trained.glob("eval-*")) == before
    with pytest.raises(ValueError, match=r"checkpoints/7 cannot be read .*no such checkpoint"):
        open_runs.open_run(trained, step=7)
    with pytest.raises(ValueError, match="no data for"):
        open_runs.open_run(trained).load_data("/no/such/place")
    with pytest.raises(ValueError, match="there is no such folder"):
        path = f"{tmp_path}/none/x.npz"
        open_runs.evaluate_and_save(
            open_runs.open_run(trained), save_predictions=path, kind="exact"
        )


def test_read_only_work_directory_is_still_evaluated(trained, small_disk, caplog):
    folder = Path(shutil.copytree(trained, small_disk.folder / "run"))
    expected = json.loads(next(folder.glob("eval-test-*.json")).read_text())
    small_disk.remount("ro")
    assert open_runs.evaluate_run(open_runs.open_run(folder)) == expected
    assert "The evaluation is not kept there" in caplog.text
