"""What rooms promise each other: batches of tokens, states, stages, and what a system has to do.

Nothing here computes. A new encoder is an `Encoder`, a new family a `Family` whose `System` has a
`Ranker`; the training loop, the binaries and the Python API know no more of them than stands here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
from scipy.sparse import csr_matrix

if TYPE_CHECKING:  # readers of data need no JAX
    import jax
    import optax

# What a text is to an encoder. "both": a batch that holds texts of both sides, which only an
# encoder with one tower is given.
Side = Literal["query", "label", "both"]
Trains = Literal["all", "encoder", "tables"]  # what a stage trains: "encoder" = all parameters


class TokenBatch(NamedTuple):
    """Several short texts a row, without padding between them.

    Text ``b`` of the batch is segment ``text_segment[b]`` of row ``text_row[b]``. One text a row is
    the same thing with every segment 1. Arrays are NumPy arrays of small unsigned types on the host
    and JAX arrays on the device; models widen them.

    Attributes:
      ids: ``[R, T]`` token ids; what stands in padding is never read. ``[R, T, H]`` hidden states
        where the lower layers of the encoder are frozen.
      segment_ids: ``[R, T]`` number of the text within its row, from 1; 0 = padding.
      positions: ``[R, T]`` place of the token within its text, from 0.
      text_row: ``[B]`` row of each text.
      text_segment: ``[B]`` segment of each text; 0 = an empty slot, whose vector is all zeros.
    """

    ids: Any
    segment_ids: Any
    positions: Any
    text_row: Any
    text_segment: Any


class Tokens(Protocol):
    """Tokens of texts, without padding; row -1 is a text without any."""

    @property
    def texts(self) -> Sequence[str] | None:
        """The texts, without prefixes, where they are known."""

    def __len__(self) -> int: ...

    def lengths(self, rows: np.ndarray | None = None) -> np.ndarray:
        """Tokens of each row, ``[n]``."""

    def gather(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of the rows, one after the other, and how many each has."""


class Table(NamedTuple):
    """Vectors that are no parameters of a model, such as a classifier's ``[L, d]``.

    Attributes:
      values: as stored (`xmc_jax.tables.label_pool.to_storage`).
      state: of its optimiser: `xmc_jax.tables.row_adam.RowAdamState` where a step touches some
        rows, an Optax state where it moves all of them.
    """

    values: jax.Array
    state: Any


class Weights(NamedTuple):
    """What a trained model is made of: what evaluation and prediction read of a state.

    Attributes:
      params: what the optimiser moves: plain dicts of arrays.
      model_state: what a step or a stage renews without gradients: running means, clusters, idf.
      tables: values of the tables, by name.
    """

    params: Any
    model_state: Any
    tables: dict[str, jax.Array]


class TrainState(NamedTuple):
    """What a run carries from step to step: a pytree, which the step donates.

    Attributes:
      step: int32 scalar, steps done.
      params: see `Weights`.
      model_state: see `Weights`; ``{}`` where there is none.
      opt_state: Optax state of ``params``.
      tables: by name; ``{}`` where there is none.
    """

    step: jax.Array
    params: Any
    model_state: Any
    opt_state: Any
    tables: dict[str, Table]

    @property
    def weights(self) -> Weights:
        """The state without what only training reads."""
        tables = {name: table.values for name, table in self.tables.items()}
        return Weights(self.params, self.model_state, tables)


class Stage(NamedTuple):
    """A range of epochs with its own learning-rate schedule; the next one may train other parts.

    Attributes:
      first: its first epoch.
      epochs: how many it has.
      trains: ``all``, the ``encoder`` alone (all parameters, no table), or the ``tables`` alone.
      options: what else a family fixes for a stage.
    """

    first: int
    epochs: int
    trains: Trains = "all"
    options: Mapping[str, Any] = {}


class Encoder(Protocol):
    """Packed texts to vectors: a frozen dataclass, whose fields are JSON or dataclasses again.

    Attributes:
      shared: whether both sides of a batch may come in one call (``side="both"``).
    """

    shared: ClassVar[bool]
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @property
    def dim(self) -> int:
        """Size of a text's vector."""

    @property
    def max_segments(self) -> int:
        """Texts that a packed row may hold."""

    def init(self, key: jax.Array) -> Any:
        """Draws parameters."""

    def apply(
        self,
        params: Any,
        tokens: TokenBatch,
        *,
        key: jax.Array | None = None,
        train: bool = False,
        side: Side = "query",
    ) -> jax.Array:
        """One vector a text, ``[B, dim]``; a key if and only if ``train``."""

    def apply_padded(
        self, params: Any, ids: jax.Array, mask: jax.Array, side: Side = "query"
    ) -> jax.Array:
        """The same of one text a row: ids and mask ``[B, T]``, the mask 1 at its tokens."""


