"""A third family: one-vs-all linear classifiers over hashed words; no encoder, pool or label text.

python tests/third_family.py train --config=tests/third_family.py:OWN_FILE
"""

from __future__ import annotations

import dataclasses
import runpy
import sys
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from xmc_jax.contracts import Built, Made, Shapes, Stage, Table, TrainState, Weights
from xmc_jax.data.tokens import tokenizer as tokenizers
from xmc_jax.losses import sigmoid_bce_loss
from xmc_jax.systems import FAMILIES
from xmc_jax.training.options import TrainingOptions, from_mapping
from xmc_jax.training.source import BatchSource
from xmc_jax.training.state import make_optimizer

HEAD = "logits"


def get_config(source: str | None = None) -> ConfigDict:
    """The configuration of own data, as a file of ``configs/`` has it."""
    config = ConfigDict(dict(family="linear", dataset=source or "", data="", init_from="", seed=0))
    config.update(dict(max_length=16, batch_size=32, epochs=12, max_minutes=0.0, log_steps=1))
    config.update(dict(buckets=256, idf="smooth", eval_epochs=4, tail_weight=0.0))
    config.lr = dict(encoder=0.02, heads=0.05, table=0.3, warmup=0.1)
    return config


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearOptions(TrainingOptions):
    buckets: int  # that words are hashed to
    idf: str = "smooth"
    hard_negatives: bool = False  # nothing is mined


class LinearBatch(NamedTuple):
    words: Any  # [Q, T] int32 buckets; those past the last one are padding
    targets: Any  # [Q, L]
    where: Any  # [Q, L]


def hashed(tokens: Any, rows: np.ndarray, options: LinearOptions) -> np.ndarray:
    """Buckets of the words of some texts, ``[n, T]``."""
    ids, sizes = tokens.gather(rows)
    words = np.full((len(rows), options.max_length), options.buckets, np.int32)
    words[np.arange(options.max_length) < sizes[:, None]] = (
        ids.astype(np.int64) * 7919 % (options.buckets)
    )
    return words


def features(gains: jax.Array, idf: jax.Array, words: jax.Array) -> jax.Array:
    """Unit bags of words, weighted by idf and by what is learned of a word, ``[n, B]``."""
    rows = jnp.arange(len(words))[:, None]
    bags = jnp.zeros((len(words), len(idf))).at[rows, words].add(1.0, mode="drop")
    bags = bags * idf * jnp.exp(gains)
    return bags / jnp.sqrt(jnp.sum(bags**2, axis=1, keepdims=True) + 1e-12)


class LinearBatches:
    """Makes batches of texts and all labels."""

    def __init__(self, options: LinearOptions, data: Any) -> None:
        self.options, self.data = options, data

    def use(self, refresh: Any) -> None:
        assert refresh is None

    def fit(self, sampled: Any) -> None:
        assert all(stats["tokens"] > 0 for stats in sampled)

    def make(self, queries: np.ndarray, stage: Stage, epoch: int, step: int) -> Made:
        there = queries[:, None] >= 0
        rows, data = np.maximum(queries, 0), self.data
        targets = data.labels[rows].toarray().astype(np.float32)
        where = np.broadcast_to(there, targets.shape)
        if data.filters is not None:
            where = where & ~data.filters[rows].toarray()
        words = hashed(data.train_tokens, queries, self.options)
        stats = {"tokens": float((words < self.options.buckets).sum())}
        return LinearBatch(words, targets, where), stats, np.arange(data.num_labels)


class LinearRanker:
    heads = (HEAD,)

    def __init__(self, options: LinearOptions, weights: Weights, bonus: Any) -> None:
        self._options, params = options, weights.params
        table = np.asarray(weights.tables["weights"])
        self._labels = np.concatenate([table, np.asarray(params["bias"])[:, None]], axis=1)
        self._words = jax.jit(
            lambda words: features(params["gains"], weights.model_state["idf"], words)
        )
        self.num_labels = len(table)
        self._bonus = np.zeros(len(table), np.float32) if bonus is None else bonus

    def label_vectors(self, head: str) -> np.ndarray:
        return self._labels

    def query_vectors(self, tokens: Any, rows: np.ndarray | None, head: str) -> np.ndarray:
        rows = np.arange(len(tokens)) if rows is None else rows
        x = np.asarray(self._words(hashed(tokens, rows, self._options)))
        return np.concatenate([x, np.ones((len(x), 1), np.float32)], axis=1)

    def search(self, queries: np.ndarray, head: str, k: int) -> tuple[np.ndarray, np.ndarray]:
        scores = queries @ self._labels.T + self._bonus
        ids = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        return np.take_along_axis(scores, ids, axis=1), ids.astype(np.int32)

    def score(self, queries: np.ndarray, head: str, ids: np.ndarray) -> np.ndarray:
        scores = np.einsum("nd,nmd->nm", queries, self._labels[ids]) + self._bonus[ids]
        return np.where(ids >= 0, scores, -np.inf)

    def search_cost(self, num_queries: int) -> str:
        return f"{num_queries} x {self.num_labels} scores"

    def why_not(self, head: str) -> str:
        return "a linear classifier has one score"


