"""What a configuration may ask of a pretrained folder."""

from __future__ import annotations

import json
from pathlib import Path

import jax
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


def test_two_towers_begin_apart_or_from_one_model(golden):
    """A bag's are drawn; a pretrained folder's are two copies, for both are donated to a step."""
    for name, equal in (("bag", False), (str(golden / "encoder_bert"), True)):
        counts = np.ones(97, np.int64)
        one, init_one = encoders.encoder(EncoderOptions(name), NOWHERE, 97, counts, **REST)
        options = EncoderOptions(name, towers=2)
        two, init = encoders.encoder(options, NOWHERE, 97, counts, **REST)
        assert (two.query, two.label) == (one, one) and one.shared and not two.shared
        assert encoders.restore(json.loads(json.dumps(encoders.describe(two)))) == two
        params = init(jax.random.key(0))
        query, label = (jax.tree.leaves(params[side]) for side in ("query", "label"))
        assert len(query) == len(label) == len(jax.tree.leaves(init_one(jax.random.key(0))))
        assert all(np.array_equal(a, b) for a, b in zip(query, label)) == equal
        assert not any(a is b for a, b in zip(query, label))