class Ranker(Protocol):
    """How a trained model ranks all labels for a text.

    Attributes:
      heads: names of its scores, the one to be chosen by first.
      num_labels: L.
      probabilities: whether scores are probabilities; else sums of cosines.
    """

    heads: tuple[str, ...]
    num_labels: int
    probabilities: bool

    def label_vectors(self, head: str) -> np.ndarray:
        """Vectors of the labels, ``[L, w]``."""

    def query_vectors(self, tokens: Tokens, rows: np.ndarray | None, head: str) -> np.ndarray:
        """Vectors of texts (default all of the store), ``[n, v]``, which the two below take."""

    def search(self, queries: np.ndarray, head: str, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k labels of highest score: scores ``[n, k]``, descending, and ids (-1 = none)."""

    def score(self, queries: np.ndarray, head: str, ids: np.ndarray) -> np.ndarray:
        """Exact scores ``[n, m]`` of chosen labels ``ids [n, m]``; -1 has -inf."""

    def terms(self, queries: np.ndarray, head: str, ids: np.ndarray) -> dict[str, np.ndarray]:
        """What scores of chosen labels are a sum of, ``[n, m]`` each, by name."""

    def key_vectors(self, queries: np.ndarray, head: str) -> np.ndarray:
        """By what queries are compared with each other: inner products of these, ``[n, w]``."""

    def tail_factor(self, ids: np.ndarray) -> np.ndarray:
        """By what something is multiplied that is added to labels' scores; 1 without a bonus.

        A bonus that is a term of scores leaves it alone too.
        """

    def search_cost(self, num_queries: int) -> str:
        """What exact search holds, and where it takes minutes how many, in words."""

    def why_not(self, head: str) -> str:
        """Why a head is not among ``heads``."""


class Points(Protocol):
    """Training points as a system reads them: `xmc_jax.training.training_data.TrainingData`."""

    @property
    def train_tokens(self) -> Tokens:
        """Of all points."""

    @property
    def label_tokens(self) -> Tokens:
        """Of the label texts."""

    @property
    def labels(self) -> csr_matrix:
        """Positives ``[N, L]``, possibly soft; rows without any are not trained on."""

    @property
    def filters(self) -> csr_matrix | None:
        """Pairs ``[N, L]`` that are neither positive nor negative."""

    @property
    def rows(self) -> np.ndarray:
        """Points that have a label."""

    @property
    def num_labels(self) -> int:
        """L."""

    @property
    def first_text_row(self) -> int | None:
        """The point from which on points are label texts; None = there are none."""


class RefreshFiles(Protocol):
    """Arrays that a system wrote in its last refresh, by name."""

    def get(self, name: str) -> np.ndarray | None:
        """The array, memory-mapped, or None where the refresh has none of this name."""


Made = tuple[Any, dict[str, float], np.ndarray]


class BatchMaker(Protocol):
    """Makes a system's batches for `xmc_jax.training.source.BatchSource`."""

    def use(self, refresh: RefreshFiles | None) -> None:
        """Draw from this refresh from now on, in the largest shape."""

    def fit(self, sampled: Iterable[Mapping[str, float]]) -> None:
        """Choose the shapes to compile for by the statistics of some batches."""

    def make(self, queries: np.ndarray, stage: Stage, epoch: int, step: int) -> Made:
        """A batch (a pytree of host arrays), its statistics, its pool's label ids (-1 = none).

        A function of (seed, epoch, step, refresh) alone. Statistics hold at least ``tokens``.
        """


class Shapes(NamedTuple):
    """Sizes of a run's batches.

    Attributes:
      queries: Q.
      labels: P, without the extra positives.
      levels: halvings that make the clusters which are batches.
      steps: batches of an epoch; the same for every epoch.
    """

    queries: int
    labels: int
    levels: int
    steps: int


class Batches(Protocol):
    """The batches of a run: `xmc_jax.training.source.BatchSource`."""

    shapes: Shapes

    def use(self, refresh: RefreshFiles | None) -> None:
        """Draw from this refresh from now on; None = random batches without mined negatives."""

    def ahead(self, stage: Stage, epoch: int, first_step: int) -> Iterator[Made]:
        """Batches of an epoch from a step on, made ahead."""


# Jitted: (state, batch, factor) -> (state, scalars); the state is donated. A batch is a pytree of
# host arrays, texts first; the factor multiplies all learning rates. Scalars are ``loss``, further
# ``loss_*``, and ``gradient_norm``.
Step: TypeAlias = "jax.stages.Wrapped"


class TextForm(NamedTuple):
    """How a system wants its texts cut into tokens.

    Attributes:
      max_length: tokens of a text, special ones included.
      special_tokens: whether a text begins and ends with the tokenizer's marks.
      query_prefix: stands before every query.
      label_prefix: stands before every label's text.
    """

    max_length: int
    special_tokens: bool
    query_prefix: str = ""
    label_prefix: str = ""


class Tokenizer(Protocol):
    """What is used of a tokenizer of the ``tokenizers`` library."""

    def get_vocab_size(self) -> int:
        """Number of tokens."""

    def token_to_id(self, token: str) -> int | None:
        """The number of a token, or None."""


class Examples(NamedTuple):
    """Texts that have labels which came after training.

    Attributes:
      tokens: of the texts, as queries.
      labels: ``[n, M]``, one column for each new label, every stored value 1.
    """

    tokens: Tokens
    labels: csr_matrix


class System(Protocol):
    """One model with its options: what it starts from, its step, its batches, its ranking.

    Attributes:
      optimizer: of the parameters, at its peak rates.
    """

    optimizer: optax.GradientTransformation

    @property
    def dim(self) -> int:
        """Size of a label's vector in one head."""

    def read(self, tokens: Tokens, *, keep: bool = True) -> Tokens:
        """Tokens as the model takes them; ``keep`` = what that costs is kept for the next time."""

    def source(self, data: Points) -> Batches:
        """The batches of a run.

        Raises:
          ValueError: the pool is smaller than the batch.
        """

    def weight_shapes(self, num_labels: int) -> Weights:
        """Shapes and types of what a checkpoint holds of the model."""

    def first_state(self, data: Points, weights: Weights, *, measure: bool = False) -> TrainState:
        """Step 0. ``measure`` leaves at zero what takes time: only shapes and speed are wanted."""

    def begin_stage(
        self, data: Points, state: TrainState, stage: Stage, before: tuple[Stage, ...]
    ) -> TrainState:
        """The state with which a later stage begins: a function of the one before it alone."""

    def make_step(self, trains: Trains) -> Step:
        """The step of stages that train this."""

    def write_refresh(
        self, folder: Path, epoch: int, data: Points, state: TrainState
    ) -> dict[str, Any]:
        """Write a refresh's arrays (``NAME.npy``) into a folder; returns facts such as times."""

    def ranker(
        self,
        weights: Weights,
        label_tokens: Tokens,
        *,
        bonus: np.ndarray | None = None,
        kind: str = "exact",
        seed: int = 0,
        keep_indexes: bool = False,
        examples: Examples | None = None,
    ) -> Ranker:
        """The ranker of labels; they may be more than those that were trained.

        Args:
          weights: of a checkpoint or a state.
          label_tokens: label texts, the trained ones first.
          bonus: ``[L]``, what a label's score gets for being rare.
          kind: index: exact, hnsw, ivf or auto.
          seed: of the index.
          keep_indexes: keep every head's index, not the last one alone.
          examples: of all labels that were not trained, where there are any.

        Raises:
          ValueError: an index or labels that the system does not allow.
        """

    def embed_some(self, weights: Weights, tokens: Tokens, rows: np.ndarray) -> None:
        """Embed some texts as an evaluation does, to see how long it takes."""

    def vector_bytes(self, data: Points, evaluated: int, *, mined: bool) -> int:
        """Most bytes of vectors that a refresh or an evaluation of so many rows holds at once."""

    def searched_bytes(self, data: Points, evaluated: int) -> int:
        """Those of them, and of scores, that lie on the device while it searches."""

    def resized(self, options: Any) -> System:
        """The system with other sizes, of which nothing but shapes is wanted."""


class Built(NamedTuple):
    """What a new or continued run begins with.

    Attributes:
      system: the system.
      data: the points as its training reads them.
      weights: its first parameters and model state, without tables.
      description: plain JSON, the entry ``encoder`` of the meta data that `Family.open` reads.
      summary: what reads the texts, in a few words.
    """

    system: System
    data: Any
    weights: Weights
    description: dict[str, Any]
    summary: str


Bounds = Mapping[str, tuple[float, float | None]]
Options = TypeVar("Options")


class Family(Protocol[Options]):
    """A family of systems: from a configuration to a `System`.

    Attributes:
      names: names that a configuration may set, by dotted field.
      bounds: least and most of its numbers (None = no bound), by dotted field.
      transfers: parameters, by their first name, that a run takes over from another one.
    """

    names: Mapping[str, tuple[Any, ...]]
    bounds: Bounds
    transfers: tuple[str, ...]

    def check(self, config: Mapping[str, Any]) -> None:
        """Check what holds between the fields of a configuration.

        Raises:
          ValueError: with what to change.
        """

    def resolve(self, fields: Any, dataset: Any) -> None:
        """Fill the fields that are left open (`xmc_jax.systems.settings.OpenFields`)."""

    def options(self, config: Mapping[str, Any]) -> Options:
        """The options of a complete configuration.

        A frozen dataclass that extends `xmc_jax.training.options.TrainingOptions`.
        """

    def scaled(self, config: Mapping[str, Any], epochs: int) -> dict[str, Any]:
        """The fields that change where a run of these stages lasts so many epochs."""

    def stages(self, options: Options, epochs: int) -> tuple[Stage, ...]:
        """The stages of a run of so many epochs."""

    def cheaper(self, config: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Settings that need less memory and leave all sizes alone, the mildest first."""

    def smaller(self, config: Mapping[str, Any], divisor: int) -> dict[str, Any]:
        """Settings that make vectors smaller by a divisor; {} where nothing can be."""

    def tokenizer(self, options: Options, texts: Iterable[str], folder: Path) -> Tokenizer:
        """The run's tokenizer: kept in its folder, taken from a model, or trained on the texts."""

    def build(self, options: Options, folder: Path, data: Any, tokenizer: Tokenizer) -> Built:
        """A new or continued run's system, in its work directory."""

    def open(self, options: Options, folder: Path, meta: Mapping[str, Any]) -> System:
        """The system of a work directory, without data."""
