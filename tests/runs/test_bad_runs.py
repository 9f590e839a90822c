"""Runs that cannot be, or come to a bad end: one clear message, nothing half-written."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tiny

from configs import depsl, unidec
from xmc_jax.runs import launch, open_runs, settings
from xmc_jax.systems import FAMILIES
from xmc_jax.training import checkpoints, loop, workdir
from xmc_jax.training.loop import TrainingError


def end_of(folder: Path) -> dict[str, np.ndarray]:
    """Arrays of the newest checkpoint."""
    newest = folder / "checkpoints" / str(checkpoints.steps(folder)[-1])
    with ocp.StandardCheckpointer() as reader:
        trees = [reader.restore(newest / part) for part in ("model", "optimizer")]
    leaves = jax.tree_util.tree_leaves_with_path(trees)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def assert_same_end(folder: Path, reference: Path) -> None:
    found, expected = end_of(folder), end_of(reference)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    for path in reference.glob("eval-*.json"):
        assert (folder / path.name).read_bytes() == path.read_bytes()


def cut(folder: Path) -> None:
    """Cuts a checkpoint's largest file in half."""
    largest = max(folder.rglob("d/*"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])


@pytest.fixture
def copy(trained, tmp_path):
    """A copy of the finished run, to be damaged."""
    return Path(shutil.copytree(trained, tmp_path / "copy"))


# What cannot be asked for.


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("wordnet-mini,losss=supcon", "Did you mean 'loss'?"),
        ("wordnet-mini,loss", "write loss=VALUE"),
        ("wordnet-mini,paper=iclr", "paper='iclr'; expected thesis or preprint"),
        ("wordnet-mini,debug=perhaps", "'perhaps', expected bool"),
    ],
)
def test_unknown_options(options, said):
    for get_config in (unidec.get_config, depsl.get_config):
        with pytest.raises(ValueError, match=r"expected|VALUE") as error:
            get_config(options)
        assert said in str(error.value)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("batching", "cluster", "Did you mean 'clusters'?"),
        ("fill", "zeros", "expected one of positives, random, none"),
        ("index", "hsnw", "Did you mean 'hnsw'?"),
        ("table__init", "label", "Did you mean 'labels'?"),
        ("table__dtype", "float16", "expected one of float32, bfloat16"),
        ("encoder__compute_dtype", "float64", "expected one of float32, bfloat16"),
        ("encoder__pooling", "max", "expected one of mean, cls"),
        ("de__loss", "softmax", "expected one of ['decoupled_softmax'"),
        ("de__loss", "supcon+bce", "(bce is for config.clf.loss)"),
        ("clf__loss", "bce+bce+supcon", "config.clf.loss"),
        ("log_steps", 0, "expected at least 1"),
        ("refresh_epochs", 0, "expected at least 1"),
        ("de_weight", 1.5, "expected 0 to 1"),
        ("de__temperature", 0.0, "expected at least 0.0001"),
        ("lr__warmup", 1.5, "expected 0 to 1"),
        ("held_out_share", 1.0, "expected 0 to 0.99"),
        ("head_dropout", float("nan"), "expected 0 to 0.99"),
        ("pool_size", 8, "config.pool_size = 8 is smaller than the"),
        ("encoder__vocab_size", 100, "expected at least 256"),
        ("encoder__embeddings", "/no/such/folder", "/no/such/folder"),
    ],
)
def test_wrong_values_name_the_field_and_leave_no_folder(own_data, tmp_path, field, value, said):
    with pytest.raises(ValueError, match=r"expected|smaller|such folder") as error:
        launch.start(tiny.config(own_data, **{field: value}), tmp_path / "run")
    assert said in str(error.value)
    assert field.replace("__", ".") in str(error.value) or value == "/no/such/folder"
    assert not (tmp_path / "run").exists()


