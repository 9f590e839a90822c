"""What is checked in a configuration, and what a run derives from its data and its device."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from xmc_jax.training import augmentation, stages
from xmc_jax.systems.frugal import text_mixing
from xmc_jax.data.batching import batches, pools
from xmc_jax.data.graph import gandalf
from xmc_jax.data.tokens import word_vectors
from xmc_jax.data.search import index as indexes
from xmc_jax.data.dataset import Dataset
from xmc_jax.data.tokens.tokenizer import split_words
from xmc_jax.models import pretrained
from xmc_jax.training.training_data import WORD_VECTORS

SAMPLE_TEXTS = 10_000
SAMPLE_CHARACTERS = 4096  # of a text: far more than the longest row holds
FEW_ROWS = 10_000  # up to here the bag encoder's rates are those of a small data set
NAMES = {
    "batching": batches.BATCHINGS,
    "fill": pools.FILLS,
    "index": ("auto", *indexes.KINDS),
    "table.init": ("labels", "normal"),
    "table.dtype": ("float32", "bfloat16"),
    "encoder.compute_dtype": ("float32", "bfloat16"),
    "encoder.pooling": ("mean", "cls"),
    "encoder.vocabulary": ("wordpiece", "words"),
    "gandalf.variant": gandalf.VARIANTS,
    "gandalf.draw": pools.DRAWS,
    "gandalf.points": augmentation.POINTS,
    "gandalf.order": augmentation.ORDERS,
}
BOUNDS = {  # at least, at most
    "batch_size": (1, None),
    "pool_size": (1, None),
    "epochs": (1, None),
    "max_minutes": (0, None),
    "max_length": (1, None),
    "row_length": (1, None),
    "head_dim": (0, None),
    "head_dropout": (0, 0.99),
    "beta": (1, None),
    "eta": (0, None),
    "extra_positives": (0, None),
    "extra_pool_size": (0, None),
    "refresh_epochs": (1, None),
    "warmup_epochs": (0, None),
    "eval_epochs": (1, None),
    "log_steps": (1, None),
    "gandalf.delta": (0, 0.99),
    "gandalf.share": (0, 1),
    "held_out_share": (0, 0.99),
    "held_out_rows": (0, None),
    "de_weight": (0, 1),
    "tail_weight": (-10, 10),
    "de.query_weight": (0, 1),
    "clf.query_weight": (0, 1),
    "de.temperature": (1e-4, None),
    "clf.temperature": (1e-4, None),
    "clf.bce_weight": (0, None),
    "encoder.dim": (1, None),
    "encoder.token_scale": (1e-6, None),
    "encoder.dropout": (0, 0.99),
    "encoder.freeze": (0, None),
    "encoder.vocab_size": (256, None),
    "lr.encoder": (0, None),
    "lr.heads": (0, None),
    "lr.table": (0, None),
    "lr.warmup": (0, 1),
    "lr.weight_decay": (0, None),
    "lr.clip_norm": (0, None),
}


OF_TRANSFORMERS = {  # options of the encoder that a bag does not have, and what is none of it
    "freeze": 0,
    "pooling": "mean",
    "remat": False,
    "compute_dtype": "float32",
}
OF_GANDALF = {  # options of Gandalf, and their usual values
    "variant": "graph",
    "delta": 0.1,
    "draw": "target",
    "points": "all",
    "share": 1.0,
    "order": "random",
    "skip_labels_that_are_points": False,
}
_SHARED_NAMES = (
    "fill",
    "table.dtype",
    "encoder.vocabulary",
    *(name for name in NAMES if "gandalf" in name),
)
FRUGAL_NAMES = {
    **{name: NAMES[name] for name in _SHARED_NAMES},
    "family": ("frugal",),
    "batching": ("random",),
    "encoder.name": WORD_VECTORS,
    "table.init": ("labels", "normal"),
    "gandalf.variant": (*gandalf.VARIANTS, *text_mixing.VARIANTS),
}
_ONLY_DUAL = ("head_dim", "head_dropout", "de_weight", "encoder.freeze")
FRUGAL_BOUNDS = {
    **{k: v for k, v in BOUNDS.items() if k not in _ONLY_DUAL and k[:3] not in ("de.", "clf")},
    "dropout": (0, 0.99),
    "label_dropout": (0, 0.99),
    "meta_weight": (0, None),
    "clusters.size": (1, None),
    "clusters.top": (1, None),
    "clusters.weight": (0, None),
    "graph.neighbours": (1, None),
    "graph.degree": (1, None),
    "graph.tokens": (1, None),
}


class PlanError(ValueError):
    """The run cannot be carried out as configured."""


def check(config: ConfigDict) -> None:
    """Check names and numbers of a configuration; fields that are None are left to `resolve`.

    Raises:
      PlanError: an unknown name (with the nearest one), or a number out of range.
    """
    for field, known in (FRUGAL_NAMES if "family" in config else NAMES).items():
        value = field_of(config, field)
        if value not in known:
            near = difflib.get_close_matches(str(value), known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise PlanError(
                f"config.{field} = {value!r}: expected one of {', '.join(known)}.{hint}"
            )
    for field, (low, high) in (FRUGAL_BOUNDS if "family" in config else BOUNDS).items():
        value = field_of(config, field)
        if value is None or (value >= low and (high is None or value <= high)):
            continue
        expected = f"at least {low}" if high is None else f"{low} to {high}"
        raise PlanError(f"config.{field} = {value!r}: expected {expected}.")
    _check_words(config)
    _check_parts(config)
    if "family" in config:
        _check_frugal(config)
        return
    if config.encoder.name == "bag":
        for name, usual in OF_TRANSFORMERS.items():
            if config.encoder[name] not in (usual, None):
                raise PlanError(
                    f"config.encoder.{name} = {config.encoder[name]!r}: a bag of tokens has none "
                    f"of it. Set it to {usual!r}, or take a pretrained encoder: "
                    "--config.encoder.name=FOLDER."
                )
    if config.batching == "joined":
        batches.cluster_size(0, config.cluster_schedule)  # raises for a wrong schedule


def _check_words(config: ConfigDict) -> None:
    """Token tables and vocabularies are a bag's; a model's table comes with its tokenizer."""
    options = config.encoder
    for name, usual in (("embeddings", ""), ("vocabulary", "wordpiece")):
        if options[name] != usual and options.name not in ("", *WORD_VECTORS):
            raise PlanError(
                f"config.encoder.{name} = {options[name]!r} with config.encoder.name = "
                f"{options.name!r}: it is for the bag encoder. Leave one of the two out."
            )
    of_model = options.embeddings and not word_vectors.is_file(options.embeddings)
    if options.vocabulary == "words" and of_model:
        raise PlanError(
            f"config.encoder.vocabulary = 'words', config.encoder.embeddings = "
            f"{options.embeddings!r}: a model's embeddings are those of its own word pieces. Set "
            "vocabulary to wordpiece, or embeddings to a file of word vectors (.txt or .vec)."
        )


def _check_parts(config: ConfigDict) -> None:
    """Settings of what is switched off would be ignored."""
    options = config.gandalf
    for name, usual in OF_GANDALF.items():
        if options[name] != usual and not options.enabled:
            raise PlanError(
                f"config.gandalf.{name} = {options[name]!r} with config.gandalf.enabled = False: "
                "nothing of it would be done. Add --config.gandalf.enabled=True."
            )
    extra, room = config.extra_positives, config.extra_pool_size
    alone = "family" not in config and not config.classifier
    if bool(extra) != bool(room) or (extra and alone):
        raise PlanError(
            f"config.extra_positives = {extra}, config.extra_pool_size = {room}, config.classifier "
            f"= {config.classifier}: expected both above 0 and a classifier, whose positives they "
            "are (6 a query in room for 6 times the batch, say), or both 0."
        )


def _check_frugal(config: ConfigDict) -> None:
    """What holds between the fields of a frugal configuration."""
    if not config.classifier and not config.label_text:
        raise PlanError(
            "config.classifier = False, config.label_text = False: nothing is left of a label. Set "
            "one of them to True."
        )
    if not config.hard_negatives or config.warmup_epochs:
        raise PlanError(
            f"config.hard_negatives = {config.hard_negatives}, config.warmup_epochs = "
            f"{config.warmup_epochs}: a shortlist classifier learns its clusters from the refresh "
            "that mines. Set them to True and 0; to train without mined labels: --config.eta=0."
        )
    if config.label_graph and not config.label_text:
        raise PlanError("config.label_graph = True needs config.label_text = True.")
    for epochs, free_weights, clusters in config.phases:
        if epochs < 1 or clusters not in stages.CLUSTERS:
            raise PlanError(
                f"config.phases holds {(epochs, free_weights, clusters)}: expected at least an "
                f"epoch, whether labels have free weights, and one of {', '.join(stages.CLUSTERS)}."
            )
        if not (free_weights or config.label_text) or (free_weights and not config.classifier):
            raise PlanError(
                f"config.phases holds {(epochs, free_weights, clusters)}: free weights need "
                "config.classifier = True, their absence config.label_text = True."
            )


def field_of(config: ConfigDict, dotted: str) -> Any:
    """Value of a field such as ``lr.encoder``."""
    for name in dotted.split("."):
        config = config[name]
    return config


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
    rows, num_labels = dataset.train.labels.shape
    chosen: dict[str, Any] = {}

    def fill(section: ConfigDict, name: str, value: Any, title: str) -> None:
        if section[name] in (None, ""):
            section[name] = value
            chosen[title] = value

    use_bag = jax.default_backend() == "cpu" and not config.encoder.get("freeze")
    if config.encoder.embeddings or config.encoder.vocabulary != "wordpiece":  # a bag's
        use_bag = True
    fill(config.encoder, "name", "bag" if use_bag else "distilbert-base-uncased", "encoder.name")
    if "freeze" in config.encoder:
        if config.encoder.freeze is None:
            fill(config.encoder, "freeze", _frozen_layers(config.encoder.name), "encoder.freeze")
        fill(config.table, "scale", 1.0 if config.encoder.freeze else 4.0, "table.scale")
    frozen = config.encoder.get("freeze", 0)
    fill(config, "max_length", _max_length(dataset), "max_length")
    fill(config, "batch_size", _batch_size(rows, 128 if frozen else 256), "batch_size")
    fill(config, "pool_size", (4 if frozen else 10) * config.batch_size, "pool_size")
    if config.get("head_dim", 0) is None:
        fill(config, "head_dim", _head_dim(config.encoder, num_labels), "head_dim")
    # With a budget of minutes this is the most that is done; the clock usually says less.
    steps = -(-rows // config.batch_size)
    fill(config, "epochs", int(np.clip(2_000 // steps, 5, 60)), "epochs")
    if "phases" in config:
        config.phases = stages.scaled(config.phases, config.epochs)
    if config.row_length < config.max_length:
        config.row_length = config.max_length
        chosen["row_length"] = config.max_length
    rates = _rates(config.encoder.name, rows, bool(frozen))
    for name, rate in zip(("encoder", "heads", "table"), rates):
        fill(config.lr, name, rate, f"lr.{name}")
    fill(config.lr, "weight_decay", 0.01 if frozen else 0.0, "lr.weight_decay")
    if config.get("index") == "auto" and (config.batching != "random" or config.hard_negatives):
        accelerator = jax.default_backend() != "cpu"
        texts = num_labels if config.gandalf.enabled else 0  # are queries too
        kind, seconds = indexes.choose(
            rows + texts, num_labels, config.head_dim or 768, accelerator=accelerator
        )
        config.index = kind
        chosen["index"] = f"{kind}, about {seconds:.0f} s a search"
    return config, chosen


def _frozen_layers(encoder: str) -> int:
    """All of a pretrained encoder's layers but the last, where a CPU trains; else none."""
    if encoder == "bag" or jax.default_backend() != "cpu":
        return 0
    return pretrained.num_layers(encoder) - 1


