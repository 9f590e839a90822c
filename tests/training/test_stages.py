"""Phases: which epochs they are, and how they are scaled to a budget."""

from __future__ import annotations

import pytest
from ml_collections import ConfigDict

from xmc_jax.training import refresh, stages
from xmc_jax.training.stages import Phase

TWO = ((6, False, "pifa"), (4, True, "text"))


def config_of(**fields) -> ConfigDict:
    made = {"epochs": 10, "batching": "random", "hard_negatives": True, "warmup_epochs": 0}
    return ConfigDict({**made, "refresh_epochs": 4, **fields})


def test_one_phase_where_none_is_named():
    config = config_of()
    assert stages.of(config) == [Phase(0, 10, True, "pifa")] == [stages.at(config, 9)]


def test_each_epoch_is_in_one_phase():
    config = config_of(phases=TWO)
    first, second = Phase(0, 6, False, "pifa"), Phase(6, 4, True, "text")
    assert stages.of(config) == [first, second]
    assert [stages.at(config, epoch) for epoch in range(12)] == [first] * 6 + [second] * 6


def test_a_phase_begins_with_a_refresh():
    config = config_of(phases=TWO)
    assert [refresh.due(config, epoch) for epoch in range(10)] == [0] * 4 + [4, 4] + [6] * 4
    config.refresh_epochs = 3
    assert [refresh.due(config, epoch) for epoch in range(10)] == [0] * 3 + [3] * 3 + [6] * 3 + [9]


@pytest.mark.parametrize(("epochs", "expected"), [(10, (6, 4)), (5, (3, 2)), (2, (1, 1))])
def test_scaled_to_a_number_of_epochs(epochs, expected):
    found = stages.scaled(TWO, epochs)
    assert tuple(phase[0] for phase in found) == expected
    assert [phase[1:] for phase in found] == [phase[1:] for phase in TWO]


def test_no_phase_is_lost_to_rounding():
    assert [p[0] for p in stages.scaled(((1, True, "pifa"), (99, True, "text")), 5)] == [1, 4]
    assert [p[0] for p in stages.scaled(((99, True, "pifa"), (1, True, "text")), 5)] == [4, 1]
    with pytest.raises(ValueError, match=r"1 epochs for the 2 phases"):
        stages.scaled(TWO, 1)
