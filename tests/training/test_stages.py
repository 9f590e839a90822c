"""Stages: which epochs they are, and how they are scaled to a budget."""

from __future__ import annotations

import pytest

from xmc_jax.contracts import Stage
from xmc_jax.systems import settings
from xmc_jax.training import refresh, stages
from xmc_jax.training.options import Rates, TrainingOptions

TWO = ((6, "encoder"), (4, "tables"))


def stages_of(ranges, epochs: int = 10) -> tuple[Stage, ...]:
    return settings.stages_of(ranges, epochs, lambda trains: (trains, {}), field="stages")


def options_of(**fields) -> TrainingOptions:
    sizes = dict(max_length=8, batch_size=4)
    rates = Rates(encoder=0.1, heads=0.1, table=0.1)
    return TrainingOptions(seed=0, lr=rates, **{**sizes, "refresh_epochs": 4, **fields})


def due(options: TrainingOptions, ranges=(), epochs: int = 10) -> list[int | None]:
    return [refresh.due(options, stages_of(ranges, epochs), epoch) for epoch in range(epochs)]


def test_one_stage_where_none_is_named():
    (stage,) = stages_of(())
    assert stage == Stage(0, 10, "all", {}) == stages.at([stage], 9)
    assert stages.before([stage], stage) == ()


def test_each_epoch_is_in_one_stage():
    first, second = Stage(0, 6, "encoder", {}), Stage(6, 4, "tables", {})
    two = stages_of(TWO)
    assert two == (first, second)
    assert [stages.at(two, epoch) for epoch in range(12)] == [first] * 6 + [second] * 6
    assert stages.before(two, first) == () and stages.before(two, second) == (first,)


def test_a_stage_begins_with_a_refresh():
    assert due(options_of(), TWO) == [0] * 4 + [4, 4] + [6] * 4
    assert due(options_of(refresh_epochs=3), TWO) == [0] * 3 + [3] * 3 + [6] * 3 + [9]


def test_refreshes_without_stages():
    assert due(options_of(refresh_epochs=5)) == [0] * 5 + [5] * 5
    assert due(options_of(refresh_epochs=5, warmup_epochs=2)) == [None] * 2 + [2] * 5 + [7] * 3
    assert due(options_of(hard_negatives=False)) == [None] * 10
    assert due(options_of(hard_negatives=False, batching="clusters"))[0] == 0


@pytest.mark.parametrize(("epochs", "expected"), [(10, (6, 4)), (5, (3, 2)), (2, (1, 1))])
def test_scaled_to_a_number_of_epochs(epochs, expected):
    found = stages.scaled(TWO, epochs, field="stages")
    assert tuple(stage[0] for stage in found) == expected
    assert [stage[1:] for stage in found] == [stage[1:] for stage in TWO]


def test_no_stage_is_lost_to_rounding():
    lengths = lambda *given: [
        stage[0] for stage in stages.scaled([(n, "all") for n in given], 5, field="stages")
    ]
    assert lengths(1, 99) == [1, 4] and lengths(99, 1) == [4, 1]
    with pytest.raises(ValueError, match=r"1 epochs for the 2 phases of config\.phases: raise"):
        stages.scaled(TWO, 1, field="phases")
