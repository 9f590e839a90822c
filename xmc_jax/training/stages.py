"""Phases of a run: ranges of epochs between which parts of the model begin anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

CLUSTERS = ("pifa", "text")


class Phase(NamedTuple):
    """A range of epochs.

    Attributes:
      first: its first epoch.
      epochs: how many it has.
      free_weights: whether labels have weights of their own in it.
      clusters: what labels are clustered by when it begins: ``pifa`` or ``text``.
    """

    first: int
    epochs: int
    free_weights: bool = True
    clusters: str = "pifa"


def of(config: ConfigDict) -> list[Phase]:
    """The phases of ``config.phases``; one phase of all epochs where there is no such field."""
    if "phases" not in config:
        return [Phase(0, config.epochs)]
    found, first = [], 0
    for epochs, free_weights, clusters in config.phases:
        found.append(Phase(first, epochs, free_weights, clusters))
        first += epochs
    return found


def at(config: ConfigDict, epoch: int) -> Phase:
    """The phase that an epoch is in; the last one from its beginning on."""
    return [phase for phase in of(config) if phase.first <= epoch][-1]


def scaled(phases: Sequence[Sequence[Any]], epochs: int) -> tuple[tuple[Any, ...], ...]:
    """Phases of the same proportions, one epoch each at least, that last ``epochs`` in all.

    Raises:
      ValueError: fewer epochs than phases.

    >>> scaled(((20, False, "pifa"), (10, True, "text")), 9)
    ((6, False, 'pifa'), (3, True, 'text'))
    """
    if epochs < len(phases):
        raise ValueError(
            f"{epochs} epochs for the {len(phases)} phases of config.phases: raise config.epochs "
            "or config.max_minutes."
        )
    total = sum(phase[0] for phase in phases)
    ends, seen = [], 0
    for number, phase in enumerate(phases, 1):
        seen += phase[0]
        least, most = (ends[-1] if ends else 0) + 1, epochs - (len(phases) - number)
        ends.append(min(max(round(seen * epochs / total), least), most))
    starts = [0, *ends[:-1]]
    return tuple((b - a, *phase[1:]) for a, b, phase in zip(starts, ends, phases))
