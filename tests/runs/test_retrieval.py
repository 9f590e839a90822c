"""Retrieval in a run: what is kept, by what it is chosen, what evaluation and prediction use."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from pathlib import Path

import damage
import numpy as np
import pytest
import tiny

from xmc_jax import files, predictor
from xmc_jax.data.search.lexical import TextIndex, Vocabulary
from xmc_jax.data.summaries import baselines
from xmc_jax.runs import launch, open_runs, retrieval_files
from xmc_jax.training import retrieval_choice
from xmc_jax.training.retrieval import RetrievalRanker, Setting

WITH = {"retrieval__enabled": True}
WEIGHTS = {"retrieval__points": 0.5, "retrieval__labels": 0.25, "retrieval__lexical": 0.75}
FIXED = {**WITH, **WEIGHTS, "retrieval__neighbours": 9}
TEXTS = ["red apple or old number 3", "cold river", "wild garden or plain number 7"]


@pytest.fixture(scope="module")
def fixed(own_data, tmp_path_factory):
    """A run whose weights are set, and its evaluation at the end of training."""
    folder = tmp_path_factory.mktemp("fixed") / "run"
    return folder, launch.start(tiny.config(own_data, **FIXED), folder)


@pytest.fixture
def copy(fixed, tmp_path):
    return Path(shutil.copytree(fixed[0], tmp_path / "copy"))


def test_evaluation_equals_the_end_of_training(fixed):
    folder, ended = fixed
    assert next(iter(ended["heads"])) == "concat+retrieval"
    result = open_runs.evaluate_run(open_runs.open_run(folder))
    assert result["heads"] == json.loads(json.dumps(ended["heads"]))
    done = tiny.run("evaluate", f"--workdir={folder}")
    assert done.returncode == 0 and "concat+retrieval" in done.stdout, done.stderr
    assert json.loads(next(folder.glob("eval-test-*.json")).read_text())["heads"] == ended["heads"]


def test_predictions_have_it_by_default_and_the_model_is_there_too(fixed):
    model = predictor.load(fixed[0])
    assert model.heads == ("concat+retrieval", "concat", "de", "clf")
    opened = open_runs.open_run(fixed[0])
    ranker = opened.ranker(model._tokens(model.label_texts, "label"))
    assert isinstance(ranker, RetrievalRanker)
    assert ranker.setting == Setting(9, 0.1, 0.5, 0.25, 0.75)
    for head in ("concat+retrieval", "concat"):
        ids, scores = model.predict_ids(TEXTS, k=4, head=head)
        vectors = model.encode(TEXTS, head=head)
        np.testing.assert_array_equal(vectors, model.encode(TEXTS, head="concat"))
        again = model.predict_ids(TEXTS, k=4, head=head, vectors=vectors)
        np.testing.assert_array_equal(again, (ids, scores))
        queries = ranker.query_vectors(model._tokens(TEXTS, "query"), None, head)
        np.testing.assert_allclose(ranker.score(queries, head, ids), scores, atol=1e-5)


def test_what_is_kept_is_what_the_issue_says(fixed):
    folder, _ = fixed
    opened = open_runs.open_run(folder)
    data = opened.load_data()
    kept = retrieval_files._read_keys(folder / "retrieval" / "points", opened._owner)
    assert kept.vectors.dtype == np.float16 and isinstance(kept.vectors, np.memmap)
    rows = data.rows
    assert not set(rows) & set(data.held_out.rows) and len(kept) == len(rows)
    assert (kept.labels != data.labels[rows]).nnz == 0
    texts = retrieval_files.point_texts(folder)
    assert [texts[i] for i in range(5)] == [data.dataset.train.texts[row] for row in rows[:5]]
    vectors = opened.ranker().base.query_vectors(data.train_tokens, rows, "concat")
    np.testing.assert_array_equal(kept.vectors, vectors.astype(np.float16))
    targets = retrieval_files._read_keys(folder / "retrieval" / "labels", opened._owner).labels
    np.testing.assert_array_equal(targets.diagonal(), 1)
    index = TextIndex.read(folder / "retrieval" / "lexical")
    counted = Vocabulary.of(data.dataset.label_texts, (data.dataset.train.texts[r] for r in rows))
    np.testing.assert_array_equal(index.vocabulary.hashes, counted.hashes)
    np.testing.assert_array_equal(index.vocabulary.idf, counted.idf)  # of no held-out row
    same = index.scores(counted.vectors(data.dataset.label_texts), *[np.arange(len(index))] * 2)
    np.testing.assert_allclose(same, 1, atol=1e-6)


def test_pairs_that_answer_held_out_rows_backwards_are_in_no_value(tmp_path):
    """Two texts that are labels too, each the other's answer: held out once, known never."""
    lines = [f"word{i} thing\tword{i + 1 if i % 2 == 0 else i - 1} thing\n" for i in range(400)]
    (tmp_path / "train.tsv").write_text("".join(lines))
    (tmp_path / "test.tsv").write_text("".join(lines[:4]))
    config = tiny.config(tmp_path, **FIXED, held_out_share=0.2, hard_negatives=False)
    config.batching, config.epochs = "random", 1
    launch.start(config, tmp_path / "run")
    opened = open_runs.open_run(tmp_path / "run")
    data = opened.load_data()
    number = {text: i for i, text in enumerate(data.dataset.label_texts)}
    texts = data.dataset.train.texts
    points = retrieval_files._read_keys(tmp_path / "run/retrieval/points", opened._owner)
    kept = list(retrieval_files.point_texts(tmp_path / "run"))
    held = 0
    for row in data.held_out.rows.tolist():
        (answer,) = data.dataset.train.labels[row].indices
        own = number[texts[row]]
        assert texts[row] not in kept
        held += 1
        for key, text in enumerate(kept):
            if text == data.dataset.label_texts[answer]:
                assert own not in points.labels[key].indices
        graph = retrieval_files._read_keys(tmp_path / "run/retrieval/labels", opened._owner).labels
        assert graph[own, answer] == 0 and graph[answer, own] == 0
    assert held > 20


