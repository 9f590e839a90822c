"""Stages of a run: ranges of epochs between which other parts are trained, or begin anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xmc_jax.contracts import Stage


def at(stages: Sequence[Stage], epoch: int) -> Stage:
    """The stage that an epoch is in; the last one from its beginning on."""
    return [stage for stage in stages if stage.first <= epoch][-1]


def before(stages: Sequence[Stage], stage: Stage) -> tuple[Stage, ...]:
    """The stages that come before one."""
    return tuple(other for other in stages if other.first < stage.first)


def scaled(stages: Sequence[Sequence[Any]], epochs: int, *, field: str) -> tuple[Any, ...]:
    """Stages of the same proportions, one epoch each at least, that last ``epochs`` in all.

    Args:
      stages: ``(epochs, ...)`` each.
      epochs: of the whole run.
      field: of the configuration, for the error.

    Raises:
      ValueError: fewer epochs than stages.

    >>> scaled(((20, "encoder"), (10, "tables")), 9, field="stages")
    ((6, 'encoder'), (3, 'tables'))
    """
    if epochs < len(stages):
        raise ValueError(
            f"{epochs} epochs for the {len(stages)} {field} of config.{field}: raise config.epochs "
            "or config.max_minutes."
        )
    total = sum(stage[0] for stage in stages)
    ends: list[int] = []
    seen = 0
    for number, stage in enumerate(stages, 1):
        seen += stage[0]
        least, most = (ends[-1] if ends else 0) + 1, epochs - (len(stages) - number)
        ends.append(min(max(round(seen * epochs / total), least), most))
    starts = [0, *ends[:-1]]
    return tuple((b - a, *stage[1:]) for a, b, stage in zip(starts, ends, stages))
