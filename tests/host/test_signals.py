"""Signals are requests; SIGHUP is one unless it was ignored, and a second one is quiet."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import tiny

from xmc_jax.host.signals import StopRequests

# Read by the killed process only: a checkpoint keeps its temporary name for a while.
SLOW = """
import os, time
rename = os.rename
def slow(source, target, *arguments, **options):
    time.sleep(2.0 if "checkpoints" in str(source) else 0.0)
    return rename(source, target, *arguments, **options)
os.rename = slow
"""


@pytest.fixture(autouse=True)
def hangups_end_a_program():
    """As from a terminal, also where the tests are run by nohup; children inherit it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_a_request_and_a_second_one_does_not_wait(number):
    before = signal.getsignal(number)
    with StopRequests() as requests:
        os.kill(os.getpid(), number)
        assert requests.signal == number
        with requests.saving():
            os.kill(os.getpid(), signal.SIGTERM)
            assert requests.signal == number
        with pytest.raises(KeyboardInterrupt) as second:
            os.kill(os.getpid(), signal.SIGTERM)
        assert second.value.args == (signal.SIGTERM,)
    assert signal.getsignal(number) == before


def test_a_hangup_that_was_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequests() as requests:
            os.kill(os.getpid(), signal.SIGHUP)
            assert requests.signal == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def started(own_data: Path, folder: Path):
    (folder / "sitecustomize.py").write_text(SLOW)
    flags = [*tiny.flags(epochs=60, eval_epochs=60), f"--workdir={folder}/run"]
    path = f"{folder}:{tiny.ROOT}"
    source = f"--config=configs/unidec.py:{own_data}"
    return tiny.start("train", source, *flags, environment={"PYTHONPATH": path})


def wait_for(seen, process) -> None:
    deadline = time.monotonic() + 200
    while not seen():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the moment did not come"
        time.sleep(0.01)


def test_a_closed_terminal_saves_and_signals_during_the_save_are_quiet(own_data, tmp_path):
    process = started(own_data, tmp_path)
    log, saved = tmp_path / "run/metrics.jsonl", tmp_path / "run/checkpoints"
    wait_for(lambda: log.exists() and log.read_text().count("\n") > 3, process)
    process.send_signal(signal.SIGHUP)
    wait_for(lambda: list(saved.glob("*.tmp")), process)
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGHUP, err
    assert "Traceback" not in err and "interrupted" not in err
    (step,) = saved.iterdir()
    assert f"SIGHUP: step {step.name} of " in out and "Run the same command again" in out
