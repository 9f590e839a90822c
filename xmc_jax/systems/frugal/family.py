"""The family of the frugal classifiers: from a configuration to a system."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from xmc_jax.contracts import Bounds, Built, Stage, Tokenizer, Weights
from xmc_jax.data.batching import batches
from xmc_jax.data.dataset import Dataset
from xmc_jax.data.graph import label_features
from xmc_jax.models.frugal.bag_queries import BagQueries
from xmc_jax.models.frugal.classifier import Frugal
from xmc_jax.models.frugal.inception import InceptionQueries
from xmc_jax.systems import encoders, settings
from xmc_jax.systems.frugal import graph_rows, text_mixing
from xmc_jax.systems.frugal import options as frugal_options
from xmc_jax.systems.frugal.options import CLUSTERS, FrugalOptions
from xmc_jax.systems.frugal.system import FrugalSystem
from xmc_jax.systems.settings import OpenFields
from xmc_jax.training import augmentation
from xmc_jax.training import stages as stage_list
from xmc_jax.training.options import from_mapping
from xmc_jax.training.training_data import TrainingData


class FrugalFamily:
    """See `xmc_jax.contracts.Family`."""

    names: Mapping[str, tuple[Any, ...]] = frugal_options.NAMES
    bounds: Bounds = frugal_options.BOUNDS
    transfers: tuple[str, ...] = ("tokens", "queries", "text", "graph", "attention")

    def check(self, config: Mapping[str, Any]) -> None:
        """Check what holds between the fields.

        Raises:
          ValueError: with what to change.
        """
        settings.check_words(config)
        settings.check_parts(config, alone=False)
        if not config["classifier"] and not config["label_text"]:
            raise ValueError(
                "config.classifier = False, config.label_text = False: nothing is left of a "
                "label. Set one of them to True."
            )
        if not config["hard_negatives"] or config["warmup_epochs"]:
            raise ValueError(
                f"config.hard_negatives = {config['hard_negatives']}, config.warmup_epochs = "
                f"{config['warmup_epochs']}: a shortlist classifier learns its clusters from the "
                "refresh that mines. Set them to True and 0; to train without mined labels: "
                "--config.eta=0."
            )
        if config["label_graph"] and not config["label_text"]:
            raise ValueError("config.label_graph = True needs config.label_text = True.")
        for phase in config["phases"]:
            epochs, free_weights, clusters = phase
            if epochs < 1 or clusters not in CLUSTERS:
                raise ValueError(
                    f"config.phases holds {tuple(phase)}: expected at least an epoch, whether "
                    f"labels have free weights, and one of {', '.join(CLUSTERS)}."
                )
            possible = config["classifier"] if free_weights else config["label_text"]
            if not possible:
                raise ValueError(
                    f"config.phases holds {tuple(phase)}: free weights need config.classifier = "
                    "True, their absence config.label_text = True."
                )

    def resolve(self, fields: OpenFields, dataset: Dataset) -> None:
        """Fill what is left open, by the data and the device."""
        settings.resolve_encoder(fields)
        settings.resolve_sizes(fields, dataset)
        settings.resolve_training(fields, dataset)
        fields.put("phases", stage_list.scaled(fields["phases"], fields["epochs"], field="phases"))

    def options(self, config: Mapping[str, Any]) -> FrugalOptions:
        """The options of a complete configuration."""
        return from_mapping(FrugalOptions, config)

    def scaled(self, config: Mapping[str, Any], epochs: int) -> dict[str, Any]:
        """Phases that last so many epochs."""
        return {"phases": stage_list.scaled(config["phases"], epochs, field="phases")}

    def stages(self, options: FrugalOptions, epochs: int) -> tuple[Stage, ...]:
        """The phases: whether labels have free weights, and what they are clustered by."""
        kind = lambda free, clusters: ("all", {"free_weights": free, "clusters": clusters})
        return settings.stages_of(options.phases, epochs, kind, field="phases")

    def cheaper(self, config: Mapping[str, Any]) -> list[dict[str, Any]]:
        """A table of 16 bits."""
        wide = config["classifier"] and config["table"]["dtype"] == "float32"
        return [{"table.dtype": "bfloat16"} if wide else {}]

    def smaller(self, config: Mapping[str, Any], divisor: int) -> dict[str, Any]:
        """Nothing: vectors have the size of the word vectors."""
        del config, divisor
        return {}

    def tokenizer(self, options: FrugalOptions, texts: Iterable[str], folder: Path) -> Tokenizer:
        """The run's tokenizer (`xmc_jax.systems.encoders.tokenizer`)."""
        return encoders.tokenizer(options.encoder, texts, folder)

    def build(
        self, options: FrugalOptions, folder: Path, data: TrainingData, tokenizer: Tokenizer
    ) -> Built:
        """A new or continued run's system, in its work directory."""
        vocab_size = tokenizer.get_vocab_size()
        words = encoders.token_table(options.encoder, folder, vocab_size, seed=options.seed)
        if words is not None:
            vocab_size, dim = words.shape
            options = dataclasses.replace(
                options, encoder=dataclasses.replace(options.encoder, dim=dim)
            )
        stores = (data.train_tokens, data.label_tokens)
        idf = label_features.inverse_document_frequency(stores, vocab_size)
        queries = encoders.queries(options.encoder, vocab_size, options.max_length)
        model = frugal_model(options, queries, data.num_labels)
        params = model.init(jax.random.key(options.seed), idf)
        if words is not None:
            params = model.with_embeddings(params, words)
        graph = graph_rows.kept_rows(folder, options, data, idf) if model.label_graph else None
        params = dict(params)
        moving = params.pop("moving")
        return Built(
            FrugalSystem(options, model, graph),
            _augmented(options, data),
            Weights(params, {"moving": moving}, {}),
            encoders.describe(queries),
            f"{options.encoder.name} encoder",
        )

    def open(self, options: FrugalOptions, folder: Path, meta: Mapping[str, Any]) -> FrugalSystem:
        """The system of a work directory, without data."""
        model = frugal_model(options, encoders.restore_queries(meta["encoder"]), meta["num_labels"])
        graph = graph_rows.load_rows(folder) if model.label_graph else None
        return FrugalSystem(options, model, graph)


def num_clusters(num_labels: int, size: int) -> int:
    """C: the power of two that makes clusters of about ``size`` labels."""
    return 2 ** batches.cluster_levels(num_labels, size)


def _augmented(options: FrugalOptions, data: TrainingData) -> TrainingData:
    """With Gandalf's points. Mixing adds none; Label-MixUp reads label texts at their rows."""
    mixing = text_mixing.variant(options.gandalf)
    if mixing is None:
        return augmentation.augment(options, data)
    if mixing != "label_mixup":
        return data
    return dataclasses.replace(data, train_tokens=data.joined_tokens())


def frugal_model(
    options: FrugalOptions, queries: BagQueries | InceptionQueries, num_labels: int
) -> Frugal:
    """A frugal classifier with its parts."""
    return Frugal(
        queries,
        num_clusters(num_labels, options.clusters.size),
        label_text=options.label_text,
        label_graph=options.label_graph,
        free_weights=options.classifier,
        dropout=options.dropout,
        label_dropout=options.label_dropout,
        token_scale=options.encoder.token_scale,
        cluster_bias=options.offset,
    )
