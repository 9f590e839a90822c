"""Public names of `xmc_jax.metrics.propensity`."""

from xmc_jax.metrics.propensity import inverse_propensity, label_frequency, weights_of

__all__ = ["inverse_propensity", "label_frequency", "weights_of"]
