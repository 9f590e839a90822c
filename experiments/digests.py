"""Digests of what a few short runs end with, to show that another commit changes no bit of it.

python -m experiments.digests --root=CHECKOUT --output=FILE.json
python -m experiments.digests --root=CHECKOUT --output=NEW.json --against=FILE.json

Each case trains for about fifty steps on the bundled LF-WordNetTitles-Mini, with refreshes, looks
at held-out rows and the evaluation on test rows, by ``python -m xmc_jax.train`` within the
checkout: this script holds nothing of the package, so it measures any commit. A case takes about
half a minute on two cores. Printed is a line a case with the beginnings of the digests of

  model, optimizer   all arrays of the last checkpoint, by type, shape and bytes. Names and order do
                     not count, nor how often a scalar occurs: a counter of steps may be kept once
                     or many times.
  refresh            the refreshes that are left: hard negatives, order, offsets, label clusters
  losses             of every step, with the norms of the gradients
  held_out           metrics of the held-out rows after every epoch
  heads, bins        of the evaluation on test rows

and with ``--against`` the names of those that are not as in an earlier output; exit code 1 if there
is one. Sums of floats depend on the processor, the number of threads and the versions of packages:
compare runs of one machine, environment and number of cores only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from experiments import small_bert

ENCODER = "PRETRAINED"  # in the flags: the folder that `small_bert.write` makes
REFRESH_FILES = ("hard_negatives", "order", "offsets", "label_clusters")
SHARED = {
    "batch_size": 112,
    "pool_size": 384,
    "epochs": 3,
    "eval_epochs": 1,
    "refresh_epochs": 1,
    "log_steps": 1,
    "encoder.dim": 32,
    "encoder.vocab_size": 1000,
    "encoder.token_scale": 1.0,
    "lr.encoder": 0.01,
    "lr.heads": 0.01,
}
DUAL = {**SHARED, "head_dim": 32, "hard_negatives": True, "batching": "clusters"}
FRUGAL = {**SHARED, "batch_size": 96, "clusters.size": 16, "clusters.top": 16}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "unidec": (
        "unidec.py:wordnet-mini,debug",
        {**DUAL, "extra_positives": 2, "extra_pool_size": 128},
    ),
    "depsl": ("depsl.py:wordnet-mini,debug", {**DUAL, "batching": "random"}),
    "frozen": (
        "unidec.py:wordnet-mini,debug",
        {**DUAL, "encoder.name": ENCODER, "encoder.freeze": 2, "fill": "positives"},
    ),
    "gandalf": (
        "unidec.py:wordnet-mini,debug",
        {**DUAL, "batch_size": 224, "gandalf.enabled": True, "table.dtype": "bfloat16"},
    ),
    "astec": ("frugal.py:astec,wordnet-mini,debug", FRUGAL),
    "eclare": ("frugal.py:eclare,wordnet-mini,debug", FRUGAL),
    # Two phases: one epoch without free weights, then two with them.
    "inceptionxml-lf": (
        "frugal.py:inceptionxml-lf,wordnet-mini,debug",
        {**FRUGAL, "encoder.dim": 64, "encoder.token_scale": 0.4},
    ),
}


def of_arrays(arrays: Iterable[np.ndarray]) -> str:
    """Digest of a multiset of arrays by type, shape and bytes; of equal scalars one counts.

    >>> a, step = np.arange(3), np.int32(7)
    >>> of_arrays([a, step]) == of_arrays([step, step, a])
    True
    >>> of_arrays([a, a]) == of_arrays([a])
    False
    """
    found, scalars = [], set()
    for array in map(np.asarray, arrays):
        head = f"{array.dtype} {array.shape} ".encode()
        digest = hashlib.sha256(head + array.tobytes()).hexdigest()
        if array.ndim:
            found.append(digest)
        else:
            scalars.add(digest)
    return hashlib.sha256("".join(sorted([*found, *scalars])).encode()).hexdigest()


def of_json(value: Any) -> str:
    """Digest of what JSON holds; floats by their shortest decimal form, which is exact."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def checkpoint_arrays(folder: Path) -> list[np.ndarray]:
    """All arrays of a part of a checkpoint, restored without a target, as NumPy."""
    with ocp.PyTreeCheckpointer() as reader:
        tree = reader.metadata(folder).item_metadata.tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        return jax.tree.leaves(reader.restore(folder, restore_args=as_numpy))


