"""The same number of steps for rows with and without Gandalf, whose epochs are longer.

The longest epoch is that of D and Z together: a few of those fix the number of steps, and every
other row gets as many whole epochs as come nearest to it (within half an epoch of its own). Two
shortlists, and two looks at the held-out rows, are as many steps apart as the data set's own
settings say, again in whole epochs. Sizes come from the catalog, so that nothing need be read; the
steps that were made are in the ledger.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ml_collections import ConfigDict

from experiments import ledger
from experiments.ledger import Row
from xmc_jax import catalog
from xmc_jax.systems.frugal import text_mixing
from xmc_jax.training.options import GandalfOptions

# Label texts that are training texts too, as `xmc_jax.data.splits.text_codes` compares them.
LABELS_THAT_ARE_POINTS = {
    "LF-MobyTitles": 20_546,
    "LF-WordNetTitles": 72_682,
    "LF-WordNetTitles-Mini": 1_839,
}
# Steps of the small data sets: 4, 4 and 20 epochs of D and Z together.
STEPS = {"mobytitles": 916, "wordnettitles": 2316, "wordnet-mini": 580}


def fitted(row: Row, steps: Mapping[str, int] = STEPS) -> Row:
    """The row with epochs, refreshes and evaluations set for each data set.

    Args:
      row: any.
      steps: of a run, by data set.
    """
    by_data = {
        name: {**row.by_data.get(name, {}), **_overrides(row, name, number)}
        for name, number in steps.items()
        if row.fits(name)
    }
    return dataclasses.replace(row, by_data=by_data)


def _overrides(row: Row, dataset: str, steps: int) -> dict[str, int]:
    config = ledger.configuration(dataset, row, 0)
    of_points = steps_per_epoch(config, points_alone=True)
    epoch = steps_per_epoch(config)
    every = max(1, round(config.refresh_epochs * of_points / epoch))
    phases = len(config.get("phases", (1,)))
    return {
        "epochs": max(phases, round(steps / epoch)),
        "refresh_epochs": every,
        "eval_epochs": every,
    }


def steps_per_epoch(config: ConfigDict, *, points_alone: bool = False) -> int:
    """Batches of an epoch; a few rows that lose all their labels to held-out ones are not known.

    Args:
      config: of a data set of the catalog, batches of which are random.
      points_alone: as if Gandalf were off.
    """
    points = _points(config)
    options = GandalfOptions(**config.gandalf)
    if options.enabled and not text_mixing.variant(options) and not points_alone:
        texts = _texts(config.dataset, options)
        points = {"all": points + texts, "labels": texts, "sample": points}[options.points]
    return -(-points // config.batch_size)


def _points(config: ConfigDict) -> int:
    rows = catalog.get(config.dataset).num_train
    return rows - min(round(config.held_out_share * rows), config.held_out_rows)


def _texts(dataset: str, options: GandalfOptions) -> int:
    entry = catalog.get(dataset)
    left_out = LABELS_THAT_ARE_POINTS[entry.name] if options.skip_labels_that_are_points else 0
    return round(options.share * (entry.num_labels - left_out))
