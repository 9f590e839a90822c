"""Rows of the label graph, kept in a work directory: ``features/``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from xmc_jax import files
from xmc_jax.data.graph import label_features
from xmc_jax.systems.frugal.options import FrugalOptions
from xmc_jax.systems.frugal.source import GraphRows
from xmc_jax.training.training_data import TrainingData

FOLDER = "features"


def kept_rows(
    folder: Path, options: FrugalOptions, data: TrainingData, idf: np.ndarray
) -> GraphRows:
    """Rows of the label graph, read from a work directory or made and written there."""
    try:
        return load_rows(folder)
    except ValueError as error:
        if (folder / FOLDER).exists():
            logging.warning("%s It is made again.", error)
        started = time.perf_counter()
        graph = label_features.neighbour_graph(
            data.original_labels, neighbours=options.graph.neighbours, seed=options.seed
        )
        blocks = label_features.neighbour_rows(
            graph,
            data.label_tokens,
            idf,
            tokens=options.graph.tokens,
            degree=options.graph.degree,
        )
        _write_rows(folder / FOLDER, blocks, (data.num_labels, options.graph.tokens))
        logging.info(
            "label graph of %.1f neighbours a label (%.1f s)",
            graph.nnz / max(1, data.num_labels),
            time.perf_counter() - started,
        )
    return load_rows(folder)


def load_rows(folder: Path) -> GraphRows:
    """Rows of the label graph of a work directory, memory-mapped.

    Raises:
      ValueError: they are missing or damaged.
    """
    try:
        shape = tuple(files.read_object(folder / FOLDER / "info.json")["shape"])
        read = lambda name, dtype: np.memmap(folder / FOLDER / name, dtype, mode="r", shape=shape)
        return GraphRows(read("graph_ids.bin", "<i4"), read("graph_weights.bin", "<f4"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / FOLDER} cannot be read ({error}).") from error


def _write_rows(target: Path, blocks: Iterator[Any], shape: tuple[int, int]) -> None:
    """Stream blocks into a folder that is whole or not there."""
    try:
        with (
            files.replacing_folder(target) as folder,
            open(folder / "graph_ids.bin", "wb") as ids_file,
            open(folder / "graph_weights.bin", "wb") as weights_file,
        ):
            for ids, weights in blocks:
                ids_file.write(np.ascontiguousarray(ids, "<i4").data)
                weights_file.write(np.ascontiguousarray(weights, "<f4").data)
            files.write_json(folder / "info.json", {"shape": shape})
            # Closed before the folder is renamed: the last bytes may be what fills the disk.
            ids_file.close()
            weights_file.close()
    except OSError as error:
        raise OSError(
            f"{target}: the label features could not be written "
            f"({error.strerror or error}). {files.remedy(error)}, then run the same command again."
        ) from error
