"""Evaluation results as text."""

from __future__ import annotations

from typing import Any

WIDTH = 100  # of a terminal
_NAME, _CELL = 20, 8
_FIRST = ("P", "PSP", "R", "nDCG", "PSnDCG", "C")  # as many of these as fit


def table(result: dict[str, Any], *, full: bool = False) -> str:
    """The tables of an evaluation: heads, filtered and unfiltered, and frequency bins.

    Args:
      result: of `xmc_jax.runs.open_runs.evaluate_run`.
      full: all metrics, some below the others; else those that fit beside each other.
    """
    a, b = result["propensity"]["a"], result["propensity"]["b"]
    tail = f", tail weight {t:g}" if (t := result["tail_weight"]) else ""
    lines = [
        f"{result['split']} rows: {result['rows']:,}, checkpoint of step {result['step']}, "
        f"index {result['index']}, propensity A = {a}, B = {b}{tail}; percent"
    ]
    if bare := result.get("rows_without_labels"):
        lines.append(f"{bare:,} of these rows have no label: they count, as rows without a hit")
    for view in ("filtered", "unfiltered"):
        for names in _groups(list(next(iter(result["heads"].values()))[view]), full):
            lines.append(f"{view:<{_NAME}}" + "".join(f"{name:>{_CELL}}" for name in names))
            for head, values in result["heads"].items():
                row = "".join(f"{values[view][name]:{_CELL}.2f}" for name in names)
                lines.append(f"  {head:<{_NAME - 2}}{row}")
    head, bins = next(iter(result["bins"].items()))
    lines.append(f"P@5 of {head} by label frequency (bin 1 = head; the bins add up to P@5)")
    for entry in bins:
        lines.append(
            f"  bin {entry['bin']}: {entry['value']:6.2f}   {entry['labels']:,} labels, "
            f"{entry['mean_frequency']:.1f} training points each"
        )
    return "\n".join(lines)


def _groups(names: list[str], full: bool) -> list[list[str]]:
    """Names of metrics that stand beside each other."""
    kinds = [[name for name in names if name.split("@")[0] == kind] for kind in _FIRST]
    groups: list[list[str]] = [[]]
    for kind in kinds:
        if groups[-1] and _NAME + _CELL * len(groups[-1] + kind) > WIDTH:
            groups.append([])
        groups[-1] += kind
    return groups if full else groups[:1]


def threshold_table(rows: list[dict[str, float]], head: str, number: int) -> str:
    """Score thresholds of a head against precision and recall, from ``number`` held-out rows."""
    if not rows:
        return "no held-out rows, so no table of score thresholds (config.held_out_share)"
    lines = [f"score thresholds of {head}, from {number:,} held-out rows"]
    lines.append("".join(f"{name:>24}" for name in rows[0]))
    lines += ["".join(f"{value:24.4g}" for value in row.values()) for row in rows]
    return "\n".join(lines)
