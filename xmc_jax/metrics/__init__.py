"""Ranking metrics of extreme classification, and propensities."""

from xmc_jax.metrics.propensity import inverse_propensity, label_frequency
from xmc_jax.metrics.ranked_lists import rank, remove_filtered
from xmc_jax.metrics.ranking import (
    evaluate,
    evaluate_bins,
    frequency_bins,
    precision_recall_thresholds,
)

__all__ = [
    "evaluate",
    "evaluate_bins",
    "frequency_bins",
    "inverse_propensity",
    "label_frequency",
    "precision_recall_thresholds",
    "rank",
    "remove_filtered",
]
