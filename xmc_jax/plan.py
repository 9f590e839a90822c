"""What a run derives from its data and its device, and the memory that it will need."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from xmc_jax.data.dataset import Dataset

SAMPLE_TEXTS = 10_000
SHARE_OF_MEMORY = 0.9


class PlanError(ValueError):
    """The run cannot be carried out as configured."""


def resolve(config: ConfigDict, dataset: Dataset) -> tuple[ConfigDict, dict[str, Any]]:
    """Fill in the fields that are None (or an empty encoder name) from the data and the device.

    Args:
      config: the configuration as given; it is not changed.
      dataset: the data set.

    Returns:
      The complete configuration, and what was chosen.
    """
    config = config.copy_and_resolve_references()
    rows, num_labels = dataset.train.labels.shape
    chosen: dict[str, Any] = {}

    def fill(section: ConfigDict, name: str, value: Any, title: str) -> None:
        if section[name] in (None, ""):
            section[name] = value
            chosen[title] = value

    on_cpu = jax.default_backend() == "cpu"
    fill(config.encoder, "name", "bag" if on_cpu else "distilbert-base-uncased", "encoder.name")
    fill(config, "max_length", _max_length(dataset), "max_length")
    fill(config, "batch_size", _batch_size(rows), "batch_size")
    pool = max(4 * config.batch_size if rows < 10_000 else int(2.25 * config.batch_size), 64)
    fill(config, "pool_size", pool, "pool_size")
    fill(config, "head_dim", 256, "head_dim")
    # With a budget of minutes this is the most that is done; the clock usually says less.
    steps = -(-rows // config.batch_size)
    fill(config, "epochs", int(np.clip(2_000 // steps, 5, 60)), "epochs")
    if config.row_length < config.max_length:
        config.row_length = config.max_length
        chosen["row_length"] = config.max_length
    rate = 2e-3 if config.encoder.name == "bag" else 1e-4
    fill(config.lr, "encoder", rate, "lr.encoder")
    fill(config.lr, "heads", 2e-3 if config.encoder.name == "bag" else 2e-4, "lr.heads")
    del num_labels
    return config, chosen


def _batch_size(rows: int) -> int:
    """A quarter of the rows at most, a power of two between 16 and 1,024."""
    return int(2 ** np.clip(np.floor(np.log2(max(rows / 6, 16))), 4, 10))


def _max_length(dataset: Dataset) -> int:
    """Tokens that hold 98 % of a sample of the texts, at 1.4 tokens a word, two special ones."""
    longest = 0.0
    for texts in (dataset.train.texts, dataset.label_texts):
        longest = max(longest, float(np.quantile(_word_counts(texts), 0.98)))
    return next((n for n in (32, 64, 128) if 1.4 * longest + 2 <= n), 256)


def _word_counts(texts: Sequence[str]) -> np.ndarray:
    step = max(1, len(texts) // SAMPLE_TEXTS)
    return np.array([len(texts[i].split()) for i in range(0, len(texts), step)])


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
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and limit.read_text().strip().isdigit():
        free = min(free, int(limit.read_text()))
    return free


def memory(config: ConfigDict, sizes: dict[str, int], available: int | None = None) -> list[str]:
    """State the memory of a run, and refuse one that needs over 90 % of what there is.

    Args:
      config: a resolved configuration.
      sizes: bytes by part: ``parameters`` (with their moments), ``table``, ``moments`` (the
        table's), ``activations`` (temporary memory of the compiled step).
      available: bytes there are; default: asked of the device.

    Returns:
      Lines to be printed.

    Raises:
      PlanError: it does not fit; with the settings that would.
    """
    available = available_bytes() if available is None else available
    total = sum(sizes.values())
    gigabytes = lambda n: f"{n / 2**30:.2f} GiB"
    parts = ", ".join(f"{name} {gigabytes(n)}" for name, n in sizes.items())
    lines = [f"memory: {parts}; together {gigabytes(total)} of {gigabytes(available)}"]
    if total <= SHARE_OF_MEMORY * available:
        return lines
    table = sizes["table"] + sizes["moments"]
    half = (config.batch_size // 2, config.pool_size // 2)
    smaller = "--config.batch_size={} --config.pool_size={}".format(*half)
    saved = {
        "--config.table.dtype=bfloat16": table / 2 if config.table.dtype == "float32" else 0,
        f"--config.head_dim={(config.head_dim or 512) // 2}": table / 2,
        smaller: sizes["activations"] / 2,
        "--config.encoder.remat=True": (
            0 if config.encoder.remat or config.encoder.name == "bag" else sizes["activations"] / 2
        ),
    }
    ranked = sorted(((n, s) for s, n in saved.items() if n > 0), reverse=True)
    fits = [s for n, s in ranked if total - n <= SHARE_OF_MEMORY * available]
    if len(fits) < 2 and len(ranked) > 1:
        fits.append(" ".join(s for _, s in ranked[:3]))
    raise PlanError(
        lines[0]
        + f"\nThat is over {SHARE_OF_MEMORY:.0%} of what there is. Settings to try instead:\n  "
        + "\n  ".join(fits[:2])
    )


def epochs_in(
    minutes: float, *, step: float, steps_per_epoch: int, evaluation: float, every: int
) -> int:
    """Epochs that fit in a budget.

    Args:
      minutes: the budget.
      step: seconds of a step.
      steps_per_epoch: batches of an epoch.
      evaluation: seconds of a held-out evaluation or a refresh.
      every: epochs between two of them.
    """
    budget = 60 * minutes * 0.95 - 2 * evaluation
    return max(1, int(budget / (step * steps_per_epoch + evaluation / every)))
