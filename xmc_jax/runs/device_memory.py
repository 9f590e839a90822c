"""The memory that a run will need, stated before it starts, and settings that would need less."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from xmc_jax.training import refresh
from xmc_jax.runs.settings import PlanError, field_of
from xmc_jax.training.loop import CompiledStep, Run, initial_state
from xmc_jax.training.state import num_bytes
from xmc_jax.training.training_data import WORD_VECTORS

_SCORES = 1 << 27  # bytes of a block of scores in `xmc_jax.data.search.exact_search` on a device
SHARE = 0.9  # of what there is may be used


def state(run: Run, step: CompiledStep) -> list[str]:
    """Say what a run needs, and refuse one that needs over 90 % of what there is.

    Returns:
      Lines to be printed.

    Raises:
      PlanError: it does not fit; with two settings that would.
    """
    available = available_bytes()
    found = sizes(run, step)
    total = sum(found.values())
    parts = ", ".join(f"{name} {_gigabytes(size)}" for name, size in found.items())
    line = f"memory: {parts}; together {_gigabytes(total)} of {_gigabytes(available)}"
    if total <= SHARE * available:
        return [line]
    fitting = []
    for settings in smaller_settings(run.config):
        if _fits(run, settings, SHARE * available):
            fitting.append(" ".join(f"--config.{k}={v}" for k, v in settings.items()))
        if len(fitting) == 2:
            break
    advice = "\n  ".join(["\nSettings that would fit:", *fitting])
    raise PlanError(
        f"{line}\nThat is over {SHARE:.0%} of what there is."
        + (advice if fitting else " No smaller batch, pool, head or table would fit either.")
    )


def sizes(run: Run, step: CompiledStep, limit: float = float("inf")) -> dict[str, int]:
    """Bytes by part; the step is compiled for its first batch to measure its temporary memory.

    Args:
      run: the run; nothing of it is allocated.
      step: its step.
      limit: above it the step is not compiled, for the rest is too much already.

    Returns:
      ``parameters`` (with gradients' moments), ``table``, ``moments`` (the table's), ``vectors``
      (of all labels and queries at a refresh or an evaluation; where a device of its own trains,
      the part by which those of the labels, which are searched there, exceed what a step needs),
      ``activations``.
    """
    shapes = jax.eval_shape(
        lambda params: initial_state(run, params, step.optimizer, table=False),
        run.system.parameter_shapes(run.model, run.data.num_labels),
    )
    found = {
        "parameters": num_bytes((shapes.params, shapes.opt_state)),
        "table": num_bytes(shapes.table),
        "moments": num_bytes(shapes.table_state),
    }
    if jax.default_backend() == "cpu":
        found["vectors"] = _vector_bytes(run)
    if sum(found.values()) > limit:
        return found
    batch = next(run.source.ahead(0, 0))[0]
    analysis = step.compile(shapes, batch).memory_analysis()
    found["activations"] = int(getattr(analysis, "temp_size_in_bytes", 0))
    if jax.default_backend() != "cpu":
        found["vectors"] = max(0, _searched_bytes(run) - found["activations"])
    return found


def _vector_bytes(run: Run) -> int:
    """Most that is held at once: queries and labels of a refresh, or both heads' and their join."""
    config, data, row = run.config, run.data, 4 * run.model.dim
    mined = refresh.due(config, run.epochs) is not None
    refresh = (len(data.rows) + data.num_labels) * row if mined else 0
    splits = [len(split.rows) for split in (data.held_out, data.test) if split is not None]
    copies = 4 if config.classifier else 1  # DE, CLF and both side by side
    return max(refresh, (data.num_labels + max(splits, default=0)) * copies * row)


def _searched_bytes(run: Run) -> int:
    """Label vectors on a device for exact search (of both heads side by side), and its scores."""
    config, data = run.config, run.data
    if "family" in config:  # frugal classifiers rank on the host
        return 0
    evaluated = data.held_out is not None or data.test is not None
    copies = 2 if evaluated and config.classifier else 1
    return copies * 4 * data.num_labels * run.model.dim + _SCORES


def smaller_settings(config: ConfigDict) -> Iterator[dict[str, Any]]:
    """Settings that need less memory, the mildest first."""
    table = {"table.dtype": "bfloat16"}
    table = table if config.classifier and config.table.dtype == "float32" else {}
    remat = {} if config.encoder.name in WORD_VECTORS else {"encoder.remat": True}

    def batch(n: int) -> dict[str, Any]:
        return {"batch_size": config.batch_size // n, "pool_size": config.pool_size // n}

    def head(n: int) -> dict[str, Any]:
        return {"head_dim": config.head_dim // n} if config.get("head_dim") else {}

    alone = [table, remat, batch(2), head(2), batch(4), head(4)]
    steps = ((1, 2), (2, 2), (4, 4), (8, 4), (16, 8))
    together = [{**table, **remat, **batch(n), **head(m)} for n, m in steps]
    tried: list[dict[str, Any]] = [{}]
    for settings in alone + together:
        smaller = {k: v for k, v in settings.items() if v and field_of(config, k) != v}
        if smaller not in tried:
            tried.append(smaller)
            yield smaller


def _fits(run: Run, settings: dict[str, Any], limit: float) -> bool:
    """Whether the run would fit with these settings: measured, not guessed."""
    config = run.config.copy_and_resolve_references()
    config.update_from_flattened_dict(settings)
    try:
        smaller = run.system.resized(run, config)
    except ValueError:  # such a small pool cannot hold a batch
        return False
    found = sizes(smaller, CompiledStep(smaller), limit)
    return "activations" in found and sum(found.values()) <= limit


def available_bytes() -> int:
    """Memory that the device has for this run: the card's limit, or what the host has free."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")  # of a container
    if limit.exists() and limit.read_text().strip().isdigit():
        free = min(free, int(limit.read_text()))
    return free


def _gigabytes(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
