"""The work directory: who may use it, what is compared, what a kill leaves of a start."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from xmc_jax import files
from xmc_jax.training import workdir

CONFIG = {"dataset": "x", "data": "", "lr": {"table": 0.01}, "cluster_schedule": ((0, 4), (5, 8))}


def began(folder: Path, config: dict = CONFIG) -> dict:
    assert workdir.claim(folder, config) is None
    return workdir.begin(folder, {"config": config, "epochs": 2})


def test_new_then_continued(tmp_path):
    folder = tmp_path / "deep" / "run"
    meta = began(folder)
    assert workdir.claim(folder, CONFIG) == {**meta, "resolved": CONFIG}
    assert meta["epochs"] == 2
    assert os.listdir(folder) == ["meta.json"]


def test_changed_configuration_lists_every_difference(tmp_path):
    began(tmp_path)
    changed = {**CONFIG, "lr": {"table": 0.02}, "new": 1, "cluster_schedule": ((0, 4), (5, 9))}
    with pytest.raises(workdir.WorkdirError) as error:
        workdir.claim(tmp_path, changed)
    for part in (
        f"{tmp_path} holds a run with another configuration",
        "lr.table: there 0.01, now 0.02",
        "new: there None, now 1",
        "cluster_schedule: there [[0, 4], [5, 8]], now [[0, 4], [5, 9]]",
        "another --workdir",
    ):
        assert part in str(error.value)
    assert "dataset" not in str(error.value)


def test_fields_of_later_versions_are_compared_only_if_they_were_given(tmp_path):
    began(tmp_path)
    later = {**CONFIG, "lr": {"table": 0.01, "decay": 0.5}, "extra": {"enabled": True}}
    assert workdir.claim(tmp_path, later, ["lr.table"])["resolved"] == later
    for given in (["extra.enabled"], None):
        with pytest.raises(workdir.WorkdirError, match="enabled: there None, now True") as error:
            workdir.claim(tmp_path, later, given)
        assert ("lr.decay" in str(error.value)) == (given is None)
    with pytest.raises(workdir.WorkdirError, match=r"lr\.table: there 0\.01, now None"):
        workdir.claim(tmp_path, {**later, "lr": {}}, [])


def test_fields_that_were_left_open_later_keep_the_value_of_the_run(tmp_path):
    assert workdir.claim(tmp_path, CONFIG) is None
    workdir.begin(tmp_path, {"config": CONFIG, "resolved": CONFIG, "epochs": 2})
    later = {**CONFIG, "lr": {"table": None}}
    assert workdir.claim(tmp_path, later, [])["resolved"]["lr"] == {"table": 0.01}
    for given in (["lr.table"], None):
        with pytest.raises(workdir.WorkdirError, match=r"lr\.table: there 0\.01, now None"):
            workdir.claim(tmp_path, later, given)


def test_data_may_lie_elsewhere(tmp_path):
    began(tmp_path)
    assert workdir.claim(tmp_path, {**CONFIG, "data": "/new/place"}) is not None


def test_start_that_never_began_leaves_nothing(tmp_path):
    folder = tmp_path / "run"
    assert workdir.claim(folder, CONFIG) is None
    (folder / "tokenizer").mkdir()
    (folder / "labels").write_text("a\n")
    workdir.discard(folder)
    assert not folder.exists()
    began(folder)
    workdir.discard(folder)  # it has begun: nothing happens
    assert (folder / "meta.json").exists()


def test_what_a_killed_start_left_is_not_used(tmp_path):
    assert workdir.claim(tmp_path, CONFIG) is None
    (tmp_path / "tokenizer").mkdir()  # of another vocabulary size, perhaps
    (tmp_path / "log.txt").write_text("the user's")
    assert workdir.claim(tmp_path, {**CONFIG, "dataset": "y"}) is None
    assert not (tmp_path / "tokenizer").exists() and (tmp_path / "log.txt").exists()


@pytest.mark.parametrize("name", ["checkpoints", "refresh", "metrics.jsonl"])
def test_what_a_run_wrote_after_it_began_is_never_removed(tmp_path, name):
    """A power cut may leave the mark of a start; a person or a disk may lose meta.json."""
    began(tmp_path)
    (tmp_path / workdir.UNFINISHED).touch()
    assert workdir.claim(tmp_path, CONFIG) is not None
    assert os.listdir(tmp_path) == ["meta.json"]  # the mark goes when the run is continued
    (tmp_path / workdir.UNFINISHED).touch()
    (tmp_path / "meta.json").unlink()
    (tmp_path / name).mkdir()
    (tmp_path / "labels").touch()
    with pytest.raises(workdir.WorkdirError, match=f"holds {name}. Put meta.json back"):
        workdir.claim(tmp_path, CONFIG)
    workdir.discard(tmp_path)
    assert (tmp_path / name).exists()


def test_the_checksums_of_what_was_written_before(tmp_path):
    assert workdir.claim(tmp_path, CONFIG) is None
    (tmp_path / "labels").write_text("a\n")
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("the user's")
    meta = workdir.begin(tmp_path, {"config": CONFIG, "epochs": 2})
    assert list(meta["files"]) == ["labels", "tokenizer/tokenizer.json"]
    assert workdir.damage(tmp_path, meta) is None
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("[]")
    assert workdir.damage(tmp_path, meta, "labels") is None
    said = f"{tmp_path}/tokenizer/tokenizer.json: found other bytes than were written"
    assert workdir.damage(tmp_path, meta) == said
    workdir.set_aside_damaged(tmp_path, meta)
    assert {"labels", "tokenizer.damaged"} < set(os.listdir(tmp_path))
    assert "expected 2 bytes" in workdir.damage(tmp_path, meta, "tokenizer")


@pytest.mark.parametrize("name", workdir.OURS)
def test_folder_with_the_files_of_something_else_is_refused(tmp_path, name):
    (tmp_path / name).write_text("precious")
    with pytest.raises(workdir.WorkdirError, match=f"is not a work directory.*holds {name}"):
        workdir.claim(tmp_path, CONFIG)
    workdir.discard(tmp_path)
    assert (tmp_path / name).read_text() == "precious"


def test_path_below_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "run", tmp_path / "file"):
        with pytest.raises(workdir.WorkdirError, match=r"cannot be written to .*--workdir"):
            workdir.claim(folder, CONFIG)


def test_read_only_file_system(small_disk):
    disk = small_disk.folder
    began(disk / "run")
    small_disk.remount("ro")
    for folder in (disk / "run", disk / "new"):
        with pytest.raises(workdir.WorkdirError, match="Read-only file system"):
            workdir.claim(folder, CONFIG)
    with pytest.raises(OSError, match=r"eval\.json cannot be written: Read-only file system"):
        files.write_json(disk / "run" / "eval.json", {})


def test_one_process_at_a_time(tmp_path):
    folder = tmp_path / "run"
    with workdir.held(folder):
        with pytest.raises(workdir.WorkdirError, match="another process is training there"):
            with workdir.held(folder):
                pass
    with workdir.held(folder):
        pass
    assert os.listdir(folder) == []
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "run", tmp_path / "file"):
        with pytest.raises(workdir.WorkdirError, match="cannot be written to"):
            with workdir.held(path):
                pass


@pytest.mark.parametrize(("text", "said"), [(None, "does not exist"), ("{", "is not JSON")])
def test_not_a_work_directory(tmp_path, text, said):
    if text is not None:
        (tmp_path / "meta.json").write_text(text)
    with pytest.raises(workdir.WorkdirError, match=f"meta.json {said}"):
        workdir.read_json(tmp_path / "meta.json")
    with pytest.raises(workdir.WorkdirError, match="does not exist"):
        (tmp_path / "file").write_text("")
        workdir.read_json(tmp_path / "file" / "meta.json")


def test_write_json_is_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.json"
    files.write_json(path, {"a": np.float32(1.5), "b": np.arange(2), "c": Path("x"), "d": "é"})
    assert json.loads(path.read_text()) == {"a": 1.5, "b": [0, 1], "c": "x", "d": "é"}
    with pytest.raises(TypeError, match="object"):
        files.write_json(path, object())
    assert os.listdir(tmp_path) == ["a.json"] and json.loads(path.read_text())["a"] == 1.5


def test_versions_and_flatten():
    found = workdir.versions()
    assert {"python", "jax", "numpy", "xmc_jax"} <= found.keys()
    assert workdir.flatten({"a": {"b": {"c": 1}}, "d": 2}) == {"a.b.c": 1, "d": 2}


def test_folders_above_a_run_that_never_began_go_with_it(tmp_path):
    folder = tmp_path / "new" / "deep" / "run"
    with pytest.raises(ValueError), workdir.held(folder):
        workdir.claim(folder, {})
        workdir.discard(folder)
        raise ValueError
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError), workdir.held(folder):
        workdir.claim(folder, {})
        workdir.begin(folder, {"config": {}, "epochs": 1})
        workdir.discard(folder)
        raise ValueError
    assert (folder / "meta.json").exists()
