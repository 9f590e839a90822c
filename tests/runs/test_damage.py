"""Files of a run that were damaged: named, made again or fallen back from, never used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import damage
import jax
import numpy as np
import pytest
import tiny

from xmc_jax import predictor
from xmc_jax.runs import launch, open_runs
from xmc_jax.systems.unidec.system import UniDECSystem
from xmc_jax.training import checkpoints, loop, workdir
from xmc_jax.training.loop import TrainingError

TEXTS = ["red apple", "loud engine or old castle"]


@pytest.fixture
def copy(trained, tmp_path) -> Path:
    """A copy of the finished run, to be damaged."""
    return Path(shutil.copytree(trained, tmp_path / "copy"))


@pytest.fixture
def config(own_data):
    return tiny.config(own_data)


def weights_file(folder: Path, step: int, part: str = "model") -> Path:
    """The largest file of a checkpoint."""
    found = (folder / "checkpoints" / str(step) / part).rglob("*")
    return max((p for p in found if p.is_file()), key=lambda path: path.stat().st_size)


def assert_same_end(folder: Path, reference: Path) -> None:
    """The newest parameters and tables, and the evaluation."""
    newest = checkpoints.steps(reference)[-1]
    found, expected = (open_runs.open_run(run, step=newest) for run in (folder, reference))
    jax.tree.map(np.testing.assert_array_equal, found.weights, expected.weights)
    for path in reference.glob("eval-*.json"):
        assert (folder / path.name).read_bytes() == path.read_bytes()


def stopped(config, folder: Path, step: int, monkeypatch) -> None:
    """A run that was killed after the checkpoint of a step within an epoch."""
    save = checkpoints.save

    def save_and_stop(workdir, state, info):
        save(workdir, state, info)
        if int(state.step) == step:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(loop, "SAVE_SECONDS", -1.0)
        patch.setattr(checkpoints, "save", save_and_stop)
        with pytest.raises(KeyboardInterrupt):
            launch.start(config, folder)
    assert checkpoints.steps(folder)[-1] == step


# Checkpoints.


@pytest.mark.parametrize("kind", damage.KINDS)
@pytest.mark.parametrize("name", ["largest", "checkpoint.json"])
def test_predictions_fall_back_to_the_next_best_checkpoint(copy, trained, caplog, kind, name):
    best = checkpoints.best_step(copy)
    (other,) = set(checkpoints.steps(copy)) - {best}
    path = weights_file(copy, best)
    if name != "largest":
        path = copy / "checkpoints" / str(best) / name
    kind(path)
    found = predictor.load(copy)
    assert caplog.text.count("the next best one is taken") == 1 and path.name in caplog.text
    assert found.predict(TEXTS) == predictor.load(trained, step=other).predict(TEXTS)
    with pytest.raises(checkpoints.CheckpointError) as error:
        predictor.load(copy, step=best)
    assert path.name in str(error.value) and f"Sound checkpoints here: [{other}]" in str(
        error.value
    )


def test_a_damaged_optimizer_is_no_reason_not_to_predict(copy, trained, caplog):
    best = checkpoints.best_step(copy)
    damage.flip(weights_file(copy, best, "optimizer"))
    assert predictor.load(copy).predict(TEXTS) == predictor.load(trained).predict(TEXTS)
    assert (
        "the next best one is taken" not in caplog.text and "found other bytes" not in caplog.text
    )


def test_training_goes_on_from_the_checkpoint_before_a_flipped_bit(copy, trained, config, caplog):
    steps = checkpoints.steps(copy)
    path = weights_file(copy, steps[-1], "optimizer")
    damage.flip(path)
    launch.start(config, copy)
    assert "falling back to the one before" in caplog.text and path.name in caplog.text
    assert_same_end(copy, trained)


def test_the_binaries_name_the_file(copy):
    for step in checkpoints.steps(copy):
        damage.flip(weights_file(copy, step))
    done = tiny.run("predict", f"--workdir={copy}", stdin="red apple\n")
    assert done.returncode == 1 and not done.stdout and "no sound checkpoint" in done.stderr
    assert done.stderr.count("found other bytes than were written") == 2
    assert "Traceback" not in done.stderr


# Refreshes.


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("order.npy", damage.swap),
        ("hard_negatives.npy", damage.flip),
        ("hard_negatives.npy", damage.remove),
        ("info.json", damage.cut),
    ],
)
def test_training_goes_back_to_before_a_damaged_refresh(
    config, trained, tmp_path, monkeypatch, caplog, name, kind
):
    folder = tmp_path / "run"
    stopped(config, folder, 20, monkeypatch)
    kind(folder / "refresh" / "1" / name)
    launch.start(config, folder)
    assert "checkpoints/20 cannot be continued" in caplog.text and name in caplog.text
    assert "refresh/1" in caplog.text and "the refresh is made again" in caplog.text
    assert_same_end(folder, trained)


@pytest.mark.parametrize("name", ["order.npy", "info.json", ""])
def test_the_first_refresh_is_made_again(config, trained, tmp_path, monkeypatch, caplog, name):
    """No checkpoint is before it, but the state it came of is known."""
    folder = tmp_path / "run"
    stopped(config, folder, 3, monkeypatch)
    path = folder / "refresh" / "0" / name
    damage.flip(path) if name else shutil.rmtree(path)
    with caplog.at_level("INFO", "absl"):
        launch.start(config, folder)
    assert f"{path}" in caplog.text and "the refresh is made again" in caplog.text
    assert "from step 3 of" in caplog.text
    assert_same_end(folder, trained)


def test_a_first_refresh_that_comes_out_otherwise(config, trained, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    stopped(config, folder, 3, monkeypatch)
    damage.flip(folder / "refresh" / "0" / "order.npy")
    write = UniDECSystem.write_refresh

    def another(system, folder, *arguments):
        facts = write(system, folder, *arguments)
        damage.swap(folder / "order.npy")
        return facts

    with monkeypatch.context() as patch:
        patch.setattr(UniDECSystem, "write_refresh", another)
        for _ in range(2):  # nothing is changed by it
            with pytest.raises(workdir.WorkdirError, match=r"order\.npy: found other") as error:
                launch.start(config, folder)
            assert f"remove {folder / 'checkpoints'}" in str(error.value)
    shutil.rmtree(folder / "checkpoints")
    launch.start(config, folder)
    assert_same_end(folder, trained)


def test_a_refresh_that_is_damaged_meanwhile(config, tmp_path, monkeypatch):
    between = loop._Loop.between_epochs

    def damaging(self, state, epoch):
        if epoch == 1:
            damage.swap(tmp_path / "refresh" / "0" / "order.npy")
        return between(self, state, epoch)

    monkeypatch.setattr(loop._Loop, "between_epochs", damaging)
    config.refresh_epochs = 2
    with pytest.raises(TrainingError, match=r"order\.npy: found other .* Run the same command"):
        launch.start(config, tmp_path)


# What a run wrote before it began.

FILES = ("labels", workdir.FREQUENCY, "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json")


@pytest.mark.parametrize("kind", damage.KINDS)
@pytest.mark.parametrize("name", FILES)
def test_predictions_name_what_is_damaged(copy, name, kind):
    kind(copy / name)
    with pytest.raises(workdir.WorkdirError, match=r"Call xmc_jax\.train .* once more") as error:
        predictor.load(copy, tail_weight=0.1)
    assert name in str(error.value)


@pytest.mark.parametrize("kind", damage.KINDS)
def test_training_makes_them_again(copy, trained, config, caplog, kind):
    for name in FILES:
        kind(copy / name)
    launch.start(config, copy)
    for name in FILES:
        assert (copy / name).read_bytes() == (trained / name).read_bytes(), name
        assert name.split("/")[-1] in caplog.text or name.endswith("config.json")
    assert predictor.load(copy).predict(TEXTS) == predictor.load(trained).predict(TEXTS)


def test_what_comes_out_otherwise_is_refused(copy, config, monkeypatch):
    """Such as the tokenizer of a pretrained folder that changed since."""
    damage.flip(copy / "tokenizer" / "tokenizer.json")
    made = launch.settings.family_of(config).tokenizer

    def another(self, options, texts, folder):
        return made(options, [*texts, "more and more words, more and more"], folder)

    monkeypatch.setattr(type(launch.settings.family_of(config)), "tokenizer", another)
    for _ in range(2):
        with pytest.raises(workdir.WorkdirError, match=r"tokenizer\.json: .* was made again"):
            launch.start(config, copy)


def forget_checksums(folder: Path) -> None:
    """As in work directories of earlier versions."""
    meta = json.loads((folder / "meta.json").read_text())
    del meta["files"], meta["crc32"]
    (folder / "meta.json").write_text(json.dumps(meta))


def test_an_earlier_run_without_checksums(copy, trained, config):
    forget_checksums(copy)
    assert predictor.load(copy).predict(TEXTS) == predictor.load(trained).predict(TEXTS)
    for content in (b"a\nb\n", b"\xff" * 90):
        (copy / "labels").write_bytes(content)
        with pytest.raises(workdir.WorkdirError, match=r"labels holds .* once more"):
            predictor.load(copy)
    for kind in (damage.cut, damage.flip, lambda path: path.write_bytes(b"")):
        shutil.copy(trained / workdir.FREQUENCY, copy)
        shutil.copy(trained / "labels", copy)
        kind(copy / workdir.FREQUENCY)
        with pytest.raises(workdir.WorkdirError, match=r"frequency\.npz cannot be read"):
            predictor.load(copy, tail_weight=0.1)
    damage.swap(copy / "labels")
    launch.start(config, copy)
    for name in ("labels", workdir.FREQUENCY):
        assert (copy / name).read_bytes() == (trained / name).read_bytes()


# meta.json.

ENTRIES = ("config", "resolved", "encoder", "entry", "data", "num_labels", "epochs")
ODD = [
    pytest.param(name, value, id=f"{name}-{value!r}")
    for name in ENTRIES
    for value in (None, 7, "x", {}, [])
    if not (value == 7 and name in ("num_labels", "epochs"))  # these are numbers
]


@pytest.mark.parametrize(("name", "value"), ODD)
def test_an_odd_entry_is_named(copy, config, name, value):
    meta = json.loads((copy / "meta.json").read_text())
    (copy / "meta.json").write_text(json.dumps({**meta, name: value}))
    if value is None:
        (copy / "meta.json").write_text(json.dumps({k: v for k, v in meta.items() if k != name}))
    with pytest.raises(ValueError, match=r"meta\.json|no run wrote|another|data changed"):
        if name in ("config", "epochs"):
            launch.start(config, copy)
        opened = open_runs.open_run(copy, tail_weight=0.1)
        opened.load_data()
        opened.ranker()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"7", b"\xff\xfe", b"[" * 100_000, b'{"epochs": 1}']
)
def test_no_meta_data_at_all(copy, config, content):
    (copy / "meta.json").write_bytes(content)
    for use in (lambda: launch.start(config, copy), lambda: predictor.load(copy)):
        with pytest.raises(workdir.WorkdirError, match=r"meta\.json.*Put back a copy"):
            use()
    assert (copy / "checkpoints").exists()


def test_a_flipped_bit_in_the_meta_data_is_told(copy, caplog):
    content = (copy / "meta.json").read_text()
    assert content.count('"seed": 0') == 2
    (copy / "meta.json").write_text(content.replace('"seed": 0', '"seed": 1'))
    predictor.load(copy)
    assert f"{copy / 'meta.json'} was changed since it was written" in caplog.text


def test_rows_of_the_label_graph(own_data, tmp_path):
    sizes = {"graph__neighbours": 4, "graph__tokens": 8, "phases": ((2, True, "pifa"),)}
    config, run = tiny.frugal_config("eclare", own_data, **sizes), tmp_path / "run"
    launch.start(config, run)
    expected = predictor.load(run).predict(TEXTS)
    names = ("graph_ids.bin", "graph_weights.bin", "info.json")
    before = {name: (run / "features" / name).read_bytes() for name in names}
    for with_checksums in (True, False):
        if not with_checksums:
            forget_checksums(run)
        kind, said = (
            (damage.flip, "{}: found other") if with_checksums else (damage.cut, "features")
        )
        for name in names:
            kind(run / "features" / name)
            with pytest.raises(ValueError, match=said.format(name)):
                predictor.load(run)
            (run / "features" / name).write_bytes(before[name])
        for name in names:
            kind(run / "features" / name)
        launch.start(config, run)
        assert {name: (run / "features" / name).read_bytes() for name in names} == before
        assert predictor.load(run).predict(TEXTS) == expected
