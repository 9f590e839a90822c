"""Checkpoints: whole or not at all, the right one is chosen, damage and strangers are noticed."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from conftest import SmallDisk

from xmc_jax import files
from xmc_jax.contracts import Table, TrainState
from xmc_jax.tables.row_adam import init
from xmc_jax.training import checkpoints
from xmc_jax.training.options import Rates
from xmc_jax.training.state import all_finite, make_optimizer, new_state

TABLE = "rows"


def state_at(
    step: int, dim: int = 4, *, table_dtype=jnp.float32, tables: tuple[str, ...] = (TABLE,)
) -> TrainState:
    rng = np.random.default_rng(step)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    params = {"encoder": {"x": draw(50, dim)}, "de_head": {"kernel": draw(dim, dim)}}
    optimizer = make_optimizer(Rates(encoder=0.1, heads=0.1, table=0.0, clip_norm=1.0))
    values = {name: draw(20, dim).astype(table_dtype) for name in tables}
    state = new_state(params, optimizer, values)
    made = {
        name: Table(table, init(table)._replace(m=draw(20, dim).astype(table_dtype)))
        for name, table in values.items()
    }
    return state._replace(step=jnp.int32(step), tables=made)


def like(**options) -> TrainState:
    return jax.eval_shape(lambda: state_at(0, **options))


def save(workdir: Path, step: int, held_out: float | None = None, **options) -> TrainState:
    state = state_at(step, **options)
    checkpoints.save(workdir, state, {"epoch": step // 10, "held_out": held_out})
    return state


def damage(workdir: Path, step: int, pattern: str = "**/*", *, same_size: bool = False) -> Path:
    """Cuts the largest file of a checkpoint in half, or overwrites its bytes."""
    files = [p for p in (workdir / "checkpoints" / str(step)).glob(pattern) if p.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    size = largest.stat().st_size
    largest.write_bytes(b"\xff" * size if same_size else largest.read_bytes()[: size // 2])
    return largest


def assert_equal(found, expected) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert jax.tree.structure(found) == jax.tree.structure(expected)


def test_restored_state_is_the_saved_one(tmp_path):
    save(tmp_path, 10)
    state = save(tmp_path, 20, 3.5)
    found, info = checkpoints.restore_latest(tmp_path, like())
    assert_equal(found, state)
    assert info["step"] == 20 and info["epoch"] == 2 and info["held_out"] == 3.5
    model = checkpoints.restore_weights(tmp_path, 10, like().weights)
    assert_equal(model, state_at(10).weights)


def test_nothing_saved_is_nothing_restored(tmp_path):
    assert checkpoints.restore_latest(tmp_path, like()) is None
    assert checkpoints.best_step(tmp_path) is None and checkpoints.steps(tmp_path) == []


def test_best_is_kept_with_the_last_two(tmp_path):
    for step, score in ((10, 1.0), (20, 4.0), (30, 2.0), (40, None), (50, 3.0)):
        save(tmp_path, step, score)
        (tmp_path / "checkpoints" / "7.tmp").mkdir()
        checkpoints.prune(tmp_path)
    assert checkpoints.best_step(tmp_path) == 20
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["20", "40", "50"]


def test_without_scores_the_last_is_best_and_of_equals_the_later(tmp_path):
    save(tmp_path, 10)
    save(tmp_path, 20)
    assert checkpoints.best_step(tmp_path) == 20
    save(tmp_path, 30, 5.0)
    save(tmp_path, 40, 5.0)
    assert checkpoints.best_step(tmp_path) == 40


def test_same_step_again_only_changes_what_is_said_of_it(tmp_path):
    save(tmp_path, 10)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "checkpoints").rglob("d/*")}
    save(tmp_path, 10, 2.5)
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert checkpoints.info(tmp_path, 10)["held_out"] == 2.5


@pytest.mark.parametrize("same_size", [False, True])
@pytest.mark.parametrize("pattern", ["**/d/*", "model/_METADATA", "optimizer/manifest.ocdbt"])
def test_damaged_checkpoint_falls_back_and_is_written_again(tmp_path, caplog, pattern, same_size):
    older, newer = save(tmp_path, 10), save(tmp_path, 20)
    path = damage(tmp_path, 20, pattern, same_size=same_size)
    found, _ = checkpoints.restore_latest(tmp_path, like())
    assert_equal(found, older)
    assert f"{tmp_path / 'checkpoints/20'} is damaged" in caplog.text
    assert "falling back to the one before" in caplog.text
    if not same_size:
        assert path.name in caplog.text and "bytes" in caplog.text
    assert checkpoints.steps(tmp_path) == [10]
    save(tmp_path, 20)  # training comes to that step again
    assert_equal(checkpoints.restore_latest(tmp_path, like())[0], newer)
    checkpoints.prune(tmp_path)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["10", "20"]


@pytest.mark.parametrize("manifest", ["", "null", "{}", "[1]", None])
def test_broken_or_missing_manifest_is_damage(tmp_path, manifest, caplog):
    older = save(tmp_path, 10, 1.0)
    save(tmp_path, 20, 2.0)
    path = tmp_path / "checkpoints/20" / checkpoints.MANIFEST
    path.unlink() if manifest is None else path.write_text(manifest)
    assert checkpoints.best_step(tmp_path) == 10
    assert "left out" in caplog.text
    assert_equal(checkpoints.restore_latest(tmp_path, like())[0], older)


def test_all_damaged_is_an_error_and_changes_nothing(tmp_path):
    for step in (10, 20):
        save(tmp_path, step)
        damage(tmp_path, step)
    with pytest.raises(checkpoints.CheckpointError, match=r"none of the checkpoints \[10, 20\]"):
        checkpoints.restore_latest(tmp_path, like())
    assert checkpoints.steps(tmp_path) == [10, 20]
    assert checkpoints.best_step(tmp_path) is None


def test_damaged_model_names_the_sound_ones(tmp_path):
    for step in (10, 20):
        save(tmp_path, step)
    damage(tmp_path, 20)
    wanted = like().weights
    with pytest.raises(checkpoints.CheckpointError, match=r"Sound checkpoints here: \[10\]"):
        checkpoints.restore_weights(tmp_path, 20, wanted)
    with pytest.raises(checkpoints.CheckpointError, match="30"):
        checkpoints.restore_weights(tmp_path, 30, wanted)


def test_bytes_changed_in_the_model_are_an_error(tmp_path):
    save(tmp_path, 10)
    (path,) = {damage(tmp_path, 10, "model/d/*", same_size=True)}
    said = rf"{path.name}: found other bytes than were written"
    with pytest.raises(checkpoints.CheckpointError, match=said):
        checkpoints.restore_weights(tmp_path, 10, like().weights)
    manifest = tmp_path / "checkpoints/10" / checkpoints.MANIFEST
    before = json.loads(manifest.read_text())  # of format 2: sizes alone
    sizes = {name: size for name, (size, _) in before["files"].items()}
    manifest.write_text(json.dumps({"format": 2, "files": sizes}))
    with pytest.raises(checkpoints.CheckpointError, match="model: "):
        checkpoints.restore_weights(tmp_path, 10, like().weights)


def test_format_2_is_read(tmp_path):
    state = save(tmp_path, 10, 2.0)
    manifest = tmp_path / "checkpoints/10" / checkpoints.MANIFEST
    before = files.read_record(manifest)
    sizes = {name: size for name, (size, _) in before["files"].items()}
    manifest.write_text(json.dumps({**before, "format": 2, "files": sizes}))
    assert_equal(checkpoints.restore_latest(tmp_path, like())[0], state)
    step, weights = checkpoints.restore_best(tmp_path, like().weights)
    assert step == 10
    assert_equal(weights, state.weights)


def test_best_falls_back_over_all_kinds_of_damage(tmp_path, caplog):
    for step, score in ((10, 1.0), (20, 4.0), (30, 3.0), (40, 2.0)):
        save(tmp_path, step, score)
    damage(tmp_path, 20, "model/d/*", same_size=True)
    damage(tmp_path, 30)
    manifest = tmp_path / "checkpoints/40" / checkpoints.MANIFEST
    manifest.write_text(manifest.read_text().replace('"held_out": 2.0', '"held_out": 2.5'))
    step, weights = checkpoints.restore_best(tmp_path, like().weights)
    assert step == 10
    assert_equal(weights, state_at(10).weights)
    for step in (20, 30, 40):
        assert caplog.text.count(f"{tmp_path / 'checkpoints' / str(step)} cannot be read") == 1
    assert "it was changed since it was written" in caplog.text


def test_a_checkpoint_that_cannot_be_continued(tmp_path, caplog):
    older = save(tmp_path, 10)
    save(tmp_path, 20)
    lacking = lambda step: "no refresh" if step == 20 else None
    found, _ = checkpoints.restore_latest(tmp_path, like(), lacking=lacking)
    assert_equal(found, older)
    assert "checkpoints/20 cannot be continued (no refresh): falling back" in caplog.text
    with pytest.raises(checkpoints.CheckpointError, match=r"none of .*\[10\]\n  10: none at all"):
        checkpoints.restore_latest(tmp_path, like(), lacking=lambda step: "none at all")


@pytest.mark.parametrize("options", [{"dim": 5}, {"table_dtype": jnp.bfloat16}])
def test_checkpoint_of_another_model_lists_the_differences(tmp_path, options):
    save(tmp_path, 10)
    with pytest.raises(checkpoints.CheckpointError, match="checkpoint of another model") as error:
        checkpoints.restore_latest(tmp_path, like(**options))
    assert "tables/rows: checkpoint (20, 4) float32, this model (20, " in str(error.value)
    assert ("encoder/x" in str(error.value)) == ("dim" in options)
    assert checkpoints.steps(tmp_path) == [10]  # not set aside: it is sound


def test_missing_and_surplus_arrays_are_listed(tmp_path):
    save(tmp_path, 10)
    want = like()
    del want.params["de_head"]
    want.params["extra"] = jax.ShapeDtypeStruct((3,), jnp.float32)
    with pytest.raises(checkpoints.CheckpointError) as error:
        checkpoints.restore_latest(tmp_path, want)
    assert "de_head/kernel: checkpoint (4, 4) float32, this model lacks it" in str(error.value)
    assert "extra: checkpoint lacks it, this model (3,) float32" in str(error.value)


def test_full_disk_keeps_the_checkpoint_before(small_disk):
    disk = small_disk.folder
    older = save(disk, 10)
    with pytest.raises(OSError, match="step 20 could not be written") as error:
        save(disk, 20, dim=600)
    assert "Earlier checkpoints are untouched" in str(error.value)
    assert os.listdir(disk / "checkpoints") == ["10"]
    assert_equal(checkpoints.restore_latest(disk, like())[0], older)


def test_kill_between_files_leaves_no_checkpoint(tmp_path):
    save(tmp_path, 10)
    os.rename(tmp_path / "checkpoints/10", tmp_path / "checkpoints/10.tmp")
    assert checkpoints.steps(tmp_path) == []
    state = save(tmp_path, 10)
    assert_equal(checkpoints.restore_latest(tmp_path, like())[0], state)
    assert os.listdir(tmp_path / "checkpoints") == ["10"]


def test_manifest_names_every_file(tmp_path):
    save(tmp_path, 10)
    folder = tmp_path / "checkpoints/10"
    listed = files.read_record(folder / checkpoints.MANIFEST)["files"]
    there = [path for path in folder.rglob("*") if path.is_file()]
    assert listed == {
        str(path.relative_to(folder)): [path.stat().st_size, zlib.crc32(path.read_bytes())]
        for path in there
        if path.name != checkpoints.MANIFEST
    }
    files.write_json(folder / checkpoints.MANIFEST, {"files": {**listed, "gone": 1}})
    assert checkpoints.best_step(tmp_path) is None


def test_all_finite_sees_every_kind_of_array():
    state = state_at(3)
    table, moments = state.tables[TABLE]
    with_table = lambda *parts: state._replace(tables={TABLE: Table(*parts)})
    assert all_finite(state)
    assert not all_finite(with_table(table.at[3, 1].set(jnp.nan), moments))
    assert not all_finite(with_table(table, moments._replace(v=moments.v.at[0, 0].set(jnp.inf))))
    bits = jax.lax.bitcast_convert_type(table.astype(jnp.bfloat16), jnp.uint16)
    assert all_finite(with_table(bits, moments))
    assert not all_finite(with_table(bits.at[0, 0].set(0x7F80), moments))
    assert all_finite(state._replace(tables={}))
    for name in ("params", "model_state", "opt_state"):
        assert not all_finite(state._replace(**{name: {"x": jnp.array([1.0, jnp.nan])}})), name


@pytest.mark.parametrize("tables", [(), ("one",), ("b", "a", "c")], ids=len)
def test_tables_and_model_state_by_name(tmp_path, tables):
    """Also none of them: a dual encoder alone has neither."""
    state = state_at(10, tables=tables)
    if tables:
        means = {"moving": {"mean": jnp.arange(3.0)}, "phase": {"which": jnp.arange(4)}}
        state = state._replace(model_state=means)
    checkpoints.save(tmp_path, state, {"epoch": 1})
    shapes = jax.eval_shape(lambda: state)
    found, info = checkpoints.restore_latest(tmp_path, shapes)
    assert_equal(found, state)
    assert info["format"] == checkpoints.FORMAT
    assert set(found.tables) == set(tables)
    weights = checkpoints.restore_weights(tmp_path, 10, shapes.weights)
    assert_equal(weights, state.weights)


def test_a_table_of_another_name_is_another_model(tmp_path):
    save(tmp_path, 10)
    with pytest.raises(checkpoints.CheckpointError, match="another model") as error:
        checkpoints.restore_latest(tmp_path, like(tables=("other",)))
    assert "tables/rows: checkpoint (20, 4) float32, this model lacks it" in str(error.value)
    assert "tables/other: checkpoint lacks it, this model (20, 4) float32" in str(error.value)
    with pytest.raises(checkpoints.CheckpointError, match=r"optimizer|tables/rows"):
        checkpoints.restore_latest(tmp_path, like(tables=()))


def save_as_before(workdir: Path, state: TrainState) -> None:
    """As versions without a format wrote: one table, model state among the parameters."""
    folder = workdir / "checkpoints" / str(int(state.step))
    table = next(iter(state.tables.values()), Table(None, None))
    trees = {
        "model": {"params": {**state.params, **state.model_state}, "table": table.values},
        "optimizer": {
            "opt_state": state.opt_state,
            "table_state": table.state,
            "step": state.step,
        },
    }
    for name, tree in trees.items():
        checkpoints._write(folder / name, tree)
    sizes = {name: size for name, (size, _) in files.checksums(folder).items()}
    (folder / checkpoints.MANIFEST).write_text(json.dumps({"epoch": 1, "files": sizes}))


@pytest.mark.parametrize("tables", [(), ("one",)], ids=len)
@pytest.mark.parametrize("model_state", [{}, {"moving": {"mean": jnp.arange(3.0)}}], ids=len)
def test_checkpoints_without_a_format_are_read(tmp_path, tables, model_state):
    state = state_at(10, tables=tables)._replace(model_state=model_state)
    save_as_before(tmp_path, state)
    shapes = jax.eval_shape(lambda: state)
    assert_equal(checkpoints.restore_latest(tmp_path, shapes)[0], state)
    assert_equal(checkpoints.restore_weights(tmp_path, 10, shapes.weights), state.weights)
    other = jax.eval_shape(lambda: state_at(10, dim=5, tables=tables))
    with pytest.raises(
        checkpoints.CheckpointError, match=r"params/encoder/x: checkpoint \(50, 4\)"
    ):
        checkpoints.restore_latest(tmp_path, other._replace(model_state=shapes.model_state))


def test_a_checkpoint_without_a_format_has_one_table(tmp_path, caplog):
    save_as_before(tmp_path, state_at(10))
    two = like(tables=("one", "two"))
    with pytest.raises(checkpoints.CheckpointError):
        checkpoints.restore_latest(tmp_path, two)
    assert "tables one, two: there was but one when it was written" in caplog.text
    with pytest.raises(checkpoints.CheckpointError, match="tables one, two"):
        checkpoints.restore_weights(tmp_path, 10, two.weights)


# A save that fails.

SAVES = """
import sys
from pathlib import Path
from xmc_jax.host import console
def main(argv):
    console.setup()
    from test_checkpoints import state_at
    from xmc_jax.training import checkpoints
    try:
        checkpoints.save(Path({folder!r}), state_at(30, dim=400), {{}})
    except OSError as error:
        console.fail(error)