def _head_dim(encoder: ConfigDict, num_labels: int) -> int:
    """0 above a partly frozen encoder: without projections training starts from zero-shot."""
    if encoder.freeze and encoder.freeze < pretrained.num_layers(encoder.name):
        return 0
    return 384 if num_labels < 500_000 else 256


def _rates(encoder: str, rows: int, frozen: bool) -> tuple[float, float, float]:
    """Learning rates of encoder, heads and table.

    The bag encoder's were found on 1,850 rows and on 21,000 and 75,000: with more rows a table at
    1e-2 overfits, an encoder at 2e-3 underfits. Those of a pretrained encoder's last layer were
    found on 1,850 rows, the table's above frozen layers on 75,000 too; of all layers they are the
    papers'.
    """
    if frozen:
        return 3e-4, 1e-3, 1e-2 if rows < FEW_ROWS else 3e-3
    if encoder != "bag":
        return 1e-4, 2e-4, 1e-3
    return (2e-3, 2e-3, 1e-2) if rows < FEW_ROWS else (1e-2, 3e-3, 5e-3)


def _batch_size(rows: int, most: int) -> int:
    """A sixth of the rows at most, a power of two between 16 and ``most``."""
    return min(most, int(2 ** np.floor(np.log2(max(rows / 6, 16)))))


def _max_length(dataset: Dataset) -> int:
    """Tokens that hold 98 % of a sample of the texts, at 1.4 a word, and two special ones.

    Words are what the tokenizers split first: punctuation marks and Chinese characters are words.
    """
    longest = 0.0
    for texts in (dataset.train.texts, dataset.label_texts):
        longest = max(longest, float(np.quantile(_word_counts(texts), 0.98)))
    return next((n for n in (32, 64, 128) if 1.4 * longest + 2 <= n), 256)


def _word_counts(texts: Sequence[str]) -> np.ndarray:
    step = max(1, len(texts) // SAMPLE_TEXTS)
    some = (texts[i] for i in range(0, len(texts), step))
    return np.array([len(split_words(text[:SAMPLE_CHARACTERS])) for text in some])


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
