"""Every layout gives the same data set; its canonical form too; names find folders."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import damage
import numpy as np
import pytest
from layout_files import (
    LABELS,
    TEST,
    TEST_FILTER,
    TRAIN,
    TRAIN_FILTER,
    json_lines,
    matrix,
    write,
    write_filters,
    write_json,
    write_lines_layout,
)
from scipy import sparse

from xmc_jax.data.readers import formats
from xmc_jax.data.summaries import summary
from xmc_jax.data.texts import LineTexts

NGAME_NAMES = ("trn.raw.txt", "tst.raw.txt", "lbl.raw.txt")
PECOS_NAMES = ("X.trn.txt", "X.tst.txt", "output-items.txt")
RAW_NAMES = ("raw/trn_X.txt", "raw/tst_X.txt", "raw/Y.txt")


def own_rows(rows, as_text):
    return [
        {"text": text, "labels": [LABELS[i] for i in labels] if as_text else labels}
        for text, labels in rows
    ]


def write_own(folder, kind):
    """A folder of people's own data in one of its spellings."""
    for name, rows in (("train", TRAIN), ("test", TEST)):
        if kind.startswith("jsonl"):
            write(folder / f"{name}.jsonl", json_lines(own_rows(rows, kind == "jsonl texts")))
            continue
        mark = "\t" if kind.startswith("tsv") else ","
        cells = [
            (text, "|".join(LABELS[i] if kind.endswith("texts") else str(i) for i in labels))
            for text, labels in rows
        ]
        header = f"text{mark}labels\n" if kind == "csv texts" else ""
        lines = "".join(f"{text}{mark}{labels}\n" for text, labels in cells)
        write(folder / f"{name}.{kind[:3]}", header + lines)
    write(folder / "labels.txt", "\n".join(LABELS))
    write_filters(folder)
    return folder


LAYOUTS = {
    "json.gz": write_json,
    "json": lambda folder: write_json(folder, ".json"),
    "lines": write_lines_layout,
    "lines, NGAME": lambda folder: write_lines_layout(folder, NGAME_NAMES),
    "lines, raw folder and npz": lambda folder: write_lines_layout(folder, RAW_NAMES, npz=True),
    "lines, PECOS": lambda folder: write_lines_layout(folder, PECOS_NAMES, npz=True),
    **{
        f"own {kind}": lambda folder, kind=kind: write_own(folder, kind)
        for kind in ("jsonl ids", "jsonl texts", "tsv ids", "tsv texts", "csv ids", "csv texts")
    },
}


def check(dataset):
    for split, rows, pairs in (
        (dataset.train, TRAIN, TRAIN_FILTER),
        (dataset.test, TEST, TEST_FILTER),
    ):
        assert list(split.texts) == [text for text, _ in rows]
        assert isinstance(split.labels, sparse.csr_matrix) and split.labels.dtype == np.float32
        np.testing.assert_array_equal(split.labels.toarray(), matrix(rows))
        assert split.filter_pairs.dtype == np.int64 and split.filter_pairs.tolist() == [
            list(pair) for pair in pairs
        ]
    assert list(dataset.label_texts) == LABELS  # the label without points is kept


@pytest.fixture(scope="module")
def digest(tmp_path_factory):
    return formats.load(write_json(tmp_path_factory.mktemp("digest"))).digest


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_agree(tmp_path, layout, digest):
    folder = LAYOUTS[layout](tmp_path / "LF-Made-Up")
    dataset = formats.load(folder)
    check(dataset)
    assert dataset.name == "LF-Made-Up" and dataset.digest == digest
    empty_row = [note for note in dataset.notes if "rows without labels" in note]
    assert len(empty_row) == 1 and "1 rows" in empty_row[0]
    formats.save(dataset, tmp_path / "canonical")
    again = formats.load(tmp_path / "canonical")
    check(again)
    assert again == formats.Dataset(
        dataset.name, again.train, again.test, again.label_texts, digest, dataset.notes
    )
    assert formats.digest(again.train, again.test, again.label_texts) == digest
    assert isinstance(again.train.texts, LineTexts)


def test_text_recipe(tmp_path):
    folder = write_json(tmp_path)
    dataset = formats.load(folder, text="title+content")
    assert dataset.train.texts[0] == "red apple about red apple"
    assert list(dataset.label_texts) == LABELS  # no content: no trailing blank
    assert dataset.digest != formats.load(folder).digest
    with pytest.raises(ValueError, match="title"):
        formats.load(folder, text="content")


