"""Small runs of both families as a user starts them, and how they ended; of any checkout."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

SHARED = (
    "batch_size=16 pool_size=48 row_length=32 refresh_epochs=1 eval_epochs=1 max_minutes=0.0 "
    "held_out_share=0.05 log_steps=1 encoder.vocab_size=300"
)
FAMILIES = {
    "unidec": (
        "configs/unidec.py:{data}",
        "max_length=16 epochs=3 encoder.name=bag encoder.dim=16 head_dim=16 hard_negatives=True "
        "batching=clusters lr.encoder=0.005 lr.heads=0.005 lr.table=0.01",
    ),
    "frugal": (
        "configs/frugal.py:inceptionxml-lf,{data}",
        "max_length=8 epochs=4 encoder.dim=64 encoder.vocabulary=words clusters.size=4 "
        "clusters.top=4 graph.neighbours=4 graph.tokens=8",
    ),
}
TIMES = ("seconds", "tokens_per_second", "queries_per_second")
MODULES = Path(__file__).parent


def write_data(path: Path, *, rows: int = 160, words: int = 0) -> Path:
    """Own data in which labels are words of the texts; ``words`` more make the texts long."""
    rng = np.random.default_rng(0)
    topics = "apple river engine violin planet garden castle copper".split()
    kinds = "red old small loud cold round wild plain".split()
    lines = []
    for row in range(rows):
        topic, kind, other = rng.integers(0, 8, 3)
        labels = sorted({f"{kinds[kind]} {topics[topic]}", f"{kinds[other]} {topics[topic]}"})
        text = f"{kinds[kind]} {topics[topic]} or {kinds[other]} number {row}" + " more" * words
        lines.append(f"{text}\t{'|'.join(labels)}\n")
    path.write_text("".join(lines))
    return path


@dataclasses.dataclass
class Place:
    """A folder for runs of one checkout's code, with a cache of its own."""

    root: Path
    folder: Path

    def environment(self, **more: str) -> dict[str, str]:
        """Of its processes: what one compiled, the next need not."""
        return {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "HF_HUB_OFFLINE": "1",
            "XLA_FLAGS": "--xla_backend_optimization_level=0",
            "JAX_COMPILATION_CACHE_DIR": str(self.folder.parent / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
            "XMC_CACHE": str(self.folder / "cache"),
            "PYTHONPATH": str(self.root),
            **more,
        }

    def start(self, module: str, *arguments: object, **more: str) -> subprocess.Popen[str]:
        """A binary in this place; ``more`` is its environment."""
        command = [sys.executable, "-m", f"xmc_jax.{module}", *map(str, arguments)]
        pipe = subprocess.PIPE
        env = self.environment(**more)
        return subprocess.Popen(
            command, stdout=pipe, stderr=pipe, text=True, cwd=self.folder, env=env
        )

    def run(self, module: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        """A binary to its end."""
        return ended(self.start(module, *arguments))

    def training(self, family: str, data: Path, workdir: Path) -> list[str]:
        """Arguments of `xmc_jax.train`."""
        config, fields = FAMILIES[family]
        values = [f"--config.{field}" for field in f"{SHARED} {fields}".split()]
        return [f"--config={self.root}/{config.format(data=data)}", *values, f"--workdir={workdir}"]


def ended(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    """Waits for a process; one that takes ten minutes hangs."""
    try:
        out, err = process.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        err += "\nTraceback: it hung"
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def last_step(workdir: Path) -> int:
    """The newest step in the log."""
    path = workdir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


def end_of(workdir: Path, *, log: bool = True) -> dict[str, Any]:
    """What two runs must have in common: arrays of the last checkpoint, evaluations, the log."""
    import orbax.checkpoint as ocp

    newest = max((workdir / "checkpoints").iterdir(), key=lambda path: int(path.name))
    import jax

    end: dict[str, Any] = {"step": newest.name}
    with ocp.StandardCheckpointer() as reader:
        trees = {part: reader.restore(newest / part) for part in ("model", "optimizer")}
    for path, leaf in jax.tree_util.tree_leaves_with_path(trees):
        array = np.asarray(leaf)
        value = f"{array.dtype} {array.shape} {hashlib.md5(array.tobytes()).hexdigest()}"
        end[jax.tree_util.keystr(path)] = value
    for path in sorted(workdir.glob("eval-*.json")):
        end[path.name] = json.loads(path.read_text())["heads"]
    if log:
        lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
        kept = [line for line in lines if "epoch_steps" not in line]
        end["log"] = [{k: v for k, v in line.items() if k not in TIMES} for line in kept]
    return end


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Names of what differs between two ends."""
    names = sorted(found.keys() | expected.keys())
    return [name for name in names if found.get(name) != expected.get(name)]