def of_run(workdir: Path) -> dict[str, Any]:
    """Digests of a finished run, and some of what they stand for."""
    newest = max((workdir / "checkpoints").iterdir(), key=lambda path: int(path.name))
    parts = {part: checkpoint_arrays(newest / part) for part in ("model", "optimizer")}
    log = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    losses = [
        [line["step"], {k: v for k, v in line.items() if "loss" in k or k == "gradient_norm"}]
        for line in log
        if "loss" in line
    ]
    held_out = [[line["step"], line["held_out"]] for line in log if "held_out" in line]
    (evaluated,) = workdir.glob("eval-test-*.json")
    evaluation = json.loads(evaluated.read_text())
    for part in ("heads", "bins"):  # the model's own: 6654296 has no retrieval
        evaluation[part] = {
            head: values
            for head, values in evaluation[part].items()
            if not head.endswith("+retrieval")
        }
    refreshes = {
        f"refresh/{path.parent.name}/{path.stem}": of_arrays([np.load(path)])
        for path in sorted(workdir.glob("refresh/*/*.npy"))
        if path.stem in REFRESH_FILES
    }
    return {
        "digests": {
            **{part: of_arrays(arrays) for part, arrays in parts.items()},
            **refreshes,
            "losses": of_json(losses),
            "held_out": of_json(held_out),
            "heads": of_json(evaluation["heads"]),
            "bins": of_json(evaluation["bins"]),
        },
        "seen": {
            "steps": int(newest.name),
            "evaluated": evaluation["step"],
            "arrays": {part: len(arrays) for part, arrays in parts.items()},
            "numbers": {part: sum(x.size for x in arrays) for part, arrays in parts.items()},
            "loss": losses[-1][1]["loss"],
            "P@5": {k: v["filtered"]["P@5"] for k, v in evaluation["heads"].items()},
        },
    }


def train(root: Path, case: str, scratch: Path) -> Path:
    """The work directory of a case, trained by the code of a checkout.

    Raises:
      RuntimeError: training failed; with the end of what it said.
    """
    options, flags = CASES[case]
    if ENCODER in flags.values():
        flags = {**flags, "encoder.name": str(small_bert.write(scratch / "encoder"))}
    workdir = scratch / case
    command = [
        *(sys.executable, "-m", "xmc_jax.train", f"--config=configs/{options}"),
        *(f"--config.{name}={value}" for name, value in flags.items()),
        f"--workdir={workdir}",
    ]
    environment = {**os.environ, "XMC_CACHE": str(scratch / "cache"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{case}: {' '.join(command)} in {root} failed:\n{done.stderr[-4000:]}")
    return workdir


def different(found: Mapping[str, Any], earlier: Mapping[str, Any]) -> list[str]:
    """Names ``case/digest`` of what is not as it was; what one of them lacks is different."""
    names = []
    for case, measured in found.items():
        have, want = measured["digests"], earlier.get(case, {}).get("digests", {})
        every = sorted(have.keys() | want.keys())
        names += [f"{case}/{name}" for name in every if have.get(name) != want.get(name)]
    return names


def line(case: str, measured: Mapping[str, Any], seconds: float) -> str:
    """A case as it is printed."""
    digests = dict(measured["digests"])
    files = [digests.pop(name) for name in sorted(digests) if name.startswith("refresh/")]
    shown = {"refresh": of_json(files), **digests}
    parts = "  ".join(f"{name} {digest[:8]}" for name, digest in shown.items())
    seen = measured["seen"]
    return f"{case}: {parts}  ({seen['steps']} steps, loss {seen['loss']:.4f}, {seconds:.0f} s)"


def check_code(root: Path) -> str:
    """The commit of a checkout, whose own package is what Python finds there.

    Raises:
      ValueError: it is another's.
    """
    where = [sys.executable, "-c", "import xmc_jax; print(xmc_jax.__file__)"]
    found = subprocess.run(where, cwd=root, capture_output=True, text=True, check=True).stdout
    if not Path(found.strip()).resolve().is_relative_to(root):
        raise ValueError(f"--root={root}: there Python finds {found.strip()}; expected its own.")
    head = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=7"]
    return subprocess.run(head, capture_output=True, text=True, check=True).stdout.strip()


def measure(root: Path, cases: Sequence[str]) -> dict[str, Any]:
    """Train the cases and print their digests, one by one."""
    result: dict[str, Any] = {"commit": check_code(root), "cases": {}}
    with tempfile.TemporaryDirectory(prefix="xmc-digests-") as scratch:
        for case in cases:
            started = time.perf_counter()
            measured = of_run(train(root, case, Path(scratch)))
            result["cases"][case] = measured
            print(line(case, measured, time.perf_counter() - started), flush=True)
    return result


def main() -> None:
    """Trains the cases, prints and keeps their digests, compares."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--root", type=Path, required=True, help="checkout whose code is run")
    add("--output", type=Path, required=True, help="JSON file for the digests")
    add("--against", type=Path, help="an earlier output to compare with")
    add("--cases", default=",".join(CASES), help="some of %(default)s")
    options = parser.parse_args()
    root, cases = options.root.resolve(), options.cases.split(",")
    if unknown := set(cases) - set(CASES):
        parser.error(f"--cases: found {', '.join(unknown)}; expected some of {', '.join(CASES)}.")
    if not options.output.absolute().parent.is_dir():
        parser.error(f"--output={options.output}: there is no such folder.")
    earlier = json.loads(options.against.read_text()) if options.against else None
    jax.config.update("jax_platforms", "cpu")  # of this process, which only reads checkpoints
    try:
        result = measure(root, cases)
    except (RuntimeError, ValueError) as error:
        sys.exit(str(error))
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    if earlier is not None:
        names = different(result["cases"], earlier["cases"])
        print(f"against {earlier['commit']}: {', '.join(names) or 'all equal'}")
        sys.exit(1 if names else 0)


if __name__ == "__main__":
    main()
