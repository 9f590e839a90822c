"""What a configuration may ask of a pretrained folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny

from xmc_jax.systems import encoders

NO_COUNTS = np.zeros(0, np.int64)
NOWHERE = Path("no-folder")


@pytest.mark.parametrize("family", ["bert", "distilbert"])
def test_a_text_may_not_be_longer_than_the_encoders_positions(golden, family):
    folder = str(golden / f"encoder_{family}")  # 40 positions, 97 tokens
    whole = {"encoder__name": folder, "encoder__freeze": 0}
    made, _ = encoders.encoder(tiny.config("x", **whole, max_length=40), NOWHERE, 97, NO_COUNTS)
    assert made.config.max_positions == 40
    message = f"config.max_length = 41: {folder} has positions .* at most 40 tokens. Set --config"
    with pytest.raises(ValueError, match=message):
        encoders.encoder(tiny.config("x", **whole, max_length=41), NOWHERE, 97, NO_COUNTS)


@pytest.mark.parametrize("option", ["encoder__name", "encoder__embeddings"])
def test_every_token_has_an_embedding(golden, option):
    folder = str(golden / "encoder_bert")
    config = tiny.config("x", **{option: folder}, encoder__freeze=0)
    encoders.encoder(config, NOWHERE, 97, NO_COUNTS)
    with pytest.raises(ValueError, match=f"{folder}: its tokenizer has 98 tokens, .* of 97;"):
        encoders.encoder(config, NOWHERE, 98, NO_COUNTS)
