"""The full UniDEC step: packed, one text a row, and a PyTorch loop over padded rows.

Encoding of queries and pool, both heads, both symmetric losses, backward pass, Adam for encoder and
heads, and the row update of the table; on the same weights and batches, whose losses without
dropout must agree to 1e-4 first. Making the batches is left out for all (case host measures it).
"""

from __future__ import annotations

import argparse
import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from experiments.benchmarks import harness, ours, problem
from experiments.benchmarks.harness import Contender

BATCHES = 3  # different ones, in turn
ON_CPU = {"tiny": (16, 48), "minilm": (128, 512), "distilbert": (32, 128)}  # Q, P
ON_GPU = (1098, 3000)
LABELS = 73_868  # rows of the table with synthetic texts; LF-WordNetTitles' own number


def cases(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One result for each encoder shape and kind of texts."""
    if options.peer:
        harness.require("torch", "transformers")
    for shape in options.shapes or (["tiny"] if options.quick else ["minilm", "distilbert"]):
        for texts in options.texts:
            if options.wanted(f"train_step {shape} {texts}"):
                with tempfile.TemporaryDirectory() as folder:
                    yield measure(options, shape, texts, Path(folder))


def make_problem(
    options: argparse.Namespace, shape: str, texts: str, folder: Path
) -> problem.Problem:
    """Weights, texts and batches of a case."""
    queries, pool = ON_GPU if options.gpu else ON_CPU[shape]
    queries, pool = options.queries or queries, options.pool or pool
    of_run = problem.make_options(queries, pool, options.head_dim, options.dtype)
    if texts == "titles":
        dataset = "wordnet-mini" if options.quick else "wordnettitles"
        data = problem.titles(of_run, dataset, options.data, options.encoder, folder)
    else:
        labels = 2000 if options.quick else options.labels or LABELS
        vocabulary = problem.SHAPES[shape].vocab_size
        data = problem.amazon_shaped(max(4 * queries, 5000), labels, vocabulary)
    weights = {"encoder": options.encoder, "number": 1 if options.quick else BATCHES}
    return problem.make(of_run, shape, data, folder / "encoder", **weights)


def measure(options: argparse.Namespace, shape: str, texts: str, folder: Path) -> dict[str, Any]:
    """Our step and, if asked for, the peer's."""
    made = make_problem(options, shape, texts, folder)
    size, times = (512, 4) if options.quick else (8192, 16) if options.gpu else (2048, 4)
    contenders = [
        Contender("packed", ours.train_step, (made, "packed")),
        Contender("one text a row", ours.train_step, (made, "single")),
    ]
    if options.peer:
        from experiments.benchmarks import torch_peer

        for name, width in (("torch, padded to 32", 32), ("torch, padded to the longest", None)):
            contenders.append(Contender(name, torch_peer.train_step, (made, width)))
    contenders.append(
        Contender("matrix product", ours.matrix_product, (size, options.dtype, times))
    )
    results = harness.contest(options, contenders, repeats=3, check=same_losses)
    count = functools.partial(problem.useful_flops, problem.SHAPES[shape], train=True)
    flops = float(np.mean([count(batch, made.options.head_dim) for batch in made.batches]))
    tokens = float(np.mean([batch.lengths.sum() for batch in made.batches]))
    number = np.mean([np.count_nonzero(batch.lengths) for batch in made.batches])
    peak = results.pop("matrix product", None)
    rate = peak["facts"]["flops"] / peak["seconds"]["median"] if peak else None
    for found in results.values():
        seconds = found["seconds"]["median"]
        found["useful_tokens_a_second"] = round(tokens / seconds)
        if rate:
            found["share_of_peak"] = round(flops / seconds / rate, 4)
    return {
        "case": "train_step",
        "encoder": shape,
        "texts": texts,
        "queries": made.options.batch_size,
        "pool": made.options.pool_size,
        "labels": made.num_labels,
        "head_dim": made.options.head_dim,
        "dtype": options.dtype,
        "useful_tokens_a_step": round(tokens),
        "tokens_a_text": round(float(tokens / number), 2),
        "useful_gflops_a_step": round(flops / 1e9, 1),
        "peak_gflops_a_second": rate and round(rate / 1e9, 1),
        "packed_is_faster": harness.ratios(results, "packed"),
        "contenders": results,
    }


def same_losses(facts: dict[str, Any]) -> None:
    """All contenders start from the same losses.

    Raises:
      ContenderError: they differ by more than 1e-4 of their size.
    """
    losses = {name: found["losses"] for name, found in facts.items() if "losses" in found}
    first = next(iter(losses.values()))
    for name, values in losses.items():
        for part, value in values.items():
            if not abs(value - first[part]) <= 1e-4 * max(1.0, abs(first[part])):
                raise harness.ContenderError(
                    f"{name}: {part} is {value} where another contender has {first[part]} on the "
                    "same weights and batch: they do not compute the same step."
                )
