"""Contenders in processes of their own, turn by turn, and what is measured of them.

XLA, OpenMP and BLAS bring a pool of threads each, whose idle threads may spin; and an allocator
each, so that the peak memory of one process says nothing of two contenders. A contender is
therefore a process that waits for its turn on a pipe. What it spends of the processor meanwhile is
measured too (``idle_cpu``, as a share of the time waited): near 0, it did not slow the others.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import multiprocessing
import os
import platform
import resource
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from experiments import ledger
from xmc_jax.host import allocator

PACKAGES = ("jax", "jaxlib", "numpy", "faiss-cpu", "torch", "transformers", "sentence-transformers")


@dataclasses.dataclass(frozen=True)
class Subject:
    """What a contender's process made ready.

    Attributes:
      turn: does the work once, to its end; gets the number of the turn.
      facts: of the set-up, as plain Python or NumPy values; `alternate` can check them.
      close: called after the last turn; what it returns joins the result.
    """

    turn: Callable[[int], Any]
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    close: Callable[[], Mapping[str, Any]] = dict


@dataclasses.dataclass(frozen=True)
class Contender:
    """A process to be: ``setup(*arguments)`` is called in it and returns a `Subject`.

    ``setup`` is a function of a module; it and its arguments are pickled.
    """

    name: str
    setup: Callable[..., Subject]
    arguments: tuple = ()


class ContenderError(RuntimeError):
    """A contender failed; the message has its traceback."""


def alternate(
    contenders: Sequence[Contender],
    *,
    repeats: int,
    warmup: int = 1,
    check: Callable[[Mapping[str, Mapping[str, Any]]], Any] | None = None,
    processes: bool = True,
) -> dict[str, dict[str, Any]]:
    """Sets the contenders up one after the other, then gives each its turn, round by round.

    Args:
      contenders: in the order of a round.
      repeats: rounds that count.
      warmup: rounds before them.
      check: gets ``{name: facts}`` before the first round; raises where they do not agree.
      processes: False = all in this process: quicker to start, but times and memory mean nothing.

    Returns:
      ``{name: {"seconds": spread, "times": [...], "facts", "peak_rss_bytes", "idle_cpu", **what
      close returned}}``.

    Raises:
      ContenderError: a contender raised or died.
    """
    players = [(_Process if processes else _Here)(contender) for contender in contenders]
    try:
        facts = {player.name: player.start() for player in players}
        if check is not None:
            check(facts)
        for number in range(warmup + repeats):
            for player in players:
                player.turn(number)
                counted = f"round {number - warmup + 1}" if number >= warmup else "warm-up"
                print(f"{counted}: {player.name} {player.times[-1]:.4g} s", file=sys.stderr)
        results = {}
        for player in players:
            times = player.times[warmup:]
            results[player.name] = {
                "seconds": spread(times),
                "times": [float(f"{seconds:.4g}") for seconds in times],
                "facts": facts[player.name],
                **player.close(),
            }
        return results
    finally:
        for player in players:
            player.kill()


def contest(
    options: argparse.Namespace,
    contenders: Sequence[Contender],
    *,
    repeats: int,
    warmup: int = 1,
    check: Callable[[Mapping[str, Mapping[str, Any]]], Any] | None = None,
) -> dict[str, dict[str, Any]]:
    """`alternate` with the flags --repeats, --without and --quick (all in one process)."""
    return alternate(
        [contender for contender in contenders if contender.name not in options.without],
        repeats=options.repeats or (1 if options.quick else repeats),
        warmup=min(warmup, 1) if options.quick else warmup,
        check=check,
        processes=not options.quick,
    )


class _Process:
    """The parent's end of a contender."""

    def __init__(self, contender: Contender) -> None:
        self.name, self.times = contender.name, []
        self._contender = contender
        self._process: Any = None

    def start(self) -> Mapping[str, Any]:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, self._contender.setup, self._contender.arguments)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        return self._receive()

    def turn(self, number: int) -> None:
        self._pipe.send(number)
        self.times.append(self._receive())

    def close(self) -> Mapping[str, Any]:
        self._pipe.send(None)
        found = self._receive()
        self._process.join()
        return found

    def kill(self) -> None:
        if self._process is not None and self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _receive(self) -> Any:
        try:
            kind, value = self._pipe.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            raise ContenderError(f"{self.name}: its process died (exit code {code})") from None
        if kind == "error":
            raise ContenderError(f"{self.name}:\n{value}")
        return value


class _Here:
    """A contender in this process."""

    def __init__(self, contender: Contender) -> None:
        self.name, self.times = contender.name, []
        self._contender = contender

    def start(self) -> Mapping[str, Any]:
        self._subject = self._contender.setup(*self._contender.arguments)
        return dict(self._subject.facts)

    def turn(self, number: int) -> None:
        started = time.perf_counter()
        self._subject.turn(number)
        self.times.append(time.perf_counter() - started)

    def close(self) -> Mapping[str, Any]:
        return {"peak_rss_bytes": peak_rss(), "idle_cpu": 0.0, **self._subject.close()}

    def kill(self) -> None:
        self._subject = None


def _serve(pipe: Connection, setup: Callable[..., Subject], arguments: tuple) -> None:
    """A contender's process: set up, then a turn for every number that comes."""
    allocator.keep_freed_memory()  # as the binaries do; PyTorch allocates through glibc too
    try:
        subject = setup(*arguments)
        pipe.send(("facts", dict(subject.facts)))
        waited = idle = 0.0
        before = None
        while (number := pipe.recv()) is not None:
            started = time.perf_counter()
            if before is not None:
                waited += started - before[0]
                idle += time.process_time() - before[1]
            subject.turn(number)
            ended = time.perf_counter()
            pipe.send(("seconds", ended - started))
            before = ended, time.process_time()
        found = {"peak_rss_bytes": peak_rss(), "idle_cpu": round(idle / max(waited, 1e-9), 4)}
        pipe.send(("result", {**found, **subject.close()}))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles, extremes and number."""
    low, q1, median, q3, high = np.percentile(values, [0, 25, 50, 75, 100]).tolist()
    found = {"median": median, "min": low, "q1": q1, "q3": q3, "max": high}
    return {name: float(f"{value:.4g}") for name, value in found.items()} | {"n": len(values)}


def ratios(results: Mapping[str, Mapping[str, Any]], of: str) -> dict[str, float]:
    """Median of each contender over that of ``of`` (if it was run): how much faster ``of`` is."""
    if of not in results:
        return {}
    median = results[of]["seconds"]["median"]
    others = {name: found["seconds"]["median"] for name, found in results.items() if name != of}
    return {name: round(value / median, 3) for name, value in others.items()}


def peak_rss() -> int:
    """Largest resident set of this process in bytes (not of the one it was forked from)."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def forget_peak_rss() -> None:
    """From now on `peak_rss` is the peak since now (Linux; elsewhere nothing happens)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def environment() -> dict[str, Any]:
    """Device, versions, threads, and how busy the machine was before."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        if importlib.util.find_spec(package.removesuffix("-cpu").replace("-", "_")):
            versions[package] = importlib.metadata.version(package)
    return {
        "device": ledger.device(),
        "commit": ledger.commit(),
        "threads": cores(),
        "load_before": round(os.getloadavg()[0], 2),
        "versions": versions,
    }


def require(*packages: str) -> None:
    """Ends the program, with what to install, unless the peers' packages are there.

    Raises:
      SystemExit: one is missing.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(
            f"--peer=torch needs {', '.join(missing)}, which is not installed: "
            "pip install '.[bench]', or leave --peer out."
        )
