"""The memory that a run will need, stated before it starts, and settings that would need less."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from xmc_jax.contracts import TrainState
from xmc_jax.runs.settings import PlanError, family_of, options_of
from xmc_jax.systems.settings import field_of
from xmc_jax.training import refresh
from xmc_jax.training.loop import Run
from xmc_jax.training.state import num_bytes

SHARE = 0.9  # of what there is may be used
SIZES = ("batch_size", "pool_size")  # of a batch, where a configuration has them


def state(run: Run, config: ConfigDict) -> list[str]:
    """Say what a run needs, and refuse one that needs over 90 % of what there is.

    Returns:
      Lines to be printed.

    Raises:
      PlanError: it does not fit; with two settings that would.
    """
    available = available_bytes()
    needed = sizes(run)
    total = sum(needed.values())
    parts = ", ".join(f"{name} {_gigabytes(size)}" for name, size in needed.items())
    line = f"memory: {parts}; together {_gigabytes(total)} of {_gigabytes(available)}"
    if total <= SHARE * available:
        return [line]
    fitting = []
    for settings in smaller_settings(config):
        if _fits(run, config, settings, SHARE * available):
            fitting.append(" ".join(f"--config.{k}={v}" for k, v in settings.items()))
        if len(fitting) == 2:
            break
    advice = "\n  ".join(["\nSettings that would fit:", *fitting])
    raise PlanError(
        f"{line}\nThat is over {SHARE:.0%} of what there is."
        + (advice if fitting else " No smaller batch, pool, head or table would fit either.")
    )


def sizes(run: Run, limit: float = float("inf")) -> dict[str, int]:
    """Bytes by part; the step is compiled for its first batch to measure its temporary memory.

    Args:
      run: the run; nothing of it is allocated.
      limit: above it the step is not compiled, for the rest is too much already.

    Returns:
      ``parameters`` (with gradients' moments and the model's state), ``table``, ``moments`` (the
      tables'), ``vectors`` (of all labels and queries at a refresh or an evaluation; where a device
      of its own trains, the part by which those that are searched there exceed what a step needs),
      ``activations``.
    """
    data, system = run.data, run.system
    shapes = state_shapes(run)
    needed = {
        "parameters": num_bytes((shapes.params, shapes.model_state, shapes.opt_state)),
        "table": num_bytes([table.values for table in shapes.tables.values()]),
        "moments": num_bytes([table.state for table in shapes.tables.values()]),
    }
    on_host = jax.default_backend() == "cpu"
    if on_host:
        mined = refresh.due(run.options, run.stages, run.epochs) is not None
        needed["vectors"] = system.vector_bytes(data, data.most_evaluated, mined=mined)
    if sum(needed.values()) > limit:
        return needed
    # A stage that trains everything needs the most.
    stage = next((one for one in run.stages if one.trains == "all"), run.stages[0])
    batch = next(run.source.ahead(stage, 0, 0))[0]
    analysis = run.step(stage).compile(shapes, batch).memory_analysis()
    needed["activations"] = int(getattr(analysis, "temp_size_in_bytes", 0))
    if not on_host:
        searched = system.searched_bytes(data, data.most_evaluated)
        needed["vectors"] = max(0, searched - needed["activations"])
    return needed


def state_shapes(run: Run) -> TrainState:
    """Shapes and types of the state."""
    weights = run.system.weight_shapes(run.data.num_labels)
    first = lambda weights: run.system.first_state(run.data, weights, measure=True)
    return jax.eval_shape(first, weights._replace(tables={}))


def smaller_settings(config: ConfigDict) -> Iterator[dict[str, Any]]:
    """Settings that need less memory, the mildest first."""
    values = config.to_dict()
    family = family_of(values)

    def batch(n: int) -> dict[str, Any]:
        return {name: values[name] // n for name in SIZES if name in values}

    cheaper, smaller = family.cheaper(values), lambda n: family.smaller(values, n)
    alone = [*cheaper, batch(2), smaller(2), batch(4), smaller(4)]
    steps = ((1, 2), (2, 2), (4, 4), (8, 4), (16, 8))
    all_cheaper = {k: v for settings in cheaper for k, v in settings.items()}
    together = [{**all_cheaper, **batch(n), **smaller(m)} for n, m in steps]
    tried: list[dict[str, Any]] = [{}]
    for settings in alone + together:
        changed = {k: v for k, v in settings.items() if v and field_of(values, k) != v}
        if changed not in tried:
            tried.append(changed)
            yield changed


def advice(config: ConfigDict) -> str:
    """What needs less memory, in words, for a run that had too little."""
    values = config.to_dict()
    sizes = " and ".join(f"config.{name}" for name in SIZES if name in values)
    cheaper = [setting.items() for setting in family_of(values).cheaper(values)]
    others = "".join(f", or config.{k}={v}" for items in cheaper for k, v in items)
    return f"a smaller {sizes}, smaller vectors{others}"


def _fits(run: Run, config: ConfigDict, settings: dict[str, Any], limit: float) -> bool:
    """Whether the run would fit with these settings: measured, not guessed."""
    config = config.copy_and_resolve_references()
    config.update_from_flattened_dict(settings)
    options = options_of(config)
    system = run.system.resized(options)
    try:
        source = system.source(run.data)
    except ValueError:  # such a small pool cannot hold a batch
        return False
    smaller = dataclasses.replace(run, options=options, system=system, source=source)
    needed = sizes(smaller, limit)
    return "activations" in needed and sum(needed.values()) <= limit


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