def test_weights_are_chosen_on_held_out_rows(own_data, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    config = tiny.config(own_data, **WITH, held_out_share=0.2)
    ended = launch.start(config, tmp_path / "run")
    info = json.loads((tmp_path / "run/retrieval/info.json").read_text())
    assert info["chosen"]["rows"] > 30 and "retrieval: chosen on" in caplog.text
    opened = open_runs.open_run(tmp_path / "run")
    ranker = opened.ranker()
    if isinstance(ranker, RetrievalRanker):
        held = open_runs.evaluate_run(opened, split="held_out")["heads"]
        for name, head in (("chosen", "concat+retrieval"), ("without", "concat")):
            expected = info["chosen"][name]["P@5"]
            assert held[head]["filtered"]["P@5"] == pytest.approx(expected, abs=1e-3)
    assert list(ended["heads"])[-3:] == ["concat", "de", "clf"]
    # The same command makes nothing again.
    before = (tmp_path / "run/retrieval/info.json").stat().st_mtime_ns
    assert launch.start(config, tmp_path / "run")["heads"] == ended["heads"]
    assert (tmp_path / "run/retrieval/info.json").stat().st_mtime_ns == before


def test_part_numbers_ask_for_words_and_pieces_of_words(tmp_path):
    """Each text is a label's own number with something behind it, and no other text's."""
    numbers = [f"{chr(97 + n % 26)}k{n * 7919 % 100_000:05}" for n in range(400)]
    lines = [f"{number}{'xyz'[i % 3]}\t{number}\n" for i, number in enumerate(numbers)]
    (tmp_path / "train.tsv").write_text("".join(lines))
    (tmp_path / "test.tsv").write_text("".join(lines[::5]).replace("x\t", "w\t"))
    config = tiny.config(tmp_path, **WITH, held_out_share=0.2, hard_negatives=False, epochs=1)
    config.batching = "random"
    heads = launch.start(config, tmp_path / "run")["heads"]
    info = json.loads((tmp_path / "run/retrieval/info.json").read_text())
    assert info["setting"]["lexical"] > 0
    first = {name: head["filtered"]["P@1"] for name, head in heads.items()}
    assert first["concat+retrieval"] > first["concat"] + 50
    model = predictor.load(tmp_path / "run")
    assert model.predict([numbers[7] + "-w"], k=1)[0][0][0] == numbers[7]
    (explained,) = model.explain([numbers[7] + "-w"], k=1)
    assert explained[0]["terms"]["lexical"] == pytest.approx(
        info["setting"]["lexical"] * cosine(model, numbers[7] + "-w", numbers[7])
    )
    # A label that comes later is found by its words, of which no text had any.
    model.add(["something else"], [["qq-81955"]])
    for again in (model, predictor.load(tmp_path / "run")):
        assert again.predict(["qq-81955"], k=1)[0][0][0] == "qq-81955"
    model.forget(1)
    assert model.predict(["qq-81955"], k=1)[0][0][0] != "qq-81955"


def cosine(model, text: str, label: str) -> float:
    """By the words and pieces of words of the labels and the training points that are kept."""
    folder = model._run.folder
    points = list(retrieval_files.point_texts(folder))
    ids, scores = baselines.tfidf_nearest_label(
        [text], model.label_texts, 5, training_texts=points, analyzer="word+char"
    )
    return float(scores[0][ids[0] == model.label_texts[:].index(label)][0])


def test_a_run_that_has_no_lexical_part_goes_on_without(own_data, copy, fixed):
    """As those have that were trained before there was one."""
    info = files.read_record(copy / "retrieval/info.json")
    del info["setting"]["lexical"]
    info["files"] = {name: x for name, x in info["files"].items() if "lexical" not in name}
    files.write_record(copy / "retrieval/info.json", info)
    shutil.rmtree(copy / "retrieval/lexical")
    meta = files.read_record(copy / "meta.json")
    for section in ("config", "resolved"):
        del meta[section]["retrieval"]["lexical"]
    files.write_record(copy / "meta.json", meta)
    (explained,) = predictor.load(copy).explain(TEXTS[:1], k=1)
    assert set(explained[0]["terms"]) == {"de", "clf", "points", "labels"}
    assert launch.start(tiny.config(own_data, **{**FIXED, "retrieval__lexical": None}), copy)


def test_no_held_out_rows_and_no_weights_is_no_retrieval(own_data, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    config = tiny.config(own_data, **WITH, held_out_share=0.0, epochs=1)
    assert list(launch.start(config, tmp_path / "run")["heads"]) == ["concat", "de", "clf"]
    assert "config.retrieval.points" in caplog.text
    # Points are kept all the same: more of them may be remembered.
    kept = tmp_path / "run/retrieval"
    assert sorted(path.name for path in kept.iterdir()) == ["info.json", "points"]


def test_of_a_frugal_classifier_scores_stay_probabilities_times_the_tail(own_data, tmp_path):
    config = tiny.frugal_config("astec", own_data, **FIXED)
    ended = launch.start(config, tmp_path / "run")
    assert list(ended["heads"]) == ["clf+retrieval", "clf"]
    model = predictor.load(tmp_path / "run", tail_weight=0.5)
    (explained,) = model.explain(TEXTS[:1], k=3)
    for label in explained:
        assert sum(label["terms"].values()) == pytest.approx(label["score"], rel=1e-4)


@pytest.mark.parametrize("kind", damage.KINDS)
@pytest.mark.parametrize("name", ["info.json", "points/vectors.npy", "lexical/by_term.data.npy"])
def test_damage_is_told_and_mended(copy, fixed, own_data, caplog, kind, name):
    kind(copy / "retrieval" / name)
    assert predictor.load(copy).heads == ("concat", "de", "clf")
    assert "labels are ranked without retrieval" in caplog.text
    ended = launch.start(tiny.config(own_data, **FIXED), copy)
    assert ended["heads"] == fixed[1]["heads"]
    for path in (fixed[0] / "retrieval").rglob("*.npy"):
        kept = copy / path.relative_to(fixed[0])
        assert kept.read_bytes() == path.read_bytes()


def test_keys_of_another_checkpoint_are_not_used(copy, caplog):
    steps = [int(path.name) for path in (copy / "checkpoints").iterdir()]
    best = open_runs.open_run(copy).step
    (other,) = set(steps) - {best}
    assert predictor.load(copy, step=other).heads == ("concat", "de", "clf")
    assert f"it is of step {best}, this is {other}" in caplog.text
    assert predictor.load(copy, new_labels=["purple hat"]).heads == ("de",)


def test_explanations(fixed, tmp_path):
    model = predictor.load(fixed[0])
    plain = model.predict(TEXTS, k=3)
    known = set(retrieval_files.point_texts(fixed[0]))
    for labels, explained in zip(plain, model.explain(TEXTS, k=3)):
        assert [(label["text"], label["score"]) for label in explained] == labels
        for label in explained:
            assert set(label["terms"]) == {"de", "clf", "points", "labels", "lexical"}
            assert sum(label["terms"].values()) == pytest.approx(label["score"], abs=1e-5)
            assert {voter["text"] for voter in label["because"]["points"]} <= known
            assert {voter["text"] for voter in label["because"]["labels"]} <= set(model.label_texts)
    (tmp_path / "in.txt").write_text("\n".join(TEXTS))
    done = tiny.run(
        "predict", f"--workdir={fixed[0]}", f"--input={tmp_path}/in.txt", "--explain", "--k=3"
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [[label["text"] for label in line["labels"]] for line in lines] == [
        [text for text, _ in labels] for labels in plain
    ]
    assert lines[0]["labels"][0]["because"]["points"][0]["adds"] > 0
    (of_head,) = model.explain(TEXTS[:1], k=1, head="de")
    assert of_head[0]["because"] == {} and set(of_head[0]["terms"]) == {"de"}


def test_settings_are_checked(own_data, tmp_path):
    for change, message in (
        ({"retrieval__choose_by": "P@9"}, r"config\.retrieval\.choose_by = 'P@9'"),
        ({"retrieval__points": -1.0}, r"config\.retrieval\.points = -1\.0: expected at least 0"),
        ({"retrieval__temperature": 0.0}, r"config\.retrieval\.temperature"),
        (
            {"retrieval__enabled": False, "retrieval__points": 0.5},
            r"config\.retrieval\.points = 0\.5 with config\.retrieval\.enabled = False",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            launch.start(tiny.config(own_data, **{**WITH, **change}), tmp_path / "run")
    assert retrieval_choice.grid(("points",))[0] == Setting()


def test_a_full_disk_where_retrieval_is_kept(own_data, fixed, small_disk):
    config = tiny.config(own_data, **FIXED)
    folder = Path(shutil.copytree(fixed[0], small_disk.folder / "run"))
    shutil.rmtree(folder / "retrieval")
    with contextlib.suppress(OSError):
        (small_disk.folder / "rest").write_bytes(bytes(1 << 20))
    os.truncate(small_disk.folder / "rest", (small_disk.folder / "rest").stat().st_size - 16384)
    expected = rf"{folder / 'retrieval'} cannot be written: No space left .*Free some space there"
    with pytest.raises(OSError, match=expected):
        launch.start(config, folder)
    assert not list(folder.glob("retrieval*"))
    (small_disk.folder / "rest").unlink()
    assert launch.start(config, folder)["heads"] == fixed[1]["heads"]
