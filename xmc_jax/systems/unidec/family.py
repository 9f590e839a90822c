"""The family of UniDEC and DePSL: from a configuration to a system."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from xmc_jax.contracts import Bounds, Built, Encoder, Stage, Tokenizer, Weights
from xmc_jax.data.batching import batches
from xmc_jax.data.dataset import Dataset
from xmc_jax.data.search import index as indexes
from xmc_jax.models import pretrained
from xmc_jax.models.encoders.transformer import TransformerEncoder
from xmc_jax.models.heads.unidec import UniDEC
from xmc_jax.systems import encoders, frozen_layers, settings
from xmc_jax.systems.settings import OpenFields
from xmc_jax.systems.unidec import options as unidec_options
from xmc_jax.systems.unidec.options import HeadOptions, UniDECOptions
from xmc_jax.systems.unidec.system import UniDECSystem, head_loss
from xmc_jax.training import augmentation, training_data
from xmc_jax.training import stages as stage_list
from xmc_jax.training.options import from_mapping
from xmc_jax.training.training_data import TrainingData

OF_TRANSFORMERS = {  # options of the encoder that a bag does not have, and what is none of it
    "freeze": 0,
    "pooling": "mean",
    "remat": False,
    "compute_dtype": "float32",
}


class UniDECFamily:
    """See `xmc_jax.contracts.Family`."""

    names: Mapping[str, tuple[Any, ...]] = unidec_options.NAMES
    bounds: Bounds = unidec_options.BOUNDS
    transfers: tuple[str, ...] = ("encoder", "de_head", "clf_head")

    def check(self, config: Mapping[str, Any]) -> None:
        """Check what holds between the fields.

        Raises:
          ValueError: with what to change.
        """
        settings.check_words(config)
        settings.check_parts(config, alone=not config["classifier"])
        encoder = config["encoder"]
        if encoder["name"] == "bag":
            for name, usual in OF_TRANSFORMERS.items():
                if encoder[name] not in (usual, None):
                    raise ValueError(
                        f"config.encoder.{name} = {encoder[name]!r}: a bag of tokens has none "
                        f"of it. Set it to {usual!r}, or take a pretrained encoder: "
                        "--config.encoder.name=FOLDER."
                    )
        if encoder.get("towers", 1) == 2 and encoder["freeze"]:
            raise ValueError(
                f"config.encoder.towers = 2, config.encoder.freeze = {encoder['freeze']}: frozen "
                "layers are one tower's. Set freeze to 0."
            )
        if config["batching"] == "joined":
            batches.cluster_size(0, config["cluster_schedule"])  # raises for a wrong schedule
        self._check_stages(config)
        for name in ("de", "clf") if config["classifier"] else ("de",):
            head_loss(from_mapping(HeadOptions, config[name]), name)

    def _check_stages(self, config: Mapping[str, Any]) -> None:
        for stage in config.get("stages", ()):
            right = len(stage) == 2 and stage[0] >= 1 and stage[1] in settings.TRAINS
            if not right:
                raise ValueError(
                    f"config.stages holds {tuple(stage)}: expected (epochs, one of "
                    f"{', '.join(settings.TRAINS)}), at least an epoch each."
                )
            if stage[1] == "tables" and not config["classifier"]:
                raise ValueError(
                    f"config.stages holds {tuple(stage)}, config.classifier = False: there is no "
                    "table to train."
                )

    def resolve(self, fields: OpenFields, dataset: Dataset) -> None:
        """Fill what is left open, by the data and the device."""
        rows, num_labels = dataset.train.labels.shape
        settings.resolve_encoder(fields)
        fields.fill("table.scale", 1.0 if fields["encoder.freeze"] else 4.0)
        settings.resolve_sizes(fields, dataset)
        fields.fill("head_dim", lambda: _head_dim(fields, num_labels))
        settings.resolve_training(fields, dataset)
        needed = fields["batching"] != "random" or fields["hard_negatives"]
        if fields["index"] == "auto" and needed:
            texts = num_labels if fields["gandalf.enabled"] else 0  # are queries too
            accelerator = jax.default_backend() != "cpu"
            kind, seconds = indexes.choose(
                rows + texts, num_labels, fields["head_dim"] or 768, accelerator=accelerator
            )
            fields.put("index", kind, said=f"{kind}, about {seconds:.0f} s a search")

    def options(self, config: Mapping[str, Any]) -> UniDECOptions:
        """The options of a complete configuration."""
        return from_mapping(UniDECOptions, config)

    def scaled(self, config: Mapping[str, Any], epochs: int) -> dict[str, Any]:
        """Stages that last so many epochs."""
        if not config.get("stages"):
            return {}
        return {"stages": stage_list.scaled(config["stages"], epochs, field="stages")}

    def stages(self, options: UniDECOptions, epochs: int) -> tuple[Stage, ...]:
        """One, or those of ``config.stages``."""
        return settings.stages_of(
            options.stages, epochs, lambda trains: (trains, {}), field="stages"
        )

    def cheaper(self, config: Mapping[str, Any]) -> list[dict[str, Any]]:
        """A table of 16 bits; activations computed anew in the backward pass."""
        table = {"table.dtype": "bfloat16"}
        table = table if config["classifier"] and config["table"]["dtype"] == "float32" else {}
        of_words = config["encoder"]["name"] in encoders.OF_WORD_VECTORS
        return [table, {} if of_words else {"encoder.remat": True}]

    def smaller(self, config: Mapping[str, Any], divisor: int) -> dict[str, Any]:
        """Smaller heads."""
        return {"head_dim": config["head_dim"] // divisor} if config.get("head_dim") else {}

    def tokenizer(self, options: UniDECOptions, texts: Iterable[str], folder: Path) -> Tokenizer:
        """The run's tokenizer (`xmc_jax.systems.encoders.tokenizer`)."""
        return encoders.tokenizer(options.encoder, texts, folder)

    def build(
        self, options: UniDECOptions, folder: Path, data: TrainingData, tokenizer: Tokenizer
    ) -> Built:
        """A new or continued run's system, in its work directory."""
        vocab_size = tokenizer.get_vocab_size()
        stores = (data.train_tokens, data.label_tokens)
        encoder, init_encoder = encoders.encoder(
            options.encoder,
            folder,
            vocab_size,
            training_data.token_counts(stores, vocab_size),
            seed=options.seed,
            max_length=options.max_length,
            head_dim=options.head_dim,
        )
        key, frozen = jax.random.key(options.seed), None
        if options.encoder.freeze:
            assert isinstance(encoder, TransformerEncoder), "`check` lets no other pass"
            whole = init_encoder(key)
            frozen, encoder, rest = frozen_layers.split_run(
                options.encoder.freeze, folder, encoder, whole, row_length=options.row_length
            )
            init_encoder = lambda key: rest
        system = UniDECSystem(options, _model(options, encoder), frozen)
        data = augmentation.augment(options, data.read_by(system.read))
        params = system.model.init(key, init_encoder)
        summary = f"{options.encoder.name} encoder"
        return Built(system, data, Weights(params, {}, {}), encoders.describe(encoder), summary)

    def open(self, options: UniDECOptions, folder: Path, meta: Mapping[str, Any]) -> UniDECSystem:
        """The system of a work directory, without data."""
        encoder = encoders.restore(meta["encoder"])
        frozen = frozen_layers.load(folder, encoder, row_length=options.row_length)
        return UniDECSystem(options, _model(options, encoder), frozen)


def _model(options: UniDECOptions, encoder: Encoder) -> UniDEC:
    """Encoder and heads; ``head_dim`` 0 is no projection."""
    return UniDEC(encoder, options.head_dim or None, options.head_dropout)


def _head_dim(fields: OpenFields, num_labels: int) -> int:
    """0 above a partly frozen encoder: without projections training starts from zero-shot."""
    freeze = fields["encoder.freeze"]
    if freeze and freeze < pretrained.num_layers(fields["encoder.name"]):
        return 0
    return 384 if num_labels < 500_000 else 256
