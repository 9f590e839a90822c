"""Label frequencies and inverse propensities, from the original training matrix alone."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp


def label_frequency(labels: sp.csr_matrix) -> np.ndarray:
    """Returns ``n_l``, the number of rows that have label ``l``.

    Args:
      labels: ``[N, L]`` CSR; an entry greater than 0 is a positive, one stored twice counts once.

    Returns:
      ``[L]`` int64.
    """
    if not labels.has_canonical_format:
        labels = labels.copy()
        labels.sum_duplicates()
    ids = labels.indices
    if labels.nnz and labels.data.min() <= 0:
        ids = ids[labels.data > 0]
    return np.bincount(ids, minlength=labels.shape[1]).astype(np.int64)


def inverse_propensity(train_labels: sp.csr_matrix, *, a: float, b: float) -> np.ndarray:
    """Returns the weight ``w_l = 1 / p_l`` of each label, large for rare ones.

    ``w_l = 1 + C (n_l + b)^(-a)`` with ``C = (ln N - 1) (b + 1)^a`` (Jain et al., KDD 2016, section
    4, as the public leaderboards compute it). A label with one training point weighs ``ln N``
    whatever ``a`` and ``b``. Rows added to the training set (pseudo-points, identity rows) must not
    be counted here: published numbers that did so cannot be compared.

    Args:
      train_labels: ``[N, L]`` CSR of the original training rows.
      a: the data set's A, at least 0 (``xmc_jax.catalog``).
      b: the data set's B, above 0.

    Returns:
      ``[L]`` float64, no unit.

    Raises:
      ValueError: no rows, or constants out of range.

    Example:
      >>> import numpy as np, scipy.sparse as sp
      >>> labels = sp.csr_matrix(np.eye(1000, 2))
      >>> bool(np.allclose(inverse_propensity(labels, a=0.55, b=1.5), np.log(1000)))
      True
    """
    return weights_of(label_frequency(train_labels), train_labels.shape[0], a=a, b=b)


def weights_of(frequency: np.ndarray, num_rows: int, *, a: float, b: float) -> np.ndarray:
    """`inverse_propensity` from what it counts.

    Args:
      frequency: ``[L]``, rows that have the label (`label_frequency`).
      num_rows: ``N``.
      a, b: as there.

    Returns:
      ``[L]`` float64, no unit.

    Raises:
      ValueError: no rows, or constants out of range.
    """
    if num_rows == 0:
        raise ValueError("propensities need training rows, found 0; pass the training matrix")
    if a < 0 or b <= 0:
        raise ValueError(f"propensity constants: found a={a}, b={b}, expected a >= 0 and b > 0")
    # One or two rows would make C negative and w meaningless; 0 gives every label the weight 1.
    c = max(np.log(num_rows) - 1.0, 0.0) * (b + 1.0) ** a
    return 1.0 + c * (np.asarray(frequency) + b) ** -float(a)


def tail_bonus(weight: float, inverse_propensity: np.ndarray) -> np.ndarray | None:
    """Returns ``t ln w_l``, which labels' scores get to rank rare labels higher; None for t = 0.

    For a frugal classifier, whose score is ``ln p``, t = 1 ranks by ``p w_l``, the label's
    share of the expected PSP@k (Jain et al., KDD 2016); of cosines, t is in units of cosine. Below
    0, frequent labels are ranked higher.

    Args:
      weight: ``t``.
      inverse_propensity: ``w_l``, ``[L]``.

    Returns:
      ``[L]`` float32, or None.
    """
    return (weight * np.log(inverse_propensity)).astype(np.float32) if weight else None
