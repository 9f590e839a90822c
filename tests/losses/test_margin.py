"""What is particular to the triplet loss: all pairs count, and none is formed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from xmc_jax import losses


def test_triplet_memory_does_not_grow_with_pairs():
    q, p = 64, 2048
    shape = jax.ShapeDtypeStruct((q, p), jnp.float32)
    function = jax.jit(jax.grad(lambda s, y: losses.triplet_loss(s, y)))
    memory = function.lower(shape, shape).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 40 * q * p * 4  # the pairs are q * p * p * 4 = 1 GiB


def test_gradient_equals_that_of_all_pairs_on_a_large_pool():
    rng = np.random.default_rng(0)
    # On a grid that float32 holds exactly and that no margin of 0.3 meets: no pair is at its kink.
    scores = (rng.integers(-512, 512, (4, 500)) / 512).astype(np.float32)
    positive = rng.random((4, 500)) < 0.1

    def all_pairs(s, margin, positive):
        hinges = jnp.maximum(margin - s[:, :, None] + s[:, None, :], 0)
        pairs = positive[:, :, None] & ~positive[:, None, :]
        return jnp.mean(jnp.sum(hinges * pairs, (1, 2)) / jnp.sum(pairs, (1, 2)))

    def loss(s, margin, positive):
        return losses.triplet_loss(s, positive, margin=margin)

    actual, expected = (
        jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(scores, 0.3, positive)
        for f in (loss, all_pairs)
    )
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())
