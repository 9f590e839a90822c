"""Frugal systems learn something on the bundled data: more than what is frequent."""

from __future__ import annotations

import numpy as np
import pytest

from configs import frugal
from xmc_jax import metrics
from xmc_jax.data.summaries import baselines
from xmc_jax.metrics.propensity import inverse_propensity
from xmc_jax.runs import launch, open_runs

TFIDF_NEAREST_LABEL = 21.17  # P@5 of `baselines.tfidf_nearest_label`; see test_baselines.py


@pytest.mark.slow
@pytest.mark.parametrize("system", frugal.SYSTEMS)
def test_above_the_baselines(system, tmp_path, optimised):
    """A quarter of the configuration's epochs.

    A bag of words knows from the start that a query and a label share a word; convolutions must
    learn it, and are not asked to have done so by then.
    """
    config = frugal.get_config(f"{system},wordnet-mini")
    config.epochs = 5 if system.startswith("inceptionxml") else 10
    config.eval_epochs = 1000
    result = launch.start(config, tmp_path / "run")
    found = result["heads"]["clf"]["filtered"]
    opened = open_runs.open_run(tmp_path / "run")
    assert open_runs.evaluate_run(opened) == result
    data = opened.load_data()
    train, test = data.dataset.train.labels, data.test
    popular = metrics.evaluate(
        np.asarray(baselines.popularity(train, len(test.rows), 100)),
        test.truth,
        filter_pairs=test.filter_pairs,
        inverse_propensity=inverse_propensity(train, a=data.entry.a, b=data.entry.b),
    )
    assert found.keys() == popular.keys()
    assert all(found[name] > popular[name] for name in popular), (found, popular)
    if config.label_text and system != "inceptionxml-lf":
        assert found["P@5"] > TFIDF_NEAREST_LABEL, found