def test_joined_batches_need_a_growing_schedule(own_data, tmp_path):
    config = tiny.config(own_data, batching="joined", cluster_schedule=((0, 8), (2, 4)))
    with pytest.raises(ValueError, match="sizes that do not fall"):
        launch.start(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_missing_data(tmp_path):
    for name in (str(tmp_path / "nowhere"), "amazontitles131k"):
        done = tiny.run("train", f"--config=configs/unidec.py:{name}", f"--workdir={tmp_path}/run")
        assert done.returncode == 1 and "Traceback" not in done.stderr
        assert f"no data for '{name}'" in done.stderr or "LF-AmazonTitles-131K" in done.stderr
        assert "trn.json.gz" in done.stderr
        assert not (tmp_path / "run").exists()


def test_no_labels(tmp_path):
    path = tmp_path / "empty.tsv"
    path.write_text("")
    with pytest.raises(ValueError, match=r"empty\.tsv"):
        launch.start(tiny.config(path), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# What changed since.


def test_changed_configuration_and_changed_data(copy, own_data, tmp_path):
    with pytest.raises(workdir.WorkdirError, match=r"lr\.table: there 0\.01, now 0\.02"):
        launch.start(tiny.config(own_data, lr__table=0.02), copy)
    data = tiny.write_tsv(tmp_path / "points.tsv", rows=299)
    config = tiny.config(own_data)
    config.data = str(data)
    with pytest.raises(workdir.WorkdirError, match="the data changed since"):
        launch.start(config, copy)
    with pytest.raises(workdir.WorkdirError, match="the data changed since"):
        open_runs.open_run(copy).load_data(str(data))
    assert sorted(p.name for p in copy.iterdir() if p.name.startswith(".")) == []


def test_data_moved_elsewhere_continue(copy, own_data, tmp_path, trained):
    moved = Path(shutil.copy(own_data, tmp_path / "moved.tsv"))
    config = tiny.config(own_data)
    config.data = str(moved)
    shutil.rmtree(copy / "checkpoints" / str(checkpoints.steps(copy)[-1]))
    launch.start(config, copy)
    assert_same_end(copy, trained)


def test_evaluation_of_moved_data_says_how_to_name_their_place(own_data, tmp_path):
    run, source = tmp_path / "run", Path(shutil.copy(own_data, tmp_path / "before.tsv"))
    launch.start(tiny.config(source, epochs=1), run)
    moved = source.rename(tmp_path / "after.tsv")
    with pytest.raises(workdir.WorkdirError, match=r"not at .*before\.tsv .* with --data=PATH"):
        open_runs.open_run(run).load_data()
    assert open_runs.open_run(run).load_data(str(moved)).test is not None


# Damage.


def test_truncated_checkpoint_falls_back_says_so_and_ends_the_same(copy, own_data, trained, caplog):
    steps = checkpoints.steps(copy)
    cut(copy / "checkpoints" / str(steps[-1]))
    caplog.set_level("INFO")
    launch.start(tiny.config(own_data), copy)
    assert "falling back to the one before" in caplog.text
    assert f"from step {steps[0]} of {steps[1]}" in caplog.text
    assert_same_end(copy, trained)


def test_all_checkpoints_damaged(copy, own_data):
    for folder in (copy / "checkpoints").iterdir():
        cut(folder)
    with pytest.raises(checkpoints.CheckpointError, match="none of the checkpoints"):
        launch.start(tiny.config(own_data), copy)
    for module, flags in (("evaluate", ()), ("predict", ("--input=/dev/null",))):
        done = tiny.run(module, f"--workdir={copy}", *flags)
        assert done.returncode == 1 and "no sound checkpoint" in done.stderr
        assert "Traceback" not in done.stderr


def test_checkpoint_of_another_model(copy, own_data, mini_run):
    shutil.rmtree(copy / "checkpoints")
    shutil.copytree(mini_run / "checkpoints", copy / "checkpoints")
    before = checkpoints.steps(copy)
    for use in (
        lambda: launch.start(tiny.config(own_data), copy),
        lambda: open_runs.open_run(copy),
    ):
        with pytest.raises(checkpoints.CheckpointError, match="another model") as error:
            use()
        assert "params/de_head/kernel: checkpoint (32, 32) float32, this model (16, 16)" in str(
            error.value
        )
    assert checkpoints.steps(copy) == before


def test_missing_refresh_is_made_again_from_its_checkpoint_or_refused(copy, own_data, trained):
    steps = checkpoints.steps(copy)
    shutil.rmtree(copy / "checkpoints" / str(steps[-1]))
    shutil.rmtree(copy / "refresh")
    launch.start(tiny.config(own_data), copy)  # the first checkpoint lies just before refresh 1
    assert_same_end(copy, trained)


def test_metadata_damaged(copy, own_data):
    (copy / "meta.json").write_text("{")
    with pytest.raises(workdir.WorkdirError, match="is not JSON"):
        launch.start(tiny.config(own_data), copy)


# Divergence.


def finite(folder: Path) -> bool:
    return all(np.isfinite(x).all() for x in end_of(folder).values())


@pytest.mark.parametrize("last_of_epoch", [False, True])
def test_divergence_keeps_the_last_good_checkpoint(own_data, tmp_path, monkeypatch, last_of_epoch):
    """An update to infinity is seen at once at the end of an epoch, else by the next loss."""
    per_epoch = 16
    bad = 2 * per_epoch - 1 if last_of_epoch else per_epoch + 3
    factor = loop.Run.factor
    monkeypatch.setattr(
        loop.Run, "factor", lambda run, step: np.inf if step == bad else factor(run, step)
    )
    with pytest.raises(TrainingError) as error:
        launch.start(tiny.config(own_data), tmp_path)
    step = bad + 1 if last_of_epoch else bad + 2
    assert f"step {step} (epoch 1)" in str(error.value)
    assert f"last good checkpoint is that of step {per_epoch} in {tmp_path}" in str(error.value)
    assert checkpoints.steps(tmp_path) == [per_epoch] and finite(tmp_path)


def test_a_device_without_memory_is_told_what_would_need_less(own_data, tmp_path, monkeypatch):
    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")

    monkeypatch.setattr(launch, "train", full)
    with pytest.raises(TrainingError, match=r"allocating 9 bytes.*smaller config\.batch_size"):
        launch.start(tiny.config(own_data), tmp_path / "run")


def test_a_save_at_the_end_of_an_epoch_does_not_stand_for_its_evaluation(
    own_data, trained, tmp_path, monkeypatch
):
    monkeypatch.setattr(loop, "SAVE_SECONDS", -1.0)  # after each step
    launch.start(tiny.config(own_data), tmp_path)
    assert_same_end(tmp_path, trained)
    kept = [checkpoints.info(tmp_path, step) for step in checkpoints.steps(tmp_path)]
    assert kept[-1]["evaluated"] and kept[-1]["held_out"] is not None
    assert kept[-1]["held_out"] == checkpoints.info(trained, kept[-1]["step"])["held_out"]


def test_absurd_learning_rate_is_told_without_a_traceback(own_data, tmp_path):
    done = tiny.run(
        "train",
        f"--config=configs/unidec.py:{own_data}",
        *tiny.flags(lr__table=1e30, lr__encoder=1e30, lr__warmup=0.0),
        f"--workdir={tmp_path}",
    )
    assert done.returncode == 1
    assert (
        "(epoch 0): loss nan" in done.stderr and "the last good checkpoint is none" in done.stderr
    )
    assert "Traceback" not in done.stderr


# Disks.


def test_full_disk_loses_nothing_that_was_saved(small_disk, own_data, trained):
    folder = small_disk.folder / "run"
    (small_disk.folder / "filling").write_bytes(b"x" * 800_000)
    with pytest.raises(OSError, match=r"could not be (written|logged)") as error:
        launch.start(tiny.config(own_data), folder)
    assert "run the same command again" in str(error.value)
    assert (folder / "meta.json").exists()
    assert not [p for p in folder.rglob("*.tmp") if p.name != "metrics.tmp"]
    small_disk.remount("size=64m")
    launch.start(tiny.config(own_data), folder)
    assert_same_end(folder, trained)


def test_disk_full_from_the_beginning(small_disk, own_data):
    disk = small_disk.folder
    (disk / "filling").write_bytes(b"x" * 2**20)
    with pytest.raises(OSError, match="No space left on device"):
        launch.start(tiny.config(own_data), disk / "run")
    assert [p.name for p in disk.iterdir()] == ["filling"]


def test_folders_that_are_no_work_directories(tmp_path, own_data):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path, tmp_path / "nowhere", tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(workdir.WorkdirError, match="is not a work directory"):
            open_runs.open_run(folder)
    for module in ("evaluate", "predict"):
        done = tiny.run(module, f"--workdir={tmp_path}", stdin="")
        assert done.returncode == 1 and "is not a work directory" in done.stderr
        assert "Traceback" not in done.stderr
    command = ("train", f"--config=configs/unidec.py:{own_data}", f"--workdir={tmp_path}/file/run")
    done = tiny.run(*command)
    assert done.returncode == 1 and "cannot be written to" in done.stderr
    assert json.dumps([p.name for p in tmp_path.iterdir()]) == '["file"]'


@pytest.mark.parametrize("family", FAMILIES)
def test_known_names_are_all_accepted(family, own_data):
    make = functools.partial(tiny.frugal_config, "astec") if family == "frugal" else tiny.config
    for field, names in FAMILIES[family].names.items():
        for name in names:
            encoder = "folder" if family == "unidec" and field != "encoder.vocabulary" else "bag"
            given = {"encoder__name": encoder, "gandalf__enabled": True, "retrieval__enabled": True}
            settings.check(make(own_data, **{**given, field.replace(".", "__"): name}))
