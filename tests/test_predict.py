"""Prediction: as a binary and in Python, with everything that can be asked for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny

from xmc_jax import predictor

TEXTS = ["red apple or old river", "wild castle", "copper", "loud violin and round planet"]
IN_BLOCKS = """
import sys
from xmc_jax import predictor
run, texts, out = sys.argv[1:]
model = predictor.load(run)
for name in ("whole", "blocks"):
    predictor.predict_file(model, texts, f"{out}/{name}", embeddings=f"{out}/{name}.npy")
    predictor.BLOCK_TEXTS = 3
"""


@pytest.fixture(scope="module")
def model(trained):
    return predictor.load(trained)


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("".join(text + "\n" for text in TEXTS), encoding="utf-8")
    return path


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_three_lines_of_python(trained):
    model = predictor.load(trained)
    vectors = model.encode(TEXTS)
    labels = model.predict(TEXTS, k=3)
    assert vectors.shape == (4, 32) and [len(row) for row in labels] == [3] * 4
    for row in labels:
        assert all(text in model.label_texts for text, _ in row)
        assert [score for _, score in row] == sorted((s for _, s in row), reverse=True)


@pytest.mark.parametrize("head", ["de", "clf", "concat"])
def test_scores_are_dot_products(model, head):
    ids, scores = model.predict_ids(TEXTS, k=5, head=head)
    vectors, labels = model.encode(TEXTS, head=head), model.label_vectors(head=head)
    np.testing.assert_allclose(
        scores, np.einsum("nd,nkd->nk", vectors, labels[ids]), atol=1e-5, rtol=0
    )
    np.testing.assert_allclose(
        scores, np.sort(vectors @ labels.T, axis=1)[:, ::-1][:, :5], atol=1e-5, rtol=0
    )
    seen = np.asarray(model._run.weights.model_state["seen"])
    lengths = {"de": 1, "clf": np.where(seen, 1, 0.4**2)}  # without points: 0.4 N(CLF(z))
    lengths["concat"] = 1 + lengths["clf"]
    np.testing.assert_allclose((labels**2).sum(axis=1), lengths[head] + 0 * seen, rtol=1e-5)


def test_file_min_score_and_embeddings(trained, model, texts, tmp_path):
    out, vectors = tmp_path / "out.jsonl", tmp_path / "out.npy"
    done = tiny.run(
        "predict",
        f"--workdir={trained}",
        f"--input={texts}",
        f"--output={out}",
        "--k=4",
        "--head=de",
        "--min_score=0.1",
        f"--embeddings={vectors}",
    )
    assert done.returncode == 0, done.stderr
    lines = read(out)
    assert [line["text"] for line in lines] == TEXTS
    expected = model.predict(TEXTS, k=4, head="de", min_score=0.1)
    for line, row in zip(lines, expected):
        assert [(x["text"], x["score"]) for x in line["labels"]] == [
            (text, round(score, 6)) for text, score in row
        ]
        assert all(
            x["score"] >= 0.1 and model.label_texts[x["id"]] == x["text"] for x in line["labels"]
        )
    np.testing.assert_array_equal(np.load(vectors), model.encode(TEXTS, head="de"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.jsonl", "out.npy", "texts.txt"]


def test_standard_input_and_output(trained, model):
    done = tiny.run("predict", f"--workdir={trained}", "--k=1", stdin="\n".join(TEXTS))
    assert done.returncode == 0, done.stderr
    best = [json.loads(line)["labels"][0]["text"] for line in done.stdout.splitlines()]
    assert best == [row[0][0] for row in model.predict(TEXTS, k=1)]


def test_blocks_do_not_show(trained, texts, tmp_path):
    """In programs compiled as for a user: others differ in the last bits from shape to shape."""
    environment = {**os.environ, "XLA_FLAGS": ""}
    command = [sys.executable, "-c", IN_BLOCKS, str(trained), str(texts), str(tmp_path)]
    subprocess.run(command, cwd=tiny.ROOT, env=environment, check=True)
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "blocks").read_bytes()
    np.testing.assert_array_equal(np.load(tmp_path / "whole.npy"), np.load(tmp_path / "blocks.npy"))


def test_exclude_same_text(model):
    label = model.label_texts[3]
    text = f"  {label.upper()} "
    assert model.predict([label], k=64)[0][0][0] != "" and any(
        found == label for found, _ in model.predict([text], k=64)[0]
    )
    without = model.predict([text], k=64, exclude_same_text=True)[0]
    assert len(without) == len(model.label_texts) - 1
    assert label not in [found for found, _ in without]
    few = model.predict([text, "copper"], k=2, exclude_same_text=True)
    assert [len(row) for row in few] == [2, 2]


def test_new_labels_by_text(trained, model, tmp_path, caplog):
    new = ["quiet harp", " red apple", "quiet harp ", " ", "tall tree"]  # the second is known
    more = predictor.load(trained, new_labels=new)
    assert (
        "2 new labels have no classifier row: all labels are ranked by the DE head" in caplog.text
    )
    assert more.heads == ("de",) and more.num_known == len(model.label_texts)
    assert more.label_texts[more.num_known :] == ["quiet harp", "tall tree"]
    every = [label for label, _ in more.predict(["red apple"], k=99)[0]]
    assert len(every) == 66 and every.count("red apple") == every.count("quiet harp") == 1
    assert predictor.load(trained, new_labels=["red apple"]).heads == model.heads  # none is new
    with pytest.raises(
        ValueError, match=r"one string, 'git', which is no file; expected a list of"
    ):
        predictor.load(trained, new_labels="git")
    (row,) = more.predict(["quiet harp"], k=1)
    assert row[0][0] == "quiet harp" and abs(row[0][1] - 1) < 1e-5
    labels = more.label_vectors()
    np.testing.assert_allclose(labels[: model.num_known], model.label_vectors(head="de"), atol=1e-6)
    with pytest.raises(ValueError, match="new labels have no classifier row"):
        more.predict(TEXTS, head="concat")
    path = tmp_path / "new.txt"
    path.write_bytes(b"quiet harp\r\n\r\ncaf\xe9 garden\r\n")
    assert predictor.load(trained, new_labels=path).label_texts[64:] == [
        "quiet harp",
        "caf\xe9 garden",
    ]
    done = tiny.run("predict", f"--workdir={trained}", f"--new_labels={path}", stdin="quiet harp\n")
    assert done.returncode == 0 and "ranked by the DE head" in done.stderr
    assert json.loads(done.stdout)["labels"][0] == {"id": 64, "text": "quiet harp", "score": 1.0}


def test_empty_input(model, tmp_path):
    (tmp_path / "empty").write_text("")
    out, vectors = tmp_path / "out", tmp_path / "out.npy"
    predictor.predict_file(model, str(tmp_path / "empty"), str(out), embeddings=str(vectors))
    assert out.read_text() == "" and np.load(vectors).shape == (0, 32)
    assert model.predict([]) == []


def test_a_blank_text_has_no_labels(model):
    blank, unseen, other = model.predict(["  ", " \u200b\ufeff\u00ad", TEXTS[0]], k=3)
    alone = model.predict(TEXTS[:1], k=3)[0]  # of another shape: the last bit may differ
    assert blank == unseen == [] and [text for text, _ in other] == [text for text, _ in alone]
    np.testing.assert_allclose(*([score for _, score in row] for row in (other, alone)), atol=1e-6)


def test_odd_bytes_are_read_as_cp1252_and_said(model, tmp_path, caplog):
    source, out = tmp_path / "in", tmp_path / "out"
    source.write_bytes(b"\xef\xbb\xbfred apple\r\n\ncaf\xe9 castle\nna\xefve river")
    predictor.predict_file(model, str(source), str(out), k=1)
    assert [line["text"] for line in read(out)] == [
        "red apple",
        "",
        "caf\u00e9 castle",
        "na\u00efve river",
    ]
    assert "in, line 3: byte 0xe9 is not UTF-8, read as cp1252; 2 such lines" in caplog.text


def test_one_string_is_not_a_list_of_texts(model):
    for ask in (model.predict, model.encode):
        with pytest.raises(ValueError, match=r"found one string, 'copper'; expected a list"):
            ask("copper")


def test_more_labels_than_there_are(model):
    assert [len(row) for row in model.predict(TEXTS, k=1000)] == [len(model.label_texts)] * 4


@pytest.mark.parametrize("kind", ["hnsw", "ivf"])
def test_other_indexes(trained, model, kind):
    found = predictor.load(trained, kind=kind).predict_ids(TEXTS, k=5)[0]
    exact = model.predict_ids(TEXTS, k=5)[0]
    assert np.mean([len(set(a) & set(b)) / 5 for a, b in zip(found, exact)]) > 0.7


def test_work_directory_alone_is_enough(trained, model, tmp_path, monkeypatch):
    """The data set is gone, the work directory was moved, the user is elsewhere."""
    folder = shutil.copytree(trained, tmp_path / "moved")
    meta = json.loads((folder / "meta.json").read_text())
    meta["config"]["dataset"] = meta["resolved"]["dataset"] = meta["data"]["folder"] = "/gone"
    (folder / "meta.json").write_text(json.dumps(meta))
    monkeypatch.chdir(tmp_path)
    assert predictor.load("moved").predict(TEXTS) == model.predict(TEXTS)


def test_other_checkpoint(trained, model):
    steps = sorted(int(p.name) for p in (trained / "checkpoints").iterdir())
    first = predictor.load(trained, step=steps[0])
    assert not np.array_equal(
        first.encode(TEXTS), predictor.load(trained, step=steps[1]).encode(TEXTS)
    )


def test_other_checkpoint_by_flag(trained, model):
    steps = sorted(int(path.name) for path in (trained / "checkpoints").iterdir())
    ask = lambda step: tiny.run("predict", f"--workdir={trained}", f"--step={step}", stdin="copper")
    done = ask(steps[0])
    assert done.returncode == 0, done.stderr
    expected = predictor.load(trained, step=steps[0]).predict(["copper"])[0]
    found = [(label["text"], label["score"]) for label in json.loads(done.stdout)["labels"]]
    assert found == [(text, pytest.approx(score, abs=1e-5)) for text, score in expected]
    done = ask(7)
    assert done.returncode == 1 and "there is no such checkpoint" in done.stderr
    assert f"Sound checkpoints here: {steps} (--step)." in done.stderr


def test_errors_leave_nothing(trained, model, texts, tmp_path):
    with pytest.raises(OSError, match="none/out cannot be written"):
        predictor.predict_file(model, str(texts), f"{tmp_path}/none/out")
    with pytest.raises(OSError, match="none"):
        predictor.predict_file(model, f"{tmp_path}/none", f"{tmp_path}/out")
    done = tiny.run("predict", f"--workdir={trained}", f"--new_labels={tmp_path}/none", stdin="")
    assert done.returncode == 1 and f"{tmp_path}/none" in done.stderr
    assert "Traceback" not in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["texts.txt"]


def test_an_unknown_head_is_told_which_there_are(trained, texts, tmp_path):
    done = tiny.run(
        "predict", f"--workdir={trained}", f"--input={texts}", f"--output={tmp_path}/out",
        f"--embeddings={tmp_path}/out.npy", "--head=nonsense",
    )  # fmt: skip
    said = "head 'nonsense': expected one of ('concat', 'de', 'clf'); no run has such a head."
    assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["texts.txt"]


@pytest.mark.parametrize("flag", ["input", "output", "embeddings"])
def test_files_are_checked_before_anything_is_loaded(flag, tmp_path):
    done = tiny.run("predict", "--workdir=nowhere", f"--{flag}={tmp_path}/none/file", stdin="")
    assert done.returncode == 1 and f"{tmp_path}/none/file" in done.stderr
    assert "nowhere" not in done.stderr


def test_failure_on_the_way_leaves_no_output(model, texts, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise ValueError("on the way")

    monkeypatch.setattr(model, "predict_ids", fail)
    out, vectors = str(tmp_path / "out"), str(tmp_path / "out.npy")
    with pytest.raises(ValueError, match="on the way"):
        predictor.predict_file(model, str(texts), out, embeddings=vectors)
    assert [p.name for p in tmp_path.iterdir()] == ["texts.txt"]


def test_texts_may_come_from_a_generator(model):
    expected = model.predict(TEXTS, k=3)
    assert model.predict((text for text in TEXTS), k=3) == expected
    same = model.predict(iter(TEXTS), k=3, exclude_same_text=True)
    assert [len(row) for row in same] == [3] * 4
    np.testing.assert_array_equal(model.encode(text for text in TEXTS), model.encode(TEXTS))
    assert model.predict(np.array(TEXTS), k=3) == model.predict(dict.fromkeys(TEXTS), k=3)


@pytest.mark.parametrize("k", [None, "3", 1.5, 0, -1, True, float("nan")])
def test_k_that_is_no_whole_number(model, k):
    with pytest.raises(ValueError, match=r"k: found .*; expected a whole number, 1 or more"):
        model.predict(TEXTS, k=k)
    with pytest.raises(ValueError, match=r"k: found"):
        model.predict_ids(TEXTS, k=k)


def test_other_arguments_that_are_wrong(model):
    assert model.predict(TEXTS, k=np.int64(2)) == model.predict(TEXTS, k=2)
    vectors = model.encode(TEXTS)
    for wrong in (vectors[:3], vectors[0], np.concatenate([vectors, vectors])):
        with pytest.raises(ValueError, match=r"vectors have shape .*; expected \(4, \.\.\.\)"):
            model.predict_ids(TEXTS, vectors=wrong)
    with pytest.raises(ValueError, match=r"queries \(4, 31\) .*; expected \[n, 32\]"):
        model.predict_ids(TEXTS, vectors=vectors[:, 1:])
    with pytest.raises(ValueError, match="min_score: found nan"):
        model.predict(TEXTS, min_score=float("nan"))
    with pytest.raises(ValueError, match=r"head 'both': expected one of .*; no run has such"):
        model.predict(TEXTS, head="both")
    for wrong in (["a", None], [1], b"text"):
        with pytest.raises(
            ValueError, match=r"text \d \(counted from 0\) is .*; expected a string"
        ):
            model.predict(wrong)
    with pytest.raises(ValueError, match="found one string"):
        model.predict_ids("red apple")


def test_min_score_and_head_of_the_binary(trained):
    for flag, message in (
        ("--min_score=nan", "min_score: found nan; expected a number"),
        ("--head=both", "head 'both': expected one of ('concat', 'de', 'clf'); no run has such a"),
    ):
        done = tiny.run("predict", f"--workdir={trained}", flag, stdin="red apple\n")
        assert done.returncode == 1 and message in done.stderr and done.stdout == ""


@pytest.fixture
def written(trained, texts):
    """Starts ``predict`` into a path."""

    def start(output, *flags):
        return tiny.start(
            "predict", f"--workdir={trained}", f"--input={texts}", f"--output={output}", *flags
        )

    return start


def test_a_pipe_is_written_into(model, written, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    process = written(pipe, "--k=2")
    lines = [json.loads(line) for line in pipe.read_text().splitlines()]
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert pipe.is_fifo() and [line["text"] for line in lines] == TEXTS
    assert sorted(p.name for p in tmp_path.iterdir()) == ["pipe", "texts.txt"]


def test_a_pipe_is_read(trained, tmp_path):
    pipe, out = tmp_path / "pipe", tmp_path / "out"
    os.mkfifo(pipe)
    process = tiny.start("predict", f"--workdir={trained}", f"--input={pipe}", f"--output={out}")
    pipe.write_text("".join(f"{text}\n" for text in TEXTS))
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert [json.loads(line)["text"] for line in out.read_text().splitlines()] == TEXTS


def test_links_are_followed(written, tmp_path):
    for name in ("there", "not_yet"):
        target, link = tmp_path / "far" / name, tmp_path / name
        target.parent.mkdir(exist_ok=True)
        if name == "there":
            target.write_text("old")
            target.chmod(0o600)
        link.symlink_to(target)
        process = written(link)
        assert process.communicate()[1] is not None and process.returncode == 0
        assert link.is_symlink() and len(read(target)) == 4
    assert (tmp_path / "far" / "there").stat().st_mode & 0o777 == 0o600
    assert sorted(p.name for p in (tmp_path / "far").iterdir()) == ["not_yet", "there"]


def test_a_device_stays_a_device(model, written, devices):
    null, full = devices / "null", devices / "full"
    process = written(null)
    process.communicate()
    assert process.returncode == 0 and null.is_char_device()
    process = written(full)
    _, err = process.communicate()
    assert process.returncode == 1 and full.is_char_device()
    said = "cannot be written: No space left on device. Free some space there."
    assert err.splitlines()[-1] == f"{full} {said}"


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--output={folder}", "{folder} cannot be written: it is a folder."),
        ("--embeddings={pipe}", "{pipe} cannot be written: a .npy file begins with"),
        ("--embeddings={folder}/out", "{folder}/out cannot be written: it is to hold labels and"),
    ],
)
def test_targets_that_cannot_be(flag, message, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    names = {"folder": tmp_path, "pipe": pipe}
    flags = (f"--output={tmp_path}/out", flag.format(**names))
    done = tiny.run("predict", "--workdir=nowhere", *flags, stdin="")
    assert done.returncode == 1 and message.format(**names) in done.stderr
    assert "nowhere" not in done.stderr


def test_a_full_disk_names_the_file(trained, model, texts, tmp_path):
    texts.write_text("red apple\n" * 700)
    command = 'ulimit -f 64; exec "$@"'
    arguments = ["-m", "xmc_jax.predict", f"--workdir={trained}", f"--input={texts}"]
    for flag in ("output", "embeddings"):
        target = tmp_path / flag
        others = [f"--{flag}={target}"]
        if flag == "embeddings":  # 90 KB of vectors, and 25 KB of labels
            others += [f"--output={tmp_path / 'small'}", "--min_score=9"]
        call = ["bash", "-c", command, "-", sys.executable, *arguments, *others]
        done = subprocess.run(call, cwd=tiny.ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1] == f"{target} cannot be written: File too large."
        assert [p.name for p in tmp_path.iterdir()] == ["texts.txt"]
