"""Stages of UniDEC: what one does not train keeps its bits, and a stopped run goes on the same."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny

from xmc_jax.contracts import Stage, TrainState
from xmc_jax.host.signals import Interrupted
from xmc_jax.runs import device_memory, launch, open_runs, settings
from xmc_jax.systems import FAMILIES
from xmc_jax.systems.unidec.step import TABLE
from xmc_jax.systems.unidec.system import UniDECSystem
from xmc_jax.tables import row_adam
from xmc_jax.training import checkpoints, loop
from xmc_jax.training.state import warmup_cosine

STAGES = ((1, "encoder"), (1, "tables"), (1, "all"))  # of 16 steps each


def config_of(own_data, **changes):
    return tiny.config(own_data, stages=STAGES, epochs=3, lr__warmup=0.25, **changes)


@pytest.fixture(scope="module")
def whole(own_data, tmp_path_factory) -> Path:
    """A run of an epoch a stage that nothing stopped; all its checkpoints are kept."""
    folder = tmp_path_factory.mktemp("stages") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "prune", lambda folder: None)
        launch.start(config_of(own_data), folder)
    return folder


@pytest.fixture(scope="module")
def start(own_data, tmp_path_factory) -> launch.Start:
    """The run before its first step."""
    return launch.prepare(config_of(own_data), tmp_path_factory.mktemp("start"), None)


def restored(folder: Path, step: int, start: launch.Start) -> TrainState:
    """The state of a checkpoint."""
    like = device_memory.state_shapes(start.run)
    return checkpoints._read_state(folder / "checkpoints" / str(step), like)


def assert_equal(found, expected) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def differ(found, expected) -> bool:
    """Whether every array has other bits."""
    same = jax.tree.map(lambda x, y: np.array_equal(x, y), found, expected)
    return not any(jax.tree.leaves(same))


def test_what_a_stage_does_not_train_keeps_its_bits(whole, start):
    run = start.run
    first = run.system.first_state(run.data, start.weights)
    one, two, three = (restored(whole, step, start) for step in (16, 32, 48))
    assert one.params["encoder"].keys() == first.params["encoder"].keys()
    for name in ("encoder", "de_head"):
        assert differ(one.params[name], first.params[name])
    assert_equal(one.params["clf_head"], first.params["clf_head"])  # the loss of DE is not theirs
    assert_equal(one.tables, first.tables)
    # What the border makes of the first stage's end is what the second one began with.
    begun = run.system.begin_stage(run.data, one, run.stages[1], run.stages[:1])
    assert_equal((two.params, two.opt_state), (begun.params, begun.opt_state))
    values = [state.tables[TABLE].values for state in (begun, two, three)]
    assert differ(values[0], values[1]) and differ(values[1], values[2])
    assert differ(three.params, two.params)
    assert [int(state.step) for state in (one, two, three)] == [16, 32, 48]


def test_a_border_begins_all_moments_anew_and_an_untrained_table_from_the_encoder(whole, start):
    run, options = start.run, start.run.options
    state = restored(whole, 16, start)
    begun = run.system.begin_stage(run.data, state, run.stages[1], run.stages[:1])
    labels = run.system.embedder.de(begun.params, run.data.label_tokens, side="label")
    table = begun.tables[TABLE]
    np.testing.assert_array_equal(table.values, np.float32(options.table.scale) * labels)
    assert_equal(table.state, row_adam.init(table.values))
    assert_equal(begun.opt_state, run.system.optimizer.init(begun.params))
    assert int(begun.step) == 16
    trained = restored(whole, 32, start)
    later = run.system.begin_stage(
        run.data, restored(whole, 32, start), run.stages[2], run.stages[:2]
    )
    assert_equal(later.tables[TABLE].values, trained.tables[TABLE].values)
    assert_equal(later.tables[TABLE].state, row_adam.init(table.values))
    assert differ(trained.tables[TABLE].state, later.tables[TABLE].state)


def test_an_untrained_table_is_not_judged(whole, tmp_path):
    """The dual encoder alone is measured after its stage, and that checkpoint is not chosen."""
    scores = {step: checkpoints.info(whole, step)["held_out"] for step in (16, 32, 48)}
    assert scores[16] is None and scores[32] is not None and scores[48] is not None
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    measured = {line["step"]: line["held_out"] for line in lines if "held_out" in line}
    opened = open_runs.open_run(shutil.copytree(whole, tmp_path / "copy"), step=16)
    found = open_runs.evaluate_run(opened, split="held_out", heads=("de",))
    assert measured[16] == found["heads"]["de"]["filtered"]


def test_the_schedule_restarts(whole, start):
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    rates = {line["step"]: line["lr"] for line in lines if "lr" in line}
    assert sorted(rates) == list(range(1, 49))
    for step, rate in rates.items():
        factor = warmup_cosine((step - 1) % 16, total_steps=16, warmup_steps=4)
        peaks = start.run.options.lr
        assert rate == {n: factor * getattr(peaks, n) for n in ("encoder", "heads", "table")}


def test_losses_of_a_stage(whole):
    """The classifier's is no part of the loss where the encoder alone is trained."""
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps if "loss_clf" in line] == list(range(17, 49))
    assert all(line["loss"] == line["loss_de"] for line in steps[:16])


