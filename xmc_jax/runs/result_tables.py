"""Evaluation results as text."""

from __future__ import annotations

from typing import Any


def table(result: dict[str, Any]) -> str:
    """The tables of an evaluation: heads, filtered and unfiltered, and frequency bins."""
    a, b = result["propensity"]["a"], result["propensity"]["b"]
    tail = f", tail weight {t:g}" if (t := result["tail_weight"]) else ""
    lines = [
        f"{result['split']} rows: {result['rows']:,}, checkpoint of step {result['step']}, "
        f"index {result['index']}, propensity A = {a}, B = {b}{tail}; percent"
    ]
    for view in ("filtered", "unfiltered"):
        names = list(next(iter(result["heads"].values()))[view])
        lines.append(f"{view:<12}" + "".join(f"{name:>10}" for name in names))
        for head, values in result["heads"].items():
            row = "".join(f"{values[view][name]:10.2f}" for name in names)
            lines.append(f"  {head:<10}{row}")
    head, bins = next(iter(result["bins"].items()))
    lines.append(f"P@5 of {head} by label frequency (bin 1 = head; the bins add up to P@5)")
    for entry in bins:
        lines.append(
            f"  bin {entry['bin']}: {entry['value']:6.2f}   {entry['labels']:,} labels, "
            f"{entry['mean_frequency']:.1f} training points each"
        )
    return "\n".join(lines)


def threshold_table(rows: list[dict[str, float]], head: str) -> str:
    """Score thresholds of a head against precision and recall, from held-out rows."""
    if not rows:
        return "no held-out rows, so no table of score thresholds (config.held_out_share)"
    lines = [f"score thresholds of {head}, from held-out rows"]
    lines.append("".join(f"{name:>24}" for name in rows[0]))
    lines += ["".join(f"{value:24.4g}" for value in row.values()) for row in rows]
    return "\n".join(lines)
