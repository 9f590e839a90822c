"""What the families' settings share: names, bounds, and rules for what is left open."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from xmc_jax.contracts import Bounds, Stage, TextForm
from xmc_jax.data import splits
from xmc_jax.data.batching import batches, pools
from xmc_jax.data.dataset import Dataset
from xmc_jax.data.graph import gandalf
from xmc_jax.data.tokens import word_vectors
from xmc_jax.data.tokens.tokenizer import split_words
from xmc_jax.models import pretrained
from xmc_jax.systems.encoders import OF_WORD_VECTORS, EncoderOptions
from xmc_jax.tables.label_pool import STORAGE_DTYPES
from xmc_jax.training import augmentation, retrieval_choice
from xmc_jax.training import stages as stage_list
from xmc_jax.training.options import GandalfOptions, RetrievalOptions, from_mapping

SAMPLE_TEXTS = 10_000
LONG_WORD = 25  # characters
SAMPLE_CHARACTERS = 4096  # of a text: far more than the longest row holds
FEW_ROWS = 10_000  # up to here the bag encoder's rates are those of a small data set
BATCHINGS = batches.BATCHINGS
TRAINS = ("all", "encoder", "tables")
NAMES: dict[str, tuple[Any, ...]] = {
    "fill": pools.FILLS,
    "share_of": splits.SHARES,
    "table.init": ("labels", "normal"),
    "table.dtype": STORAGE_DTYPES,
    "encoder.vocabulary": ("wordpiece", "words"),
    "gandalf.variant": gandalf.VARIANTS,
    "gandalf.draw": pools.DRAWS,
    "gandalf.points": augmentation.POINTS,
    "gandalf.order": augmentation.ORDERS,
    "retrieval.choose_by": retrieval_choice.METRICS,
}
BOUNDS: Bounds = {  # at least, at most
    "batch_size": (1, None),
    "pool_size": (1, None),
    "epochs": (1, None),
    "max_minutes": (0, None),
    "max_length": (1, None),
    "row_length": (1, None),
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
    "tail_weight": (-10, 10),
    "retrieval.neighbours": (1, None),
    "retrieval.temperature": (1e-4, None),
    "retrieval.points": (0, None),
    "retrieval.labels": (0, None),
    "retrieval.lexical": (0, None),
    "seed": (0, 2**63 - 1),
    "encoder.dim": (1, None),
    "encoder.token_scale": (1e-6, None),
    "encoder.dropout": (0, 0.99),
    "encoder.vocab_size": (256, None),
    "lr.encoder": (0, None),
    "lr.heads": (0, None),
    "lr.table": (0, None),
    "lr.warmup": (0, 1),
    "lr.weight_decay": (0, None),
    "lr.clip_norm": (0, None),
}


@dataclasses.dataclass(frozen=True)
class TableOptions:
    """The section ``table`` of a configuration, whose comments say what the fields mean."""

    init: str = "labels"
    scale: float = 4.0
    dtype: str = "float32"


def field_of(config: Mapping[str, Any], dotted: str) -> Any:
    """Value of a field such as ``lr.encoder``; None where there is none."""
    value: Any = config
    for name in dotted.split("."):
        if name not in value:
            return None
        value = value[name]
    return value


class OpenFields:
    """A configuration whose open fields are filled one after the other; what was chosen is kept."""

    def __init__(self, config: dict[str, Any]) -> None:
        """Of nested dicts, which are changed."""
        self.config = config
        self.chosen: dict[str, Any] = {}

    def __getitem__(self, dotted: str) -> Any:
        return field_of(self.config, dotted)

    def put(self, dotted: str, value: Any, *, said: Any = None) -> None:
        """Set a field, and say so where ``said`` is given."""
        *sections, name = dotted.split(".")
        section = self.config
        for part in sections:
            section = section[part]
        section[name] = value
        if said is not None:
            self.chosen[dotted] = said

    def fill(self, dotted: str, value: Any) -> None:
        """Set a field that is None or an empty name, and say so; what is not there stays away.

        ``value`` may be a function, which is called only then.
        """
        *sections, name = dotted.split(".")
        section = field_of(self.config, ".".join(sections)) if sections else self.config
        if name in section and section[name] in (None, ""):
            chosen = value() if callable(value) else value
            self.put(dotted, chosen, said=chosen)


def text_form(encoder: EncoderOptions, max_length: int) -> TextForm:
    """How an encoder's texts are cut into tokens."""
    return TextForm(
        max_length,
        special_tokens=not encoder.of_word_vectors,
        query_prefix=encoder.query_prefix,
        label_prefix=encoder.label_prefix,
    )


def check_words(config: Mapping[str, Any]) -> None:
    """Token tables and vocabularies are a bag's; a model's table comes with its tokenizer.

    Raises:
      ValueError: one of them with a pretrained encoder, or two that do not go together.
    """
    options = config["encoder"]
    for name, usual in (("embeddings", ""), ("vocabulary", "wordpiece")):
        if options[name] != usual and options["name"] not in ("", *OF_WORD_VECTORS):
            raise ValueError(
                f"config.encoder.{name} = {options[name]!r} with config.encoder.name = "
                f"{options['name']!r}: it is for the bag encoder. Leave one of the two out."
            )
    encoder = from_mapping(EncoderOptions, {**options, "name": options["name"] or "bag"})
    if not encoder.lower and not encoder.makes_vocabulary:
        raise ValueError(
            f"config.encoder.lower = False with config.encoder.name = {options['name']!r}, "
            f"config.encoder.embeddings = {options['embeddings']!r}: a pretrained model has a "
            "vocabulary of its own. Leave it out."
        )
    of_model = options["embeddings"] and not word_vectors.is_file(options["embeddings"])
    if options["vocabulary"] == "words" and of_model:
        raise ValueError(
            f"config.encoder.vocabulary = 'words', config.encoder.embeddings = "
            f"{options['embeddings']!r}: a model's embeddings are those of its own word pieces. "
            "Set vocabulary to wordpiece, or embeddings to a file of word vectors (.txt or .vec)."
        )


