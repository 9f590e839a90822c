"""A refresh: clusters of the queries and mined hard negatives, from the current dual encoder.

    refresh/<epoch>/order.npy, offsets.npy      clustered order of the training rows
    refresh/<epoch>/hard_negatives.npy          [N, eta * refresh_epochs] int32, -1 = none
    refresh/<epoch>/info.json                   index, times

It is written whole before it is used, so that a resumed run reads the same.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging
from ml_collections import ConfigDict

from xmc_jax.data.batching import batches
from xmc_jax.data.search import clustering
from xmc_jax.data.search import index as indexes
from xmc_jax.host import allocator
from xmc_jax.systems.embedding import Embedder
from xmc_jax.training import stages
from xmc_jax.training.training_data import TrainingData
from xmc_jax.training.workdir import write_json

BLOCK_ROWS = 1 << 17  # training rows whose negatives are in memory at once


@dataclasses.dataclass(frozen=True)
class Refresh:
    """What a refresh leaves: memory-mapped arrays.

    Attributes:
      order: places within the training rows that have labels, cluster by cluster.
      offsets: where each cluster begins in ``order``.
      hard_negatives: ``[N, W]`` label ids, -1 = none; None where none are mined.
      label_clusters: ``[L]`` clusters of the labels; None but for the frugal family.
      synonyms: ``[V, k]`` tokens that replace others (`xmc_jax.systems.frugal.text_mixing`), or None.
    """

    order: np.ndarray
    offsets: np.ndarray
    hard_negatives: np.ndarray | None
    label_clusters: np.ndarray | None = None
    synonyms: np.ndarray | None = None


def due(config: ConfigDict, epoch: int) -> int | None:
    """The epoch whose refresh serves ``epoch``; None before the first one."""
    if config.batching == "random" and not config.hard_negatives:
        return None
    if epoch < config.warmup_epochs:
        return None
    first = max(config.warmup_epochs, stages.at(config, epoch).first)
    return first + (epoch - first) // config.refresh_epochs * config.refresh_epochs


def load(workdir: Path, epoch: int) -> Refresh | None:
    """The refresh of an epoch if it was finished."""
    folder = workdir / "refresh" / str(epoch)
    if not (folder / "info.json").exists():
        return None
    mined, clusters = folder / "hard_negatives.npy", folder / "label_clusters.npy"
    synonyms = folder / "synonyms.npy"
    return Refresh(
        order=np.load(folder / "order.npy", mmap_mode="r"),
        offsets=np.load(folder / "offsets.npy"),
        hard_negatives=np.load(mined, mmap_mode="r") if mined.exists() else None,
        label_clusters=np.load(clusters) if clusters.exists() else None,
        synonyms=np.load(synonyms) if synonyms.exists() else None,
    )


def refresh(
    workdir: Path,
    epoch: int,
    config: ConfigDict,
    data: TrainingData,
    embedder: Embedder,
    params: Any,
    levels: int,
) -> Refresh:
    """Embed, cluster, search; write; return what was written.

    Args:
      workdir: the run's work directory.
      epoch: names the refresh, and seeds it together with ``config.seed``.
      config: a resolved configuration.
      data: what training reads.
      embedder: of the model.
      params: current parameters.
      levels: of the clusters that are batches; joined batching clusters deeper.
    """
    make = lambda folder: _write(folder, epoch, config, data, embedder, params, levels)
    return write(workdir, epoch, make)


def write(workdir: Path, epoch: int, make: Callable[[Path], dict[str, Any]]) -> Refresh:
    """Have a refresh made in a temporary folder, then renamed; return what was written.

    Args:
      workdir: the run's work directory.
      epoch: names the refresh.
      make: writes the arrays into a folder and returns what took how long.
    """
    allocator.give_back()  # the temporary memory of a step
    target = workdir / "refresh" / str(epoch)
    temporary = target.with_name(f"{epoch}.tmp")
    _remove(temporary)
    try:
        temporary.mkdir(parents=True)
        times = make(temporary)
        write_json(temporary / "info.json", {"epoch": epoch, **times})
        _remove(target)
        os.rename(temporary, target)
    except OSError as error:
        _remove(temporary)
        cause = error.strerror or error
        raise OSError(
            f"{target}: the refresh before epoch {epoch} could not be written ({cause}). Free some "
            "space, then run the same command again to continue."
        ) from error
    logging.info("refresh before epoch %d: %s", epoch, times)
    return load(workdir, epoch)


def _write(
    folder: Path,
    epoch: int,
    config: ConfigDict,
    data: TrainingData,
    embedder: Embedder,
    params: Any,
    levels: int,
) -> dict[str, Any]:
    """Clusters and hard negatives of all rows, into a folder; returns what took how long."""
    started = time.perf_counter()
    rows = data.rows
    queries = embedder.de(params, data.train_tokens, rows)
    times: dict[str, Any] = {"embed_queries": _lap(started)}
    if config.batching == "joined":
        smallest = config.cluster_schedule[0][1]
        levels = batches.cluster_levels(len(rows), config.batch_size, "joined", smallest)
    if config.batching != "random":
        started = time.perf_counter()
        order, offsets = clustering.balanced_clusters(
            queries, levels, seed=config.seed + 7919 * epoch
        )
        times["cluster"] = _lap(started)
    else:
        order, offsets = np.arange(len(rows)), np.array([0, len(rows)])
    np.save(folder / "order.npy", order)
    np.save(folder / "offsets.npy", offsets)
    if config.hard_negatives:
        times.update(_mine(folder, config, data, embedder, params, rows, queries))
    return times


def _mine(
    folder: Path,
    config: ConfigDict,
    data: TrainingData,
    embedder: Embedder,
    params: Any,
    rows: np.ndarray,
    queries: np.ndarray,
) -> dict[str, Any]:
    """Hard negatives of all rows, into ``hard_negatives.npy``."""
    started = time.perf_counter()
    labels = embedder.de(params, data.label_tokens)
    times: dict[str, Any] = {"embed_labels": _lap(started)}
    started = time.perf_counter()
    kind = choose_index(config.index, len(rows), *labels.shape)
    typical = queries[:: max(1, len(queries) // 500)]
    found = indexes.Index.build(labels, kind, seed=config.seed, sample_queries=typical)
    times["index"], times["build"] = kind, _lap(started)
    if kind == "ivf":
        times["nprobe"], times["recall"] = found.nprobe, round(found.recall, 4)
    started = time.perf_counter()
    shape = (data.labels.shape[0], config.eta * config.refresh_epochs)

    def blocks() -> Iterator[np.ndarray]:
        for first in range(0, shape[0], BLOCK_ROWS):
            size = min(BLOCK_ROWS, shape[0] - first)
            begin, end = np.searchsorted(rows, [first, first + size])
            part = rows[begin:end]
            block = np.full((size, shape[1]), -1, "<i4")
            block[part - first] = indexes.mine(
                queries[begin:end],
                found,
                labels=data.labels[part],
                filters=None if data.filters is None else data.filters[part],
                width=shape[1],
            )
            yield block

    write_blocks(folder / "hard_negatives.npy", blocks(), shape)
    times["search"] = _lap(started)
    return times


def write_blocks(path: Path, blocks: Iterable[np.ndarray], shape: tuple[int, ...]) -> None:
    """Write int32 blocks of rows as one ``.npy`` file of that shape."""
    # Written as a stream: in a memory map a full disk would be a SIGBUS, not an error.
    with open(path, "wb") as file:
        header = {"descr": "<i4", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        for block in blocks:
            file.write(np.ascontiguousarray(block, "<i4"))


def choose_index(kind: str, num_queries: int, num_labels: int, dim: int) -> str:
    """Resolve ``auto`` and say what was chosen."""
    if kind != "auto":
        return kind
    accelerator = jax.default_backend() != "cpu"
    kind, seconds = indexes.choose(num_queries, num_labels, dim, accelerator=accelerator)
    logging.info(
        "index: %s for %d queries x %d labels x %d, about %.0f s",
        kind,
        num_queries,
        num_labels,
        dim,
        seconds,
    )
    return kind


def prune(workdir: Path, keep: Collection[int]) -> None:
    """Remove what a kill left, and all refreshes but those of the epochs ``keep``."""
    folder = workdir / "refresh"
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if not path.name.isdigit() or int(path.name) not in keep:
            _remove(path)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _lap(started: float) -> float:
    return round(time.perf_counter() - started, 2)
