"""Benchmarks, one JSON line a case.

python -m experiments.benchmarks CASE [CASE ...] [--quick] [--peer=torch] [flags]

train_step    a training step: packed, one text a row, PyTorch over padded rows (--peer=torch)
frugal_step   a step of each frugal system and of UniDEC's bag, on the same batch sizes
labels_sweep  time and temporary memory of a step at 10^5, 10^6 and 10^7 labels
host          batches a second out of the data pipeline, and whether the device waits for them
refresh       embedding, clustering, index build and search, each with its peer
predict       texts a second and latency for top-100 over 74 K and 1.3 M labels
retrieval     ranking with retrieval against the base's, at 2.2 M points and 1.3 M labels
label_graph   Gandalf's targets of 1.3 M labels, exact and by random walks
metrics       metrics on 135 K x 131 K against a plain implementation

Times are medians with quartiles and extremes over rounds after a warm-up; contenders take turns in
processes of their own (see harness.py). Ratios count on an idle machine only: load_before is the
load average before the case. Peers need pip install '.[bench]'.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path

import jax

CASES = (
    *("train_step", "frugal_step", "labels_sweep", "host"),
    *("refresh", "predict", "retrieval", "label_graph", "metrics"),
)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The flags; ``options.wanted(line)`` tells whether ``--only`` lets a line pass."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("cases", nargs="*", help=f"of {', '.join(CASES)}; all if none is named")
    add("--quick", action="store_true", help="toy sizes: for errors, not for times")
    add("--peer", choices=["torch"], help="run the PyTorch peers too")
    add("--gpu", action="store_true", help="a GPU's sizes and bfloat16")
    add("--data", default="", help="folder of LF-WordNetTitles, or a root that holds it")
    add("--encoder", default="", help="Hugging Face folder of MiniLM; default random weights")
    add("--shapes", nargs="+", choices=["tiny", "minilm", "distilbert"], help="of the encoder")
    add("--texts", nargs="+", choices=["titles", "amazon"], default=["titles", "amazon"])
    add("--queries", type=int, help="Q of train_step, frugal_step")
    add("--pool", type=int, help="P of train_step, frugal_step")
    add("--labels", type=int, help="rows of the table with synthetic texts")
    add("--head_dim", type=int, default=256, help="d of one head")
    add("--dtype", choices=["float32", "bfloat16"], help="of the encoder")
    add(
        "--scale",
        type=float,
        default=1.0,
        help="of label_graph, retrieval; SciPy's G has 8 GB at 1",
    )
    add("--repeats", type=int, help="rounds that count")
    add("--only", default="", help="only lines whose name has this in it")
    add("--without", nargs="+", default=[], help="contenders to leave out, by name")
    add("--out", type=Path, help="file that the lines are added to")
    options = parser.parse_args(arguments)
    # Not by choices=: before Python 3.12 argparse takes an absent "*" for a wrong choice.
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"unknown cases {sorted(unknown)}; expected some of {', '.join(CASES)}")
    options.cases = options.cases or list(CASES)
    options.dtype = options.dtype or ("bfloat16" if options.gpu else "float32")
    options.wanted = lambda line: options.only in line
    return options


def main() -> None:
    """Runs the cases."""
    options = parse()
    if options.quick:  # compiling is most of it
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    from experiments.benchmarks import harness

    jax.config.update("jax_platforms", "cpu")  # of this process; contenders take the device
    for name in options.cases:
        case = importlib.import_module(f"experiments.benchmarks.{name}")
        environment = harness.environment()
        for found in case.cases(options):
            line = json.dumps({**found, "command": " ".join(sys.argv[1:]), **environment})
            print(line, flush=True)
            if options.out:
                with options.out.open("a") as file:
                    file.write(line + "\n")


if __name__ == "__main__":
    main()
