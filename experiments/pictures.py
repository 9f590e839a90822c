"""Pictures of the experiments: PNG files in ``figures/`` beside the README."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from xmc_jax import files

COLORS = {False: "gray", True: "C0"}  # without and with Gandalf


def figure(width: float, height: float) -> Any:
    """An empty matplotlib figure, in inches.

    Raises:
      ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            "pictures need matplotlib, which is not installed. Run pip install 'xmc_jax[plots]', "
            "then the same command again: what was measured is in the ledger."
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def save(drawn: Any, name: str, dataset: str, folder: Path) -> Path:
    """Writes a figure as PNG; where it lies."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-{_plain(dataset)}.png"
    with files.replacing(path, binary=True) as file:
        drawn.savefig(file, format="png", dpi=120)
    return path


def links(name: str, folder: Path) -> list[str]:
    """Markdown of all pictures of a script, which lie in ``folder`` beside the README."""
    found = sorted(folder.glob(f"{name}-*.png"))
    return [f"![{path.stem}]({folder.name}/{path.name})" for path in found]


def _plain(dataset: str) -> str:
    return "".join(c if c.isalnum() or c in "-." else "_" for c in dataset)
