"""UniDEC: dual encoder and classifier trained together.

python -m xmc_jax.train --config=configs/unidec.py:wordnet-mini
python -m xmc_jax.train --config=configs/unidec.py:amazontitles1.3m --data=FOLDER
python -m xmc_jax.train --config=configs/unidec.py:OWN_FOLDER_OR_FILE --config.max_minutes=30

Options after the data set: loss=decoupled_softmax|supcon|triplet, alone or with +bce, or bce (the
classifier's; the dual encoder takes the part before the plus), encoder=bag|HUB_NAME_OR_FOLDER,
embeddings=FOLDER_OR_FILE (token table of the bag encoder), paper=thesis|preprint, debug.

All fields, with a comment each: `xmc_jax/systems/unidec/defaults.py`; what all families share:
`xmc_jax/systems/defaults.py`.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from xmc_jax.systems.unidec import defaults


def get_config(arg: str | None = None) -> ConfigDict:
    """The configuration of ``DATASET[,option=value...]``."""
    return defaults.get_config(arg)