def test_digest_sees_every_part(tmp_path):
    digests = set()
    for change in ("none", "text", "label", "filter", "name of a label"):
        folder = write_json(tmp_path / change, ".json")
        path = folder / ("lbl.json" if change == "name of a label" else "trn.json")
        old, new = {
            "text": ("red apple", "red maple"),
            "label": ("[0, 2]", "[0, 3]"),
            "name of a label": ("pear", "bear"),
        }.get(change, ("", ""))
        path.write_text(path.read_text().replace(old, new) if old else path.read_text())
        if change == "filter":
            write(folder / "filter_labels_train.txt", "0 1\n")
        digests.add(formats.load(folder).digest)
    assert len(digests) == 5


def test_bundled_mini(mini_folder):
    mini = formats.load(formats.find_folder("wordnet-mini"))
    stats = json.loads((mini_folder / "stats.json").read_text())
    assert mini.name == "LF-WordNetTitles-Mini" == stats["name"]
    assert (len(mini.train), len(mini.test)) == (stats["n_train"], stats["n_test"])
    assert len(mini.label_texts) == stats["n_labels"] == mini.train.labels.shape[1]
    assert len(mini.train.filter_pairs) == stats["filter_pairs_train"]
    assert mini.train.labels.nnz / 1850 == pytest.approx(stats["labels_per_point_train"], abs=5e-4)
    assert mini.notes == () and formats.check_sizes(mini) == []
    assert formats.ensure_canonical(mini_folder, text="title") == mini_folder  # small: as it is


def test_filter_matrix():
    found = formats.filter_matrix(np.array([[1, 2], [0, 0], [1, 2]]), (2, 3))
    assert found.dtype == bool and found.nnz == 2
    assert formats.filter_matrix(np.zeros((0, 2), int), (2, 3)).nnz == 0


def test_missing_filters_are_empty(tmp_path):
    folder = write_json(tmp_path)
    (folder / "filter_labels_train.txt").unlink()
    (folder / "filter_labels_test.txt").write_text("")
    dataset = formats.load(folder)
    assert dataset.train.filter_pairs.shape == dataset.test.filter_pairs.shape == (0, 2)


def test_save_is_whole_or_nothing(tmp_path, monkeypatch):
    dataset = formats.load(write_json(tmp_path / "raw"))
    monkeypatch.setattr(sparse, "save_npz", lambda *a, **k: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        formats.save(dataset, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


def test_save_removes_what_a_killed_process_left(tmp_path):
    dataset = formats.load(write_json(tmp_path / "from"))
    for name, age in (("dead", 7 * 3600), ("alive", 3600)):
        leftover = tmp_path / f".saved.{name}.tmp"
        leftover.mkdir()
        os.utime(leftover, (time.time() - age, time.time() - age))
    formats.save(dataset, tmp_path / "saved")
    assert {path.name for path in tmp_path.iterdir()} == {"from", "saved", ".saved.alive.tmp"}


def test_save_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"file/sub cannot be written to .*Choose another folder"):
        formats.save(None, tmp_path / "file" / "sub" / "made")


def test_save_does_not_overwrite(tmp_path):
    dataset = formats.load(write_json(tmp_path / "raw"))
    formats.save(dataset, tmp_path / "out")
    before = (tmp_path / "out" / "dataset.json").stat().st_mtime_ns
    formats.save(dataset, tmp_path / "out")  # the same data: nothing to do
    assert (tmp_path / "out" / "dataset.json").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="something there already"):
        formats.save(dataset, tmp_path / "raw")


def test_changed_canonical_form_is_refused(tmp_path):
    formats.save(formats.load(write_json(tmp_path / "raw")), tmp_path / "out")
    with open(tmp_path / "out" / "train.txt", "a") as file:
        file.write("one more\n")
    with pytest.raises(ValueError, match=r"train\.txt: found .* bytes; expected .*as written"):
        formats.load(tmp_path / "out")
    (tmp_path / "out" / "test_labels.npz").unlink()
    with pytest.raises(ValueError, match=r"no test_labels\.npz"):
        formats.load(tmp_path / "out")
    (tmp_path / "out" / "dataset.json").write_text('{"format_version": 99}')
    write(tmp_path / "out" / "test_labels.npz", "")
    with pytest.raises(ValueError, match="version 99"):
        formats.load(tmp_path / "out")