class Killed(Exception):
    """The process ends here; nothing is saved."""


def kill(*_):
    raise Killed


def stop_after(patch: pytest.MonkeyPatch, step: int, stop: Callable[[], None]) -> None:
    usual = loop._Loop._stop_or_save

    def stop_or_save(self, state, epoch):
        if int(state.step) == step:
            stop()
        usual(self, state, epoch)

    patch.setattr(loop._Loop, "_stop_or_save", stop_or_save)


def assert_same_end(folder: Path, whole: Path, start: launch.Start) -> None:
    assert_equal(restored(folder, 48, start), restored(whole, 48, start))
    (evaluation,) = whole.glob("eval-*.json")
    assert (folder / evaluation.name).read_bytes() == evaluation.read_bytes()


def test_stopped_before_at_and_after_borders(own_data, whole, start, tmp_path, caplog):
    caplog.set_level("INFO")
    for step in (9, 16, 17, 32, 33):
        with pytest.MonkeyPatch.context() as patch:
            stop_after(patch, step, lambda: signal.raise_signal(signal.SIGTERM))
            with pytest.raises(Interrupted):
                launch.start(config_of(own_data), tmp_path)
        assert checkpoints.steps(tmp_path)[-1] == step
    launch.start(config_of(own_data), tmp_path)
    assert [f"from step {step} of 48" in caplog.text for step in (9, 16, 17, 32, 33)] == [True] * 5
    assert_same_end(tmp_path, whole, start)


def test_killed_while_a_stage_begins_and_after(own_data, whole, start, tmp_path, caplog):
    """The state of the border was saved, and the stage begins again from it."""
    caplog.set_level("INFO")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UniDECSystem, "begin_stage", kill)
        with pytest.raises(Killed):
            launch.start(config_of(own_data), tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 20, kill)
        with pytest.raises(Killed):
            launch.start(config_of(own_data), tmp_path)
    assert checkpoints.steps(tmp_path) == [16]
    launch.start(config_of(own_data), tmp_path)
    assert caplog.text.count("from step 16 of 48") == 2
    assert_same_end(tmp_path, whole, start)


def test_stages_are_proportions_of_the_epochs(own_data):
    family, two = FAMILIES["unidec"], ((2, "encoder"), (1, "tables"))
    config = tiny.config(own_data, stages=two)
    stages = lambda epochs: family.stages(tiny.options(config), epochs)
    assert stages(9) == (Stage(0, 6, "encoder"), Stage(6, 3, "tables"))
    assert family.scaled(config.to_dict(), 9) == {"stages": ((6, "encoder"), (3, "tables"))}
    with pytest.raises(ValueError, match=r"1 epochs for the 2 stages of config\.stages: raise"):
        stages(1)
    assert family.stages(tiny.options(tiny.config(own_data)), 9) == (Stage(0, 9, "all"),)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stages": ((1, "heads"),)}, "expected (epochs, one of all, encoder, tables)"),
        ({"stages": ((0, "all"),)}, "at least an epoch each"),
        ({"stages": ((1, "tables"),), "classifier": False}, "there is no table to train"),
    ],
)
def test_wrong_stages(changes, said, own_data):
    with pytest.raises(settings.PlanError) as error:
        settings.check(tiny.config(own_data, **changes))
    assert said in str(error.value)
