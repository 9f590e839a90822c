"""What a configuration may ask of a pretrained folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from xmc_jax.systems import encoders
from xmc_jax.systems.encoders import EncoderOptions

NO_COUNTS = np.zeros(0, np.int64)
NOWHERE = Path("no-folder")
REST = {"seed": 0, "max_length": 16, "head_dim": 16}


@pytest.mark.parametrize("family", ["bert", "distilbert"])
def test_a_text_may_not_be_longer_than_the_encoders_positions(golden, family):
    folder = str(golden / f"encoder_{family}")  # 40 positions, 97 tokens
    options = EncoderOptions(folder)
    made, _ = encoders.encoder(options, NOWHERE, 97, NO_COUNTS, **{**REST, "max_length": 40})
    assert made.config.max_positions == 40
    message = f"config.max_length = 41: {folder} has positions .* at most 40 tokens. Set --config"
    with pytest.raises(ValueError, match=message):
        encoders.encoder(options, NOWHERE, 97, NO_COUNTS, **{**REST, "max_length": 41})


@pytest.mark.parametrize("option", ["name", "embeddings"])
def test_every_token_has_an_embedding(golden, option):
    folder = str(golden / "encoder_bert")
    options = EncoderOptions(**{"name": "bag", option: folder})
    encoders.encoder(options, NOWHERE, 97, NO_COUNTS, **REST)
    with pytest.raises(ValueError, match=f"{folder}: its tokenizer has 98 tokens, .* of 97;"):
        encoders.encoder(options, NOWHERE, 98, NO_COUNTS, **REST)
