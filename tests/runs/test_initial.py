"""``init_from``: another run's encoder and heads, and nothing else of it."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny

from xmc_jax.host.signals import Interrupted
from xmc_jax.runs import launch, open_runs
from xmc_jax.systems.frugal import step as frugal_step
from xmc_jax.systems.unidec.step import TABLE
from xmc_jax.training import checkpoints, loop, workdir


def unidec(own_data, **changes):
    return tiny.config(own_data, **{"seed": 1, "epochs": 1, **changes})


def frugal(own_data, **changes):
    """With label texts, a label graph, free weights, and what moves without gradients."""
    sizes = {"graph__neighbours": 4, "graph__tokens": 8, "phases": ((1, True, "pifa"),)}
    return tiny.frugal_config("eclare", own_data, **{"seed": 1, "epochs": 1, **sizes, **changes})


@pytest.fixture(scope="module")
def trained_frugal(own_data, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("frugal") / "run"
    launch.start(frugal(own_data, seed=0), folder)
    return folder


def assert_equal(found, expected) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def same_tokens(folder: Path, source: Path) -> bool:
    read = lambda run: (run / "tokenizer" / "tokenizer.json").read_bytes()
    return read(folder) == read(source)


def test_unidec_begins_with_encoder_and_heads_and_a_table_of_its_own(own_data, trained, tmp_path):
    config = unidec(own_data, init_from=str(trained), table__scale=2.0)
    start = launch.prepare(config, tmp_path, None)
    source = open_runs.open_run(trained).weights
    assert source.params.keys() == {"encoder", "de_head", "clf_head"}
    state = start.run.system.first_state(start.run.data, start.weights)
    assert_equal(state.params, source.params)
    data, system = start.run.data, start.run.system
    labels = system.embedder.de(state.params, data.label_tokens, side="label")
    np.testing.assert_array_equal(state.tables[TABLE].values, np.float32(2) * labels)
    assert (state.tables[TABLE].values != source.tables[TABLE]).any()
    assert not any(np.any(x) for x in jax.tree.leaves((state.opt_state, state.tables[TABLE].state)))
    assert int(state.step) == 0 and same_tokens(tmp_path, trained)


def test_frugal_begins_with_all_but_clusters_and_free_weights(own_data, trained_frugal, tmp_path):
    fresh = launch.prepare(frugal(own_data), tmp_path / "fresh", None).weights
    start = launch.prepare(frugal(own_data, init_from=str(trained_frugal)), tmp_path / "run", None)
    source, mine = open_runs.open_run(trained_frugal).weights, start.weights
    parts = ("tokens", "queries", "text", "graph", "attention")
    assert mine.params.keys() == {*parts, "meta"}
    for name in parts:
        assert_equal(mine.params[name], source.params[name])
    assert_equal(mine.params["meta"], fresh.params["meta"])
    moving = mine.model_state["moving"]
    assert moving.keys() == {"idf", "queries", "text", "graph", "attention"}
    for name, value in moving.items():
        assert_equal(value, (fresh if name == "idf" else source).model_state["moving"][name])
    changed = jax.tree.map(
        lambda x, y: not np.array_equal(x, y), moving, fresh.model_state["moving"]
    )
    assert all(any(jax.tree.leaves(changed[name])) for name in ("queries", "text", "graph"))
    data, system = start.run.data, start.run.system
    state = system.first_state(data, mine)
    table, texts = state.tables[frugal_step.TABLE], system.embedder.texts(mine, data.label_tokens)
    np.testing.assert_array_equal(table.values, system.options.table.scale * texts)
    assert not any(np.any(x) for x in jax.tree.leaves((state.opt_state, table.state)))
    assert same_tokens(tmp_path / "run", trained_frugal)


@pytest.mark.parametrize("family", ["unidec", pytest.param("frugal", marks=pytest.mark.slow)])
def test_a_run_that_goes_on_does_not_read_its_source(family, own_data, request, tmp_path):
    """The source is gone: the run ends as one that was not stopped, and can be opened."""
    trained = request.getfixturevalue("trained" if family == "unidec" else "trained_frugal")
    source = shutil.copytree(trained, tmp_path / "source")
    config = {"unidec": unidec, "frugal": frugal}[family](own_data, init_from=str(source))
    launch.start(config, tmp_path / "whole")
    usual = loop._Loop._stop_or_save

    def stop(self, state, epoch):
        if int(state.step) == 5:
            signal.raise_signal(signal.SIGTERM)
        usual(self, state, epoch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop._Loop, "_stop_or_save", stop)
        with pytest.raises(Interrupted):
            launch.start(config, tmp_path / "stopped")
    assert checkpoints.steps(tmp_path / "stopped") == [5]
    shutil.rmtree(source)
    launch.start(config, tmp_path / "stopped")
    whole, stopped = (open_runs.open_run(tmp_path / name) for name in ("whole", "stopped"))
    assert whole.step == stopped.step > 5
    assert_equal(stopped.weights, whole.weights)


def test_a_run_that_was_never_saved_needs_its_source(own_data, trained, tmp_path):
    """Its first state is made again: without the source this is refused, and nothing is lost."""
    source = shutil.copytree(trained, tmp_path / "source")
    config = unidec(own_data, init_from=str(source))

    def kill(*_):
        raise RuntimeError("killed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "train", kill)
        with pytest.raises(RuntimeError, match="killed"):
            launch.start(config, tmp_path / "run")
    source.rename(tmp_path / "away")
    with pytest.raises(workdir.WorkdirError, match=r"source.*is not a work directory"):
        launch.start(config, tmp_path / "run")
    (tmp_path / "away").rename(source)
    launch.start(config, tmp_path / "run")
    assert checkpoints.steps(tmp_path / "run")


def wrong_source(name: str, trained: Path, trained_frugal: Path, folder: Path) -> Path:
    if name == "empty":
        folder.mkdir()
    elif name == "no checkpoint":
        shutil.copytree(trained, folder, ignore=shutil.ignore_patterns("checkpoints"))
    elif name == "no tokenizer":
        shutil.copytree(trained, folder, ignore=shutil.ignore_patterns("tokenizer"))
    elif name != "nowhere":
        return trained_frugal if name == "other family" else trained
    return folder


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("nowhere", {}, "source is not a work directory of xmc_jax.train"),
        ("empty", {}, "source is not a work directory of xmc_jax.train"),
        ("no checkpoint", {}, "source/checkpoints: no sound checkpoint"),
        ("no tokenizer", {}, "source/tokenizer"),
        ("other family", {}, "that run has none of encoder, de_head, clf_head; it holds"),
        (
            "same",
            {"encoder__dim": 8},
            "has shape (16,) there, (8,) here. Take the same encoder",
        ),
        ("same", {"head_dim": 8}, "de_head['bias'] has shape (16,) there, (8,) here"),
    ],
)
def test_a_wrong_source_is_told_and_leaves_nothing(
    name, changes, said, own_data, trained, trained_frugal, tmp_path
):
    source = wrong_source(name, trained, trained_frugal, tmp_path / "source")
    with pytest.raises((ValueError, OSError)) as error:
        launch.start(unidec(own_data, init_from=str(source), **changes), tmp_path / "run")
    assert said in str(error.value)
    assert not (tmp_path / "run").exists()


def test_the_binary_tells_it_in_one_message(own_data, tmp_path):
    done = tiny.run(
        "train",
        f"--config=configs/unidec.py:{own_data}",
        *tiny.flags(init_from=tmp_path / "none"),
        f"--workdir={tmp_path}/run",
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"{tmp_path}/none is not a work directory" in done.stderr
    assert not list(tmp_path.iterdir())
