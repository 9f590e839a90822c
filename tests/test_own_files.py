"""Own files through the binaries: what was chosen is kept, and prediction reads the same files."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest
import tiny

from xmc_jax import predictor

FLAGS = (
    "--separator=,",
    "--text_column=words",
    "--label_column=what",
    "--encoding=cp1252",
    "--merge_labels",
)


def rows(folder: Path) -> list[tuple[str, list[str]]]:
    """Texts, each with what no ASCII has, and labels."""
    lines = tiny.write_tsv(folder / "plain", rows=150).read_text(encoding="utf-8").splitlines()
    cells = (line.split("\t") for line in lines)
    return [(f"{text} caf\u00e9 {i}", labels.split("|")) for i, (text, labels) in enumerate(cells)]


@pytest.fixture(scope="module")
def odd(tmp_path_factory) -> Path:
    """CSV as cp1252, names that are not usual, labels with commas between them, twins."""
    folder = tmp_path_factory.mktemp("odd")
    lines = ["sku,words,what\n"]
    for i, (text, labels) in enumerate(rows(folder)):
        labels = [label.upper() if i % 7 == 0 else label for label in labels]
        lines.append(f'{i},{text},"{", ".join(labels)}"\n')
    (folder / "points.csv").write_bytes("".join(lines).encode("cp1252"))
    return folder / "points.csv"


@pytest.fixture(scope="module")
def odd_run(odd, tmp_path_factory) -> Path:
    """The work directory of a run on it."""
    folder = tmp_path_factory.mktemp("run") / "run"
    command = (f"--config=configs/unidec.py:{odd}", f"--workdir={folder}", *tiny.flags(epochs=1))
    done = tiny.run("train", *command, *FLAGS)
    assert done.returncode == 0, done.stderr
    assert "training rows 120   test rows 30   labels 63\n" in done.stdout
    return folder


def texts_of(output: str) -> list[str]:
    """Texts that were predicted for."""
    return [json.loads(line)["text"] for line in output.splitlines()]


def test_prepare_shows_rows_as_understood_and_frequent_labels(odd):
    done = tiny.run("prepare", f"--input={odd}", *FLAGS)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    first = lines.index("  the first rows as understood, text -> labels:") + 1
    assert all(" caf\u00e9 " in line and "' -> '" in line for line in lines[first : first + 3])
    (frequent,) = (line for line in lines if "most frequent labels" in line)
    assert frequent.count("', ") == 0 and frequent.count("' ") == 10
    assert "differ from another one" in done.stdout and "were merged" in done.stdout


def test_a_run_keeps_how_its_files_are_read(odd, odd_run):
    """Neither evaluation, nor prediction, nor more training needs the flags again."""
    reading = json.loads((odd_run / "meta.json").read_text())["resolved"]["reading"]
    assert reading == {
        "separator": ",",
        "text_column": "words",
        "label_column": "what",
        "encoding": "cp1252",
        "merge_labels": True,
        "version": 2,
    }
    done = tiny.run("evaluate", f"--workdir={odd_run}")
    assert done.returncode == 0, done.stderr
    same = (f"--config=configs/unidec.py:{odd}", f"--workdir={odd_run}", *tiny.flags(epochs=1))
    done = tiny.run("train", *same)
    assert done.returncode == 0, done.stderr
    done = tiny.run("train", *same, "--separator=;")
    assert done.returncode == 1 and "reading.separator: there ',', now ';'" in done.stderr
    done = tiny.run("predict", f"--workdir={odd_run}", f"--input={odd}", "--k=1")
    assert done.returncode == 0, done.stderr
    assert texts_of(done.stdout) == [text for text, _ in rows(odd.parent)]
    new = odd.parent / "new.txt"
    new.write_bytes("caf\u00e9 cr\u00e8me\n".encode("cp1252"))  # of the run's encoding too
    assert predictor.load(odd_run, new_labels=new).label_texts[-1] == "caf\u00e9 cr\u00e8me"


def test_a_prepared_folder_keeps_it_too(odd, tmp_path):
    prepared, run = tmp_path / "prepared", tmp_path / "run"
    done = tiny.run("prepare", f"--input={odd}", f"--output={prepared}", *FLAGS)
    assert done.returncode == 0, done.stderr
    kept = json.loads((prepared / "dataset.json").read_text())["reading"]
    assert kept["separator"] == "," and kept["text_column"] == "words" and kept["merge_labels"]
    command = (f"--config=configs/unidec.py:{prepared}", f"--workdir={run}")
    done = tiny.run("train", *command, *tiny.flags(epochs=1), "--separator=,")
    assert done.returncode == 1 and "give it where the rows are prepared" in done.stderr
    assert not run.exists()
    done = tiny.run("train", *command, *tiny.flags(epochs=1))
    assert done.returncode == 0, done.stderr
    done = tiny.run("predict", f"--workdir={run}", f"--input={odd}", "--k=1")
    assert done.returncode == 0, done.stderr
    assert texts_of(done.stdout) == [text for text, _ in rows(odd.parent)]


TEXTS = ["red apple", "old river caf\u00e9", "loud violin"]
FILES = {
    "a.tsv": "".join(f"{text}\tanswer|other\n" for text in TEXTS),
    "b.tsv": "id\ttitle\n" + "".join(f"{i}\t{text}\n" for i, text in enumerate(TEXTS)),
    "c.tsv": "".join(f"{text}\n" for text in TEXTS),
    "d.tsv": "".join(f'"{text}"\t"answer|other"\n' for text in TEXTS),
    "a.csv": "text,labels\n" + "".join(f'"{text}", "answer|other"\n' for text in TEXTS),
    "b.csv": "Titel;Kategorie\n" + "".join(f"{text};answer\n" for text in TEXTS),
    "a.jsonl": "".join(json.dumps({"title": t, "labels": ["answer"]}) + "\n" for t in TEXTS),
    "b.json": "".join(json.dumps({"text": text}) + "\n" for text in TEXTS),
    "a.txt": "".join(f"{text}\n" for text in TEXTS),
}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("name", FILES)
def test_prediction_takes_what_prepare_takes(trained, tmp_path, name, encoding):
    """Texts without their answers; compressed or not; by a byte order mark."""
    content = FILES[name].encode(encoding)
    (tmp_path / name).write_bytes(content)
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content))
    for path in (tmp_path / name, tmp_path / f"{name}.gz"):
        assert list(predictor.read_texts(path)) == TEXTS


@pytest.mark.parametrize("name", ["a.tsv", "a.csv", "a.jsonl"])
def test_prediction_of_a_table_by_the_binary(trained, tmp_path, name):
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(FILES[name].encode()))
    done = tiny.run("predict", f"--workdir={trained}", f"--input={tmp_path}/{name}.gz", "--k=1")
    assert done.returncode == 0, done.stderr
    assert texts_of(done.stdout) == TEXTS and "answer" not in done.stdout


def test_prediction_of_files_that_cannot_be_read(trained, tmp_path):
    wide = tmp_path / "wide.tsv"
    wide.write_text("".join(f"{i}\t{text}\tx\n" for i, text in enumerate(TEXTS)))
    latin = tmp_path / "latin.txt"
    latin.write_bytes("caf\u00e9\n".encode("cp1252") * 50)
    plain = shutil.copy(wide, tmp_path / "plain.txt")
    for arguments, said in (
        ((f"--input={wide}",), "wide.tsv, line 1: found 3 columns"),
        ((f"--input={latin}",), "latin.txt, line 1: found byte 0xe9, and 50 of 50 lines"),
        ((f"--input={plain}", "--text_column=2"), "expected a file that ends in .tsv"),
        ((f"--input={latin}", "--encoding=latin-one"), "found no encoding of that name"),
    ):
        out = tmp_path / "out"
        done = tiny.run("predict", f"--workdir={trained}", f"--output={out}", *arguments)
        assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr
        assert not out.exists()
    done = tiny.run("predict", f"--workdir={trained}", f"--input={wide}", "--text_column=2")
    assert done.returncode == 0 and texts_of(done.stdout) == TEXTS
    done = tiny.run("predict", f"--workdir={trained}", f"--input={latin}", "--encoding=cp1252")
    assert done.returncode == 0 and texts_of(done.stdout) == ["caf\u00e9"] * 50
    done = tiny.run("predict", f"--workdir={trained}", stdin="red apple\tanswer\n")
    assert done.returncode == 0 and "each line is taken for one text" in done.stderr


def test_refusals_by_the_binary_leave_nothing(odd, tmp_path):
    (tmp_path / "old").mkdir()
    out = tmp_path / "old" / "new" / "deep" / "out"
    for flags, said in (
        (FLAGS[1:3], "points.csv, line 2: found byte 0xe9, and 150 of 151 lines"),
        (FLAGS[3:], "points.csv, line 1: found 3 columns (sku, words, what)"),
        (FLAGS[1:], "--separator=,"),
        (("--encoding=none", *FLAGS[:3]), "--encoding=none: found no encoding"),
        (("--text_column=nope", *FLAGS[2:]), "expected one called nope"),
    ):
        done = tiny.run("prepare", f"--input={odd}", f"--output={out}", *flags)
        assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr
        assert [*tmp_path.iterdir()] == [tmp_path / "old"] and not [*(tmp_path / "old").iterdir()]
