"""A label's strongest neighbours as bars: for the terminal, and as a picture."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from xmc_jax import files
from xmc_jax.data.dataset import Dataset
from xmc_jax.data.graph import label_graph

BAR = 40  # characters of a bar of 1
SHOWN = 48  # characters of a text in the terminal
FREQUENT = 4  # labels shown where none is named
CLOSE_AMONG = 200_000  # labels up to which a misspelt one is compared with all


@dataclasses.dataclass(frozen=True)
class Neighbours:
    """One label, and the labels that stand together with it most.

    Attributes:
      label: its text.
      points: training points that hold it.
      texts: its neighbours, the strongest first.
      shares: ``P[neighbour | label]``, the soft targets of Gandalf before the threshold.
    """

    label: str
    points: int
    texts: list[str]
    shares: np.ndarray


def find(dataset: Dataset, names: Sequence[str], *, depth: int = 10) -> list[Neighbours]:
    """Neighbours of labels by ``G_ij / G_jj`` (thesis 1.6 and figure 1.2), from training labels.

    Args:
      dataset: the data set.
      names: texts of labels (case is ignored), or their numbers; none = the most frequent labels.
      depth: neighbours of a label, at most.

    Raises:
      ValueError: no such label, with near ones.
    """
    labels = dataset.train.labels
    points = np.bincount(labels.indices, minlength=labels.shape[1])
    chosen = np.argsort(-points, kind="stable")[:FREQUENT]
    if names:
        chosen = _ids(dataset.label_texts, names)
    ids, shares = label_graph.strongest(label_graph.conditionals(labels, chosen), depth)
    return [
        Neighbours(
            dataset.label_texts[label],
            int(points[label]),
            [dataset.label_texts[i] for i in row if i >= 0],
            values[row >= 0],
        )
        for label, row, values in zip(chosen.tolist(), ids, shares)
    ]


def _ids(texts: Sequence[str], names: Sequence[str]) -> np.ndarray:
    """Label ids by text, else by number; the first of several labels of one text."""
    fold = lambda text: text.strip().casefold()
    wanted = {fold(name) for name in names}
    place: dict[str, int] = {}
    for number, text in enumerate(texts):
        if (folded := fold(text)) in wanted:
            place.setdefault(folded, number)
    ids = []
    for name in names:
        if fold(name) in place:
            ids.append(place[fold(name)])
        elif name.strip().isdigit() and int(name) < len(texts):
            ids.append(int(name))
        else:
            some = (texts[i] for i in range(min(len(texts), CLOSE_AMONG)))
            near = difflib.get_close_matches(name, some, n=3)
            hint = f" Near ones: {' | '.join(near)}." if near else ""
            raise ValueError(
                f"--labels: no label {name.strip()!r} among {len(texts):,}; expected texts of "
                f"labels, or numbers from 0, with | between them.{hint}"
            )
    return np.array(ids, np.int64)


def lines(charts: Sequence[Neighbours], delta: float = 0.1) -> list[str]:
    """Bars for the terminal; what Gandalf's threshold drops is drawn lighter."""
    bars = []
    for one in charts:
        bars.append(f"{one.label} ({one.points:,} training points)")
        for text, share in zip(one.texts, one.shares):
            bar = ("█" if share > delta else "░") * max(1, round(BAR * share))
            short = text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
            bars.append(f"  {short:<{SHOWN}} {share:5.2f} {bar}")
        if not one.texts:
            bars.append("  stands with no other label")
    return bars


def save_png(charts: Sequence[Neighbours], path: Path, delta: float = 0.1) -> None:
    """Bar charts, one a label, two in a row.

    Raises:
      ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            f"{path}: pictures need matplotlib, which is not installed. Run "
            "pip install 'xmc_jax[plots]', or leave --output away."
        ) from error
    columns = min(2, len(charts))
    rows = math.ceil(len(charts) / columns)
    depth = max(1, *(len(one.texts) for one in charts))
    figure = Figure(figsize=(6.5 * columns, (0.8 + 0.28 * depth) * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for one, axis in zip(charts, axes):
        names = [text if len(text) <= SHOWN else text[: SHOWN - 1] + "…" for text in one.texts]
        places = np.arange(len(names))
        axis.barh(places, one.shares, color=np.where(one.shares > delta, "C0", "lightgray"))
        axis.axvline(delta, color="gray", linewidth=0.8, linestyle=":")
        axis.set_yticks(places, names, fontsize=8, parse_math=False)
        axis.set_title(f"{one.label} ({one.points:,} points)", fontsize=9, parse_math=False)
        axis.invert_yaxis()
        axis.set_xlim(0, 1)
    for axis in axes[len(charts) :]:
        axis.set_axis_off()
    with files.replacing(path, binary=True) as file:
        figure.savefig(file, format="png", dpi=120)
