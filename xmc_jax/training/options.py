"""What families' options have in common: the settings that the loop, data and batches read."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from xmc_jax.contracts import TextForm

Data = TypeVar("Data")


@dataclasses.dataclass(frozen=True)
class Rates:
    """Peak learning rates, and how they rise and fall.

    Attributes:
      encoder: of the encoder.
      heads: of all other parameters.
      table: of tables.
      warmup: share of a stage's steps.
      weight_decay: decoupled, on matrices only.
      clip_norm: global gradient norm to clip at; 0 = none.
    """

    encoder: float
    heads: float
    table: float
    warmup: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float = 0.0


@dataclasses.dataclass(frozen=True)
class GandalfOptions:
    """Label texts as training points; the configuration's comments say what each field means."""

    enabled: bool = False
    variant: str = "graph"
    delta: float = 0.1
    draw: str = "target"
    points: str = "all"
    share: float = 1.0
    order: str = "random"
    skip_labels_that_are_points: bool = False


@dataclasses.dataclass(frozen=True)
class RetrievalOptions:
    """Retrieval at inference; the configuration's comments say what each field means."""

    enabled: bool = False
    neighbours: int = 50
    temperature: float = 0.1
    points: float | None = None
    labels: float | None = None
    lexical: float | None = None
    choose_by: str = "P@5"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """What the loop and the data read of every family; the configurations say what fields mean."""

    seed: int
    max_length: int
    batch_size: int
    lr: Rates
    gandalf: GandalfOptions = GandalfOptions()
    hard_negatives: bool = True
    mask_filter_pairs: bool = True
    batching: str = "random"
    cluster_schedule: tuple[tuple[int, int], ...] = ((0, 4), (5, 8), (10, 16), (20, 32))
    refresh_epochs: int = 5
    warmup_epochs: int = 0
    held_out_share: float = 0.05
    held_out_rows: int = 10_000
    share_of: str = "rows"
    eval_epochs: int = 5
    tail_weight: float = 0.0
    retrieval: RetrievalOptions = RetrievalOptions()
    log_steps: int = 20

    @property
    def text_form(self) -> TextForm:
        """How texts are cut into tokens; a family adds what its encoder wants."""
        return TextForm(self.max_length, special_tokens=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolOptions(TrainingOptions):
    """What else families read whose batches are packed texts and a pool of labels."""

    row_length: int
    pool_size: int
    beta: int
    eta: int
    fill: str = "none"
    extra_positives: int = 0
    extra_pool_size: int = 0


def from_mapping(kind: type[Data], values: Mapping[str, Any]) -> Data:
    """A frozen dataclass from nested mappings; entries that it has no field for are left out.

    Args:
      kind: the dataclass; a field may be a dataclass again.
      values: of a configuration. A field that is not there has its default.

    Raises:
      ValueError: a field without a default is missing or None.
    """
    types, taken = typing.get_type_hints(kind), {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        value: Any = values.get(field.name)
        required = field.default is dataclasses.MISSING
        if field.name not in values or (value is None and required):
            if required:
                raise ValueError(f"config.{field.name} is {value}: expected a value.")
            continue
        if dataclasses.is_dataclass(types[field.name]):
            value = from_mapping(types[field.name], value)
        elif isinstance(value, list):
            value = _tuples(value)
        taken[field.name] = value
    return kind(**taken)


def _tuples(value: Any) -> Any:
    """Lists, which JSON has in the place of tuples, as tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value