def check_parts(config: Mapping[str, Any], *, alone: bool) -> None:
    """Settings of what is switched off would be ignored.

    Args:
      config: nested mappings.
      alone: whether there is no classifier, whose positives the extra ones are.

    Raises:
      ValueError: with the switch.
    """
    for name, kind in (("gandalf", GandalfOptions), ("retrieval", RetrievalOptions)):
        options = config.get(name, {})
        for field in dataclasses.fields(kind):
            value = options.get(field.name, field.default)
            if value != field.default and not options["enabled"]:
                raise ValueError(
                    f"config.{name}.{field.name} = {value!r} with config.{name}.enabled = False: "
                    f"nothing of it would be done. Add --config.{name}.enabled=True."
                )
    extra, room = config["extra_positives"], config["extra_pool_size"]
    if bool(extra) != bool(room) or (extra and alone):
        raise ValueError(
            f"config.extra_positives = {extra}, config.extra_pool_size = {room}, config.classifier "
            f"= {config['classifier']}: expected both above 0 and a classifier, whose positives "
            "they are (6 a query in room for 6 times the batch, say), or both 0."
        )


def resolve_encoder(fields: OpenFields) -> None:
    """The encoder's name, and how many of its layers are frozen."""
    use_bag = jax.default_backend() == "cpu" and not fields["encoder.freeze"]
    if fields["encoder.embeddings"] or fields["encoder.vocabulary"] != "wordpiece":  # a bag's
        use_bag = True
    fields.fill("encoder.name", "bag" if use_bag else "distilbert-base-uncased")
    one_tower = fields["encoder.towers"] in (None, 1)  # frozen layers' outputs are of one
    fields.fill("encoder.freeze", lambda: _frozen_layers(fields["encoder.name"]) * one_tower)


def resolve_sizes(fields: OpenFields, dataset: Dataset) -> None:
    """Length of texts, batch and pool."""
    rows, frozen = dataset.train.labels.shape[0], fields["encoder.freeze"] or 0
    fields.fill("max_length", lambda: _max_length(dataset))
    fields.fill("batch_size", _batch_size(rows, 128 if frozen else 256))
    fields.fill("pool_size", (4 if frozen else 10) * fields["batch_size"])


def resolve_training(fields: OpenFields, dataset: Dataset) -> None:
    """Epochs, row length and rates."""
    rows, frozen = dataset.train.labels.shape[0], bool(fields["encoder.freeze"] or 0)
    # With a budget of minutes this is the most that is done; the clock usually says less.
    steps = -(-rows // fields["batch_size"])
    fields.fill("epochs", int(np.clip(2_000 // steps, 5, 60)))
    if fields["row_length"] < fields["max_length"]:
        fields.put("row_length", fields["max_length"], said=fields["max_length"])
    rates = _rates(fields["encoder.name"], rows, frozen)
    for name, rate in zip(("encoder", "heads", "table"), rates):
        fields.fill(f"lr.{name}", rate)
    fields.fill("lr.weight_decay", 0.01 if frozen else 0.0)


def stages_of(
    ranges: Sequence[tuple[Any, ...]], epochs: int, kind: Any, *, field: str
) -> tuple[Stage, ...]:
    """Stages of a run of so many epochs, from ranges ``(epochs, ...)`` of those proportions.

    Args:
      ranges: none = one stage of all epochs.
      epochs: of the run.
      kind: from what stands behind the epochs of a range to ``(trains, options)``.
      field: of the configuration, for errors.
    """
    if not ranges:
        return (Stage(0, epochs),)
    stages, first = [], 0
    for number, *rest in stage_list.scaled(ranges, epochs, field=field):
        trains, options = kind(*rest)
        stages.append(Stage(first, number, trains, options))
        first += number
    return tuple(stages)


def _frozen_layers(encoder: str) -> int:
    """All of a pretrained encoder's layers but the last, where a CPU trains; else none."""
    if encoder == "bag" or jax.default_backend() != "cpu":
        return 0
    return pretrained.num_layers(encoder) - 1


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
    Longer than any of these are runs of words without blanks: a token for three characters.
    """
    longest = 0.0
    for texts in (dataset.train.texts, dataset.label_texts):
        longest = max(longest, float(np.quantile(_word_counts(texts), 0.98)))
    return next((n for n in (32, 64, 128) if 1.4 * longest + 2 <= n), 256)


def _word_counts(texts: Sequence[str]) -> np.ndarray:
    step = max(1, len(texts) // SAMPLE_TEXTS)
    some = (texts[i] for i in range(0, len(texts), step))
    tokens = lambda word: 1 if len(word) <= LONG_WORD else len(word) / 3
    return np.array([sum(map(tokens, split_words(text[:SAMPLE_CHARACTERS]))) for text in some])
