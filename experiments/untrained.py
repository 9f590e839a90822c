"""A run before its first step, made of the package's own pieces."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from xmc_jax.data.texts import JoinedTexts
from xmc_jax.runs import build, settings
from xmc_jax.systems import encoders
from xmc_jax.systems.embedding import Embedder
from xmc_jax.training import training_data
from xmc_jax.training.loop import Run
from xmc_jax.training.source import BatchSource


class Laps:
    """Seconds of the parts of a script."""

    def __init__(self) -> None:
        """Start the clock."""
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """What was done since the last lap is called so."""
        now = time.perf_counter()
        self.seconds[name] = round(now - self._last, 2)
        self._last = now


def make(config: ConfigDict, folder: Path, laps: Laps | None = None) -> tuple[Run, Any]:
    """Reads the data and draws the parameters, as ``xmc_jax.train`` does.

    Args:
      config: from ``configs/``.
      folder: work directory; gets the tokenizer.
      laps: gets the times of the parts.

    Returns:
      The run, and its first parameters.
    """
    laps = laps or Laps()
    dataset, entry, _ = training_data.read_dataset(config)
    resolved, _ = settings.resolve(config, dataset)
    laps.lap("read")
    texts = JoinedTexts(dataset.train.texts, dataset.label_texts)
    tokenizer = encoders.tokenizer(resolved, texts, folder / "tokenizer")
    laps.lap("tokenizer")
    for collection in (dataset.train.texts, dataset.label_texts):
        training_data.token_store(resolved, tokenizer, collection)
    laps.lap("tokenise")
    data = training_data.load(resolved, dataset, entry, tokenizer)
    laps.lap("hold_out")
    counts = training_data.token_counts(
        (data.train_tokens, data.label_tokens), tokenizer.get_vocab_size()
    )
    encoder, init_encoder = encoders.encoder(resolved, folder, tokenizer.get_vocab_size(), counts)
    model = build.model(resolved, encoder)
    params = model.init(jax.random.key(resolved.seed), init_encoder)
    run = Run(
        config=resolved,
        folder=folder,
        data=data,
        model=model,
        source=BatchSource(resolved, data, encoder.max_segments),
        embedder=Embedder(model, row_length=resolved.row_length),
        epochs=resolved.epochs,
        system=build.system(resolved),
    )
    laps.lap("parameters")
    return run, params