CANONICAL = (
    "dataset.json",
    *(f"{role}{end}" for role in ("train", "test", "labels") for end in (".txt", "_offsets.npy")),
    *(f"{role}_{end}" for role in ("train", "test") for end in ("labels.npz", "filter.npy")),
)


@pytest.fixture
def whole(tmp_path):
    """A canonical form, made from a raw data set beside it."""
    write_json(tmp_path / "raw")
    formats.save(formats.load(tmp_path / "raw"), tmp_path / "whole")
    assert {path.name for path in (tmp_path / "whole").iterdir()} == set(CANONICAL)
    return tmp_path / "whole"


@pytest.mark.parametrize("kind", damage.KINDS)
@pytest.mark.parametrize("name", CANONICAL)
def test_damage_of_a_canonical_form_is_named_and_nothing_is_made_of_it(whole, name, kind):
    kind(whole / name)
    said = re.escape(name)
    if (kind, name) == (damage.remove, "dataset.json"):
        said = "whole: found a prepared data set without dataset.json"
    with pytest.raises(formats.DataError, match=said):
        formats.load(whole)
    with pytest.raises(formats.DataError, match=said):
        list(summary.prepare(str(whole), str(whole.parent / "out")))
    with pytest.raises(formats.DataError):  # it is not taken for the same data
        list(summary.prepare(str(whole.parent / "raw"), str(whole)))
    assert {path.name for path in whole.parent.iterdir()} == {"raw", "whole"}


@pytest.mark.parametrize("kind", damage.KINDS)
@pytest.mark.parametrize("name", CANONICAL)
def test_a_damaged_copy_in_the_cache_is_made_again(tmp_path, no_small, caplog, name, kind):
    raw, cache = write_json(tmp_path / "raw"), tmp_path / "cache"
    folder = formats.ensure_canonical(raw, text="title", cache_root=cache)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    kind(folder / name)
    assert formats.ensure_canonical(raw, text="title", cache_root=cache) == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert name in caplog.text and f"is written again from {raw}" in caplog.text
    assert [path.name for path in cache.iterdir()] == [folder.name]


def forget_checksums(folder: Path) -> None:
    """As earlier versions wrote it."""
    description = json.loads((folder / "dataset.json").read_text())
    del description["crc32"]
    description["files"] = {name: size for name, (size, _) in description["files"].items()}
    (folder / "dataset.json").write_text(json.dumps(description))


def test_a_canonical_form_with_sizes_alone_is_read_and_its_digest_verified(whole, digest):
    forget_checksums(whole)
    check(formats.load(whole))
    assert formats.load(whole).digest == digest

    def reverse(path: Path) -> None:
        sparse.save_npz(path, sparse.load_npz(path)[::-1], compressed=False)

    for name in ("train.txt", "labels.txt", "train_labels.npz", "test_filter.npy"):
        before = (whole / name).read_bytes()
        (reverse if name.endswith("npz") else damage.flip)(whole / name)
        with pytest.raises(formats.DataError, match="as written"):
            formats.load(whole)
        (whole / name).write_bytes(before)
    check(formats.load(whole))


@pytest.mark.parametrize("name", ["name", "digest", "notes", "files", "format_version"])
def test_a_description_without_its_entries(whole, name):
    description = json.loads((whole / "dataset.json").read_text())
    del description["crc32"], description[name]
    (whole / "dataset.json").write_text(json.dumps(description))
    with pytest.raises(formats.DataError, match=rf"dataset\.json: found .*{name}.* Delete"):
        formats.load(whole)


@pytest.fixture
def no_small(monkeypatch):
    monkeypatch.setattr(formats, "_SMALL_BYTES", 0)


def test_ensure_canonical(tmp_path, no_small, digest, monkeypatch):
    raw, cache = write_json(tmp_path / "LF-Made-Up"), tmp_path / "cache"
    folder = formats.ensure_canonical(raw, text="title", cache_root=cache)
    assert folder.parent == cache and folder.name.startswith("LF-Made-Up-")
    check(formats.load(folder))
    assert formats.load(folder).digest == digest
    assert [path.name for path in cache.iterdir()] == [folder.name]
    assert formats.ensure_canonical(raw, text="title", cache_root=cache) == folder
    assert formats.ensure_canonical(folder, text="title", cache_root=cache) == folder
    other = formats.ensure_canonical(raw, text="title+content", cache_root=cache)
    assert other != folder
    os.utime(raw / "trn.json.gz", ns=(1, 1))  # a touched source is read again
    monkeypatch.setenv("XMC_CACHE", str(tmp_path / "second"))
    third = formats.ensure_canonical(raw, text="title")
    assert third.parent == tmp_path / "second" and third.name not in {folder.name, other.name}


