"""What is checked in a configuration, and what a run derives from its data and its device."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from xmc_jax import catalog
from xmc_jax.contracts import Family
from xmc_jax.data.dataset import Dataset
from xmc_jax.data.readers.reading import Reading
from xmc_jax.systems import FAMILIES
from xmc_jax.systems.settings import OpenFields, field_of
from xmc_jax.training.options import TrainingOptions


class PlanError(ValueError):
    """The run cannot be carried out as configured."""


def family_of(config: Mapping[str, Any]) -> Family[Any]:
    """The family that a configuration names.

    Raises:
      PlanError: another name.
    """
    name = config.get("family")
    if name not in FAMILIES:
        raise PlanError(f"config.family = {name!r}: expected one of {', '.join(FAMILIES)}.")
    return FAMILIES[name]


def options_of(config: ConfigDict) -> TrainingOptions:
    """The options of a resolved configuration, as its family has them."""
    values = config.to_dict()
    return family_of(values).options(values)


def check(config: ConfigDict) -> None:
    """Check names and numbers of a configuration; fields that are None are left to `resolve`.

    Raises:
      PlanError: an unknown name (with the nearest one), or a number out of range.
    """
    values = config.to_dict()
    family = family_of(values)
    for field, known in family.names.items():
        value = field_of(values, field)
        if value not in known:
            near = difflib.get_close_matches(str(value), known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise PlanError(
                f"config.{field} = {value!r}: expected one of {', '.join(known)}.{hint}"
            )
    for field, (low, high) in family.bounds.items():
        value = field_of(values, field)
        if value is None or (value >= low and (high is None or value <= high)):
            continue
        expected = f"at least {low}" if high is None else f"{low} to {high}"
        raise PlanError(f"config.{field} = {value!r}: expected {expected}.")
    try:
        catalog.with_propensity(catalog.ENTRIES[0], values.get("propensity", ""))
        family.check(values)
    except ValueError as error:
        raise PlanError(str(error)) from error


def resolve(config: ConfigDict, dataset: Dataset) -> tuple[ConfigDict, dict[str, Any]]:
    """Fill in the fields that are None (or an empty encoder name) from the data and the device.

    Args:
      config: the configuration as given; it is not changed.
      dataset: the data set.

    Returns:
      The complete configuration, and what was chosen.

    Raises:
      ValueError: a pretrained encoder whose number of layers is needed cannot be read.
    """
    config = config.copy_and_resolve_references()
    fields = OpenFields(config.to_dict())
    fields.config["reading"] = dataclasses.asdict(Reading.of(fields.config.get("reading", {})))
    family_of(fields.config).resolve(fields, dataset)
    return ConfigDict(fields.config), fields.chosen


def epochs_in(
    minutes: float, *, step: float, steps_per_epoch: int, evaluation: float, every: int
) -> int:
    """Epochs that fit in a budget.

    Args:
      minutes: the budget.
      step: seconds of a step.
      steps_per_epoch: batches of an epoch.
      evaluation: seconds of a held-out evaluation or a refresh.
      every: epochs between two of them.
    """
    budget = 60 * minutes * 0.95 - 2 * evaluation
    return max(1, int(budget / (step * steps_per_epoch + evaluation / every)))
