"""A killed run that is started again ends as one that was not: bit for bit, on a CPU."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tiny

pytestmark = pytest.mark.slow

# Read by the killed processes only: moments of a millisecond last long enough to be hit.
SLOW = """
import os, time
rename = os.rename
def slow(source, target, *arguments, **options):
    time.sleep(1.0 if str(source).endswith(".tmp") else 0.0)
    return rename(source, target, *arguments, **options)
os.rename = slow
"""


@pytest.fixture(scope="module")
def slowly(tmp_path_factory) -> dict[str, str]:
    """Environment in which finished checkpoints and refreshes keep their temporary names."""
    folder = tmp_path_factory.mktemp("slow")
    (folder / "sitecustomize.py").write_text(SLOW)
    return {"PYTHONPATH": str(folder)}


def arrays(workdir: Path) -> dict[str, np.ndarray]:
    """All arrays of the newest checkpoint: parameters, table, moments, step."""
    newest = max((workdir / "checkpoints").iterdir(), key=lambda path: int(path.name))
    with ocp.StandardCheckpointer() as reader:
        trees = {part: reader.restore(newest / part) for part in ("model", "optimizer")}
    leaves = jax.tree_util.tree_leaves_with_path(trees)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def log(workdir: Path) -> list[dict]:
    """``metrics.jsonl`` without times, and without the summaries of single epochs."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    times = ("seconds", "tokens_per_second", "queries_per_second")
    lines = [{k: v for k, v in line.items() if k not in times} for line in lines]
    return [line for line in lines if "epoch_steps" not in line]


def assert_same_end(workdir: Path, reference: Path) -> None:
    found, expected = arrays(workdir), arrays(reference)
    assert found.keys() == expected.keys()
    assert any("['optimizer']['tables']" in name for name in found) and any(
        "opt_state" in n for n in found
    )
    for name, value in expected.items():
        assert value.dtype == found[name].dtype, name
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    evaluations = sorted(path.name for path in reference.glob("eval-*.json"))
    assert evaluations and evaluations == sorted(path.name for path in workdir.glob("eval-*.json"))
    for name in evaluations:
        assert (workdir / name).read_bytes() == (reference / name).read_bytes()
    assert log(workdir) == log(reference)  # every step's losses, every held-out metric
    assert not list(workdir.rglob("*.tmp")) and not list(workdir.rglob(".unfinished"))


def wait_for(seen: Callable[[], bool], process) -> None:
    deadline = time.monotonic() + 120
    while not seen():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the moment did not come"
        time.sleep(0.002)


def last_step(workdir: Path) -> int:
    path = workdir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


def holds(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


MOMENTS = {  # how it is seen, what lies about afterwards, the step that the run resumes from
    "between steps": (lambda run: last_step(run) >= 70, None, 64),
    "during a save": (lambda run: holds(run / "checkpoints/64.tmp"), "checkpoints/64.tmp", None),
    "during a refresh": (lambda run: holds(run / "refresh/1.tmp"), "refresh/1.tmp", 64),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_and_started_again(moment, mini_run, mini_flags, slowly, tmp_path):
    seen, left_over, resumed_from = MOMENTS[moment]
    workdir = tmp_path / "run"
    command = ("train", *mini_flags, f"--workdir={workdir}")
    process = tiny.start(*command, environment=slowly)
    wait_for(lambda: seen(workdir), process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    if left_over:
        assert (workdir / left_over).exists()
    done = tiny.run(*command)
    assert done.returncode == 0, done.stderr
    assert (f"from step {resumed_from} of 128" in done.stderr) == (resumed_from is not None)
    assert_same_end(workdir, mini_run)


def test_signals_save_and_say_how_to_continue(mini_run, mini_flags, slowly, tmp_path):
    workdir = tmp_path / "run"
    command = ("train", *mini_flags, f"--workdir={workdir}")
    refreshing = lambda: (workdir / "refresh/0.tmp/info.json").exists()
    training = lambda: last_step(workdir) >= 80
    for seen, number, code in ((refreshing, "SIGTERM", 143), (training, "SIGINT", 130)):
        process = tiny.start(*command, environment=slowly)
        wait_for(seen, process)
        process.send_signal(getattr(signal, number))
        out, err = process.communicate(timeout=120)
        assert process.returncode == code and "Traceback" not in err, err
        saved = max((int(path.name) for path in workdir.glob("checkpoints/*")), default=0)
        said = f"{number}: step {saved} of 128 is saved in {workdir}. Run the same command again"
        assert said in out + err
        assert not (workdir / "refresh/0").exists() if saved == 0 else 80 <= saved < 128
    done = tiny.run(*command)
    assert done.returncode == 0, done.stderr
    assert f"from step {saved} of 128" in done.stderr
    assert_same_end(workdir, mini_run)


def test_killed_with_label_texts_as_points(own_data, slowly, tmp_path):
    """The graph is made again when a run goes on: it must come out the same."""
    options = (f"--config=configs/unidec.py:{own_data}", *tiny.flags(gandalf__enabled=True))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = tiny.run("train", *options, f"--workdir={whole}")
    assert done.returncode == 0 and "label texts join" in done.stderr, done.stderr
    process = tiny.start("train", *options, f"--workdir={killed}", environment=slowly)
    wait_for(lambda: last_step(killed) >= 30, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    again = tiny.run("train", *options, f"--workdir={killed}")
    assert again.returncode == 0 and "continuing" in again.stderr, again.stderr
    assert_same_end(killed, whole)


def test_finished_run_is_only_evaluated(mini_run, mini_flags, tmp_path):
    folder = shutil.copytree(mini_run, tmp_path / "run")  # modification times too
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    (evaluation,) = folder.glob("eval-test-*.json")
    kept = evaluation.read_bytes()
    done = tiny.run("train", *mini_flags, f"--workdir={folder}")
    assert done.returncode == 0, done.stderr
    assert "from step 128 of 128" in done.stderr and "compiled the step" not in done.stderr
    assert evaluation.read_bytes() == kept
    changed = {path for path in before if path.stat().st_mtime_ns != before[path]}
    assert changed <= {evaluation}
    assert os.path.getsize(folder / "metrics.jsonl") > 0
