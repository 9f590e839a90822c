"""DePSL: the dual encoder of UniDEC alone, no classifier.

python -m xmc_jax.train --config=configs/depsl.py:amazontitles1.3m --data=FOLDER

Options as in configs/unidec.py, marks as in `xmc_jax/systems/unidec/defaults.py`.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from xmc_jax import catalog
from xmc_jax.systems.unidec import defaults


def get_config(arg: str | None = None) -> ConfigDict:
    """The configuration of ``DATASET[,option=value...]``."""
    config = defaults.get_config(arg)
    config.classifier = False
    config.extra_positives = config.extra_pool_size = 0
    config.de_weight = 1.0
    config.tail_weight = 0.0  # UniDEC's is for the sum of two scores
    entry = catalog.find(config.dataset)
    if entry is None or entry.name not in defaults.PAPER:
        return config
    config.head_dim = 384 if entry.name == "LF-AmazonTitles-1.3M" else 512  # [thesis, table 2.2]
    if entry.name == "LF-AmazonTitles-1.3M":
        config.batch_size, config.pool_size = 2200, 4000  # [thesis, table 2.3]
    # Query side only, but symmetric where the text is long and it helped most [thesis, table 2.6].
    config.de.query_weight = 0.5 if entry.name == "LF-WikiSeeAlso-320K" else 1.0
    return config