console.run(main)
"""


def full(disk: SmallDisk, blocks: int, files: int) -> None:
    """Leaves room for so many blocks of 4 KiB, and for so many files."""
    disk.remount("size=64m,nr_inodes=1000")
    save(disk.folder, 10)
    save(disk.folder, 20)
    damage(disk.folder, 20)
    status = os.statvfs(disk.folder)
    used = (status.f_blocks - status.f_bfree) * status.f_bsize
    disk.remount(f"size={used + 4096 * blocks},nr_inodes={1000 - status.f_ffree + files}")


@pytest.mark.parametrize(
    ("blocks", "files"), [(0, 99), (1, 99), (20, 99), (99, 1), (99, 2), (99, 4), (99, 8)]
)
def test_a_save_without_room_is_one_message_at_once(small_disk, blocks, files):
    """Orbax's threads tell it in hundreds of lines, and some wait for minutes for the others."""
    full(small_disk, blocks, files)
    path = os.pathsep.join([str(tiny.ROOT), str(Path(__file__).parent), str(tiny.ROOT / "tests")])
    process = subprocess.Popen(
        [sys.executable, "-c", SAVES.format(folder=str(small_disk.folder))],
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.PIPE,
        text=True,
    )
    message = process.stderr.readline()
    told = time.monotonic()
    more = process.communicate(timeout=120)[1]
    assert time.monotonic() - told < 5
    folder = small_disk.folder / "checkpoints"
    assert process.returncode == 1
    assert message + more == (
        f"{folder / '30'}: the checkpoint of step 30 could not be written (No space left on "
        f"device). Earlier checkpoints are untouched, the last good one is {folder / '10'}. Free "
        "some space there, then run the same command again.\n"
    )
    assert sorted(path.name for path in folder.iterdir()) == ["10", "20"]


def test_a_save_that_is_not_permitted(small_disk):
    small_disk.remount("size=64m,ro")
    with pytest.raises(OSError, match="Read-only file system") as error:
        save(small_disk.folder, 10)
    assert "There is none before it. Make it writable, then" in str(error.value)
    assert "space" not in str(error.value)


@pytest.mark.parametrize("fault", [PermissionError(errno.EACCES, "x"), ValueError("odd\nmore")])
def test_what_else_may_fail(tmp_path, monkeypatch, fault):
    def fail(*_):
        raise fault

    monkeypatch.setattr(checkpoints, "_write", fail)
    said = r"\(Permission denied\).*Make it writable" if fault.args[0] == 13 else r"\(odd\)\. "
    with pytest.raises(OSError, match=said):
        save(tmp_path, 10)
    assert not list(tmp_path.glob("checkpoints/*"))