class LinearSystem:
    def __init__(self, options: LinearOptions) -> None:
        self.options, self.optimizer = options, make_optimizer(options.lr, encoder_names=("gains",))
        self.table_optimizer = optax.adam(options.lr.table)

    dim = property(lambda self: self.options.buckets)

    def read(self, tokens: Any, *, keep: bool = True) -> Any:
        return tokens

    def source(self, data: Any) -> BatchSource:
        queries = min(self.options.batch_size, len(data.rows))
        shapes = Shapes(queries, data.num_labels, 0, -(-len(data.rows) // queries))
        return BatchSource(self.options, data.rows, shapes, LinearBatches(self.options, data))

    def weight_shapes(self, num_labels: int) -> Weights:
        floats = lambda *shape: jax.ShapeDtypeStruct(shape, np.float32)
        words = floats(self.dim)
        params = {"gains": words, "bias": floats(num_labels)}
        return Weights(params, {"idf": words}, {"weights": floats(num_labels, self.dim)})

    def first_state(self, data: Any, weights: Weights, *, measure: bool = False) -> TrainState:
        table, params = jnp.zeros((data.num_labels, self.dim)), weights.params
        tables = {"weights": Table(table, self.table_optimizer.init(table))}
        opt_state = self.optimizer.init(params)
        return TrainState(jnp.int32(0), params, weights.model_state, opt_state, tables)

    def begin_stage(self, data: Any, state: TrainState, stage: Stage, before: Any) -> TrainState:
        raise AssertionError("there is one stage")

    def make_step(self, trains: str) -> jax.stages.Wrapped:
        def step(state: TrainState, batch: LinearBatch, factor: jax.Array) -> Any:
            def loss_of(params: Any, table: jax.Array) -> jax.Array:
                x = features(params["gains"], state.model_state["idf"], batch.words)
                scores = x @ table.T + params["bias"]
                return sigmoid_bce_loss(scores, batch.targets, where=batch.where)

            table, moments = state.tables["weights"]
            loss, gradients = jax.value_and_grad(loss_of, argnums=(0, 1))(state.params, table)
            scaled = lambda updates: jax.tree.map(lambda x: factor * x, updates)
            updates, opt_state = self.optimizer.update(gradients[0], state.opt_state, state.params)
            moved, moments = self.table_optimizer.update(gradients[1], moments, table)
            after = TrainState(
                state.step + 1,
                optax.apply_updates(state.params, scaled(updates)),
                state.model_state,
                opt_state,
                {"weights": Table(optax.apply_updates(table, scaled(moved)), moments)},
            )
            return after, {"loss": loss, "gradient_norm": optax.tree.norm(gradients)}

        return jax.jit(step, donate_argnums=0)

    def write_refresh(self, folder: Any, epoch: int, data: Any, state: TrainState) -> Any:
        raise AssertionError("nothing is mined")

    def ranker(self, weights: Weights, label_tokens: Any, *, bonus: Any = None, **_: Any) -> Any:
        if len(label_tokens) > len(weights.tables["weights"]):
            raise ValueError("labels that came after training have no weights here.")
        return LinearRanker(self.options, weights, bonus)

    def embed_some(self, weights: Weights, tokens: Any, rows: np.ndarray) -> None:
        LinearRanker(self.options, weights, None).query_vectors(tokens, rows, HEAD)

    def vector_bytes(self, data: Any, evaluated: int, *, mined: bool) -> int:
        return 4 * (data.num_labels + evaluated) * (self.dim + 1)

    def searched_bytes(self, data: Any, evaluated: int) -> int:
        return 0

    def resized(self, options: LinearOptions) -> LinearSystem:
        return LinearSystem(options)


class LinearFamily:
    names = MappingProxyType({"idf": ("smooth", "none")})
    bounds = MappingProxyType({"buckets": (1, None), "tail_weight": (-10, 10)})
    transfers = ("gains",)

    def check(self, config: Any) -> None:
        if config["lr"]["table"] <= 0:
            raise ValueError("config.lr.table = 0: a linear classifier is its table.")

    def resolve(self, fields: Any, dataset: Any) -> None:
        fields.fill("buckets", dataset.train.labels.shape[1])

    def options(self, config: Any) -> LinearOptions:
        return from_mapping(LinearOptions, config)

    def scaled(self, config: Any, epochs: int) -> dict[str, Any]:
        return {}

    def stages(self, options: LinearOptions, epochs: int) -> tuple[Stage, ...]:
        return (Stage(0, epochs),)

    def cheaper(self, config: Any) -> list[dict[str, Any]]:
        return []

    def smaller(self, config: Any, divisor: int) -> dict[str, Any]:
        return {"buckets": config["buckets"] // divisor}

    def tokenizer(self, options: LinearOptions, texts: Any, folder: Any) -> Any:
        if (folder / "tokenizer.json").exists():
            return tokenizers.load_tokenizer(folder)
        return tokenizers.train_words(texts, vocab_size=2000, folder=folder)

    def build(self, options: LinearOptions, folder: Any, data: Any, tokenizer: Any) -> Built:
        words = hashed(data.train_tokens, data.rows, options)
        seen = [len(np.unique(np.nonzero(words == word)[0])) for word in range(options.buckets)]
        idf = np.log((1 + len(words)) / (1 + np.array(seen, np.float32)))
        idf = jnp.asarray(idf if options.idf == "smooth" else np.ones_like(idf))
        params = {"gains": jnp.zeros(options.buckets), "bias": jnp.full(data.num_labels, -3.0)}
        return Built(LinearSystem(options), data, Weights(params, {"idf": idf}, {}), {}, "hashing")

    def open(self, options: LinearOptions, folder: Any, meta: Any) -> LinearSystem:
        return LinearSystem(options)


if __name__ == "__main__":  # a binary of xmc_jax in a process that knows the family
    FAMILIES["linear"] = LinearFamily()
    runpy.run_module(f"xmc_jax.{sys.argv.pop(1)}", run_name="__main__", alter_sys=True)