@pytest.mark.parametrize("kind", ["own folder", "one file"])
def test_ensure_canonical_of_own_data(tmp_path, no_small, kind):
    rows = [{"text": f"t{i}", "labels": [f"l{i % 7}", f"t{i - 1}"]} for i in range(50)]
    write(tmp_path / "mine" / "train.jsonl", json_lines(rows))
    path = tmp_path / "mine" / ("train.jsonl" if kind == "one file" else "")
    raw = formats.load(path)
    kept = formats.load(formats.ensure_canonical(path, text="title", cache_root=tmp_path / "c"))
    assert list(kept.train.texts) == list(raw.train.texts) and kept.digest == raw.digest


def test_ensure_canonical_leaves_nothing_after_an_error(tmp_path, no_small):
    raw, cache = write_json(tmp_path / "raw"), tmp_path / "cache"
    write(raw / "tst.json.gz", '{"title": "x", "target_ind": [99]}\n')
    with pytest.raises(ValueError, match="label id 99"):
        formats.ensure_canonical(raw, text="title", cache_root=cache)
    assert not cache.exists()


def test_another_process_was_first(tmp_path, no_small, monkeypatch):
    raw, cache = write_json(tmp_path / "raw"), tmp_path / "cache"
    folder = formats.ensure_canonical(raw, text="title", cache_root=cache)
    formats.write_canonical(raw, folder, text="title")  # loses the race, and says nothing
    assert [path.name for path in cache.iterdir()] == [folder.name]
    check(formats.load(folder))


def test_find_folder(tmp_path, monkeypatch, mini_folder):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XMC_DATA", raising=False)
    made = write_json(tmp_path / "root" / "LF-MobyTitles")
    for data_dir in ("root", "root/LF-MobyTitles", str(made)):
        assert formats.find_folder("mobytitles", data_dir).absolute() == made
    assert formats.find_folder(made) == made
    assert formats.find_folder("root/LF-MobyTitles").absolute() == made
    monkeypatch.setenv("XMC_DATA", str(tmp_path / "root"))
    assert formats.find_folder("MobyTitles") == made
    monkeypatch.delenv("XMC_DATA")
    (tmp_path / "root").rename(tmp_path / "data")
    assert formats.find_folder("LF-MobyTitles").absolute() == tmp_path / "data" / "LF-MobyTitles"
    assert formats.find_folder("wordnet-mini").samefile(mini_folder)
    with pytest.raises(formats.DataError, match=r"Did you mean 'wordnet-mini'\?"):
        formats.find_folder("wordnet-mni")
    assert formats.find_folder("wordnet-mini", "data").samefile(mini_folder)
    # An alias is a folder name too, and one file may be given.
    (tmp_path / "data" / "LF-MobyTitles").rename(tmp_path / "data" / "mobytitles")
    assert formats.load(formats.find_folder("LF-MobyTitles")).name == "LF-MobyTitles"
    write(tmp_path / "mine.tsv", "a\tb\nc\td\n")
    assert formats.find_folder("mine.tsv").name == "mine.tsv"


def test_missing_data_says_where_it_is_offered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XMC_DATA", raising=False)
    with pytest.raises(ValueError) as error:
        formats.find_folder("amazontitles1.3m", str(tmp_path / "nowhere"))
    for part in ("LF-AmazonTitles-1.3M", "nowhere", "trn.json.gz", "XMLRepository.html", "--data"):
        assert part in str(error.value)
    with pytest.raises(ValueError, match=r"looked in .*trn_X_Y\.txt.*LF-WordNetTitles"):
        formats.find_folder("no/such/folder")
    write(tmp_path / "LF-Amazon-131K" / "trn.json.gz", "{}")
    with pytest.raises(ValueError, match=r"found trn\.json\.gz; but no tst\.json .*offered by"):
        formats.load(formats.find_folder("LF-Amazon-131K"))


def test_sizes_are_checked_against_the_catalog(tmp_path):
    dataset = formats.load(write_json(tmp_path / "LF-MobyTitles"))
    found = formats.check_sizes(dataset)
    assert len(found) == 3 and "4 training rows, but the catalog says 21,182" in found[0]
