"""Query encoder of InceptionXML and InceptionXML-LF: convolutions over word vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from xmc_jax.contracts import Side, TokenBatch
from xmc_jax.models.encoders.bag import text_spans
from xmc_jax.models.encoders.padded import padded_batch
from xmc_jax.models.frugal.batch_norm import batch_norm, init_batch_norm
from xmc_jax.models.frugal.spectral import init_spectral, spectral_linear, unit_kernel
from xmc_jax.models.layers import dropout, gelu, init_linear, linear, product, require_key

Params = dict[str, Any]
Moving = dict[str, Any]
CHANNELS = 32
STRIDE = 4  # of both convolutions
KERNELS = (4, 8, 16)  # of the three side by side
SECOND_KERNEL = 16
TASKS = ("meta", "extreme")


@dataclass(frozen=True)
class InceptionQueries:
    """InceptionXML's encoder (``experts=False``) or InceptionXML-LF's (``experts=True``).

    A text is the matrix X ``[length, D]`` of its word vectors, padded with zeros; convolutions run
    along D. With D = 300, as published (Kharbanda et al., 2023):

        dropout                                                        [32, 300]
        H = g (X X^T) (W X) + X                                        [32, 300]
        H' = g' (H^T X) (W' H^T) + H^T                                 [300, 32]
        h = batch_norm(gelu(H' W_1 + b_1)), words are the channels     [300, 32]
        three convolutions, kernels 4, 8, 16, stride 4, circular       3 x [75, 32]
        concatenate, gelu, batch_norm, dropout                         [75, 96]
        convolution, kernel 16, stride 4, gelu, batch_norm, flatten    [480]
        for each task: gelu(SN-linear(dropout(f))) + pool(f)           [D]

    W and W' have spectral norm 1, g and g' start at 0; ``pool`` averages neighbouring features to
    make D of them, as the authors' code does where label vectors are not of size 480.

    ``experts`` (Gandalf, appendix A.1): the three maps are not concatenated but added, ``sum_k r_k
    C_k(h) + avgpool(h)``, with weights r of the instance; then there is a second convolution
    (32 -> 32) for each task. The paper is silent on the rest, this is our reading: ``r =
    sigmoid(W_r m + b_r)``, m the mean of H' over the text's words; the pool has kernel and stride
    4; a head is an SN-linear layer of dropout(f) to D, without GELU and residual.

    Features of a text do not depend on how the batch is packed. In training a batch norm makes
    them depend on the other texts.

    Attributes:
      vocab_size: V, rows of the shared token table.
      dim: D, a multiple of 4, at least 64.
      length: words of a text; the words after that are cut off.
      dropout: rate of all dropouts, in training only.
      experts: see above.
    """

    vocab_size: int
    dim: int = 300
    length: int = 32
    dropout: float = 0.25
    experts: bool = False
    max_segments: ClassVar[int] = 255
    shared: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.dim % STRIDE or self.dim < STRIDE * SECOND_KERNEL:
            raise ValueError(
                f"InceptionQueries(dim={self.dim}): two convolutions of stride {STRIDE} need a "
                f"multiple of {STRIDE}, at least {STRIDE * SECOND_KERNEL}"
            )

    @property
    def num_features(self) -> int:
        """Size of the flattened map: 480 for D = 300."""
        return CHANNELS * ((self.dim // STRIDE - SECOND_KERNEL) // STRIDE + 1)

    def init(self, key: jax.Array) -> tuple[Params, Moving]:
        """Draws parameters, without the token table, and moving values.

        Attention Xavier normal with g = g' = 0; all else Xavier uniform, biases 0.
        """
        keys = iter(jax.random.split(key, 16))
        second_inputs = CHANNELS if self.experts else CHANNELS * len(KERNELS)
        params: Params = {"first": init_linear(next(keys), self.length, CHANNELS)}
        moving: Moving = {}
        for name, size in (("words", self.length), ("dimensions", self.dim)):
            params[name], moving[name] = _init_attention(next(keys), size)
        for size in KERNELS:
            params[f"kernel{size}"] = _init_convolution(next(keys), size, CHANNELS)
        if self.experts:
            params["router"] = init_linear(next(keys), self.dim, len(KERNELS))
        norms = {"first_norm": CHANNELS, "inception_norm": second_inputs}
        for task in TASKS if self.experts else ("shared",):
            params[f"{task}_second"] = _init_convolution(next(keys), SECOND_KERNEL, second_inputs)
            norms[f"{task}_norm"] = CHANNELS
        for name, channels in norms.items():
            params[name], moving[name] = init_batch_norm(channels)
        for task in TASKS:
            params[f"{task}_head"], moving[f"{task}_head"] = init_spectral(
                next(keys), self.num_features, self.dim
            )
        return params, moving

    def apply(
        self,
        params: Params,
        table: jax.Array,
        idf: jax.Array,
        tokens: TokenBatch,
        moving: Moving,
        *,
        key: jax.Array | None = None,
        train: bool = False,
        side: Side = "query",
    ) -> tuple[tuple[jax.Array, jax.Array], Moving]:
        """Meta and extreme features, each ``[B, D]``, and the moving values to keep.

        Args:
          params: of :meth:`init`.
          table: ``[V, D]`` shared token table.
          idf: not used.
          tokens: packed texts.
          moving: directions of spectral norms, running statistics of batch norms.
          key: for dropout; needed if and only if ``train``.
          train: dropout, batch statistics and power iterations, or not.
          side: not read.

        Returns:
          ``((meta, extreme), moving)``; features are zeros where ``text_segment`` is 0.

        Raises:
          ValueError: ``train=True`` without a key.
        """
        key = require_key(train, key)
        keys = (None,) * 4 if key is None else jax.random.split(key, 4)
        run = _Run(params, dict(moving), jnp.asarray(tokens.text_segment) > 0, train)
        words, count = word_vectors(table, tokens, self.length)  # [B, length, D]
        words = dropout(words, self.dropout, keys[0])
        mixing = run.attention(words)  # N [B, length, length]: H' = X^T N
        first = jnp.einsum("bwd,bwc->bdc", words, product(mixing, params["first"]["kernel"]))
        first = run.norm("first", gelu(first + params["first"]["bias"]))  # [B, D, 32]
        maps = circular_convolutions([params[f"kernel{size}"] for size in KERNELS], first)
        if self.experts:
            mean = jnp.einsum("bwd,bw->bd", words, mixing.sum(axis=2))  # of H', times the words
            mean = mean / jnp.maximum(count, 1)[:, None]  # [B, D]
            inception = self._mixture(params, first, maps, mean)
        else:
            inception = jnp.concatenate(maps, axis=2)  # [B, D / 4, 96]
        inception = dropout(run.norm("inception", gelu(inception)), self.dropout, keys[1])
        if self.experts:
            features = [run.second(task, inception) for task in TASKS]
        else:
            features = [run.second("shared", inception)] * 2
        outputs = []
        for task, x, head_key in zip(TASKS, features, keys[2:]):
            y = run.head(task, dropout(x, self.dropout, head_key))
            if not self.experts:
                y = gelu(y) + x @ jnp.asarray(pooling_matrix(x.shape[1], self.dim), x.dtype)
            outputs.append(jnp.where(run.filled[:, None], y, 0))
        return (outputs[0], outputs[1]), run.moving

    def apply_padded(
        self,
        params: Params,
        table: jax.Array,
        idf: jax.Array,
        ids: jax.Array,
        mask: jax.Array,
        moving: Moving,
        side: Side = "query",
    ) -> tuple[tuple[jax.Array, jax.Array], Moving]:
        """The same of one text a row: see `xmc_jax.models.encoders.padded.padded_batch`."""
        return self.apply(params, table, idf, padded_batch(ids, mask), moving, side=side)

    def _mixture(
        self, params: Params, first: jax.Array, maps: list[jax.Array], mean: jax.Array
    ) -> jax.Array:
        """``sum_k r_k maps_k + avgpool(first)``, ``[B, D / 4, 32]``."""
        route = jax.nn.sigmoid(linear(params["router"], mean))  # [B, 3]
        pooled = first.reshape(len(first), -1, STRIDE, CHANNELS).mean(axis=2)
        return pooled + sum(route[:, k, None, None] * x for k, x in enumerate(maps))


@dataclass
class _Run:
    """Layers of one call, which renew the moving values as they go."""

    params: Params
    moving: Moving
    filled: jax.Array
    train: bool

    def norm(self, name: str, x: jax.Array) -> jax.Array:
        name = f"{name}_norm"
        y, self.moving[name] = batch_norm(
            self.params[name], self.moving[name], x, self.filled, train=self.train
        )
        return y

    def head(self, task: str, x: jax.Array) -> jax.Array:
        return self._spectral(f"{task}_head", self.params[f"{task}_head"], x)

    def second(self, task: str, x: jax.Array) -> jax.Array:
        y = self.norm(task, gelu(strided_convolution(self.params[f"{task}_second"], x)))
        return y.reshape(len(y), -1)

    def attention(self, x: jax.Array) -> jax.Array:
        """N ``[B, words, words]`` with ``H' = X^T N``, from X ``[B, words, D]``.

        H = S X with S = g (X X^T) W + I, and H' = H^T M with M = g' X (W' H^T) + I: what is linear
        in X waits, so that neither H, H' nor an array ``[B, D, D]`` is made.
        """
        eye = jnp.eye(x.shape[1], dtype=x.dtype)
        words, dimensions = self._unit("words"), self._unit("dimensions")  # W^T, W'^T
        inner = jnp.einsum("bwd,bvd->bwv", x, x)  # X X^T
        s = self.params["words"]["gain"] * product(inner, words.T) + eye
        inner = jnp.einsum("bwd,bvd->bwv", product(x, dimensions.T), x)  # X W' X^T
        m = self.params["dimensions"]["gain"] * jnp.einsum("bwv,buv->bwu", inner, s) + eye
        return jnp.einsum("bvw,bvu->bwu", s, m)  # S^T M

    def _unit(self, name: str) -> jax.Array:
        kernel, self.moving[name] = unit_kernel(
            self.params[name]["kernel"], self.moving[name], train=self.train
        )
        return kernel

    def _spectral(self, name: str, params: Params, x: jax.Array) -> jax.Array:
        y, self.moving[name] = spectral_linear(params, self.moving[name], x, train=self.train)
        return y


def word_vectors(table: jax.Array, tokens: TokenBatch, length: int) -> tuple[jax.Array, jax.Array]:
    """Each text's first ``length`` word vectors, padded with zeros, and how many there are.

    Args:
      table: ``[V, D]``.
      tokens: packed texts; the tokens of a text lie side by side in its row.
      length: words to take.

    Returns:
      ``[B, length, D]`` and ``[B]`` int32.
    """
    start, count = text_spans(tokens)
    count = jnp.minimum(count, length)
    place = jnp.arange(length, dtype=jnp.int32)
    flat_ids = jnp.asarray(tokens.ids).astype(jnp.int32).reshape(-1)
    ids = jnp.take(flat_ids, start[:, None] + place, mode="clip")
    ids = jnp.where(place < count[:, None], ids, table.shape[0])  # past the end: zeros
    return jnp.take(table, ids, axis=0, mode="fill", fill_value=0), count


def circular_convolutions(convolutions: list[Params], x: jax.Array) -> list[jax.Array]:
    """``y_i = b + sum_{j < k} x_(4 i + j - (k - 4) / 2) W_j`` of several kernels, x in a circle.

    Zeros at both ends of a kernel let it begin and end with a block of four positions. Then all
    kernels are one matrix product of x's blocks, whose outputs are turned and added.

    Args:
      convolutions: kernels W ``[k, C, O]``, k a multiple of 4, O the same, and biases ``[O]``.
      x: ``[B, W, C]``, W a multiple of 4.

    Returns:
      ``[B, W / 4, O]`` for each.
    """
    kernels = []
    for params in convolutions:
        before = (len(params["kernel"]) - STRIDE) // 2  # positions of the kernel before block i
        zeros = -before % STRIDE
        kernels.append(jnp.pad(params["kernel"], ((zeros, zeros), (0, 0), (0, 0))))
    pieces = iter(_block_products(jnp.concatenate(kernels), x))
    maps = []
    for params, kernel in zip(convolutions, kernels):
        shifts = len(kernel) // STRIDE
        turned = [jnp.roll(next(pieces), shifts // 2 - s, axis=1) for s in range(shifts)]
        maps.append(sum(turned) + params["bias"])
    return maps


def strided_convolution(params: Params, x: jax.Array) -> jax.Array:
    """``y_i = b + sum_{j < k} x_(4 i + j) W_j``, without padding.

    As one matrix product of blocks of four positions, whose outputs are shifted and added: no copy
    of x is made in which each position stands k / 4 times.

    Args:
      params: kernel W ``[k, C, O]``, k a multiple of 4, and bias ``[O]``.
      x: ``[B, W, C]``.

    Returns:
      ``[B, (W - k) // 4 + 1, O]``.
    """
    shifts = len(params["kernel"]) // STRIDE
    width = x.shape[1] // STRIDE - shifts + 1
    pieces = _block_products(params["kernel"], x)
    return sum(y[:, s : s + width] for s, y in enumerate(pieces)) + params["bias"]


def _block_products(kernel: jax.Array, x: jax.Array) -> list[jax.Array]:
    """``x_(4 i .. 4 i + 3) W_(4 s .. 4 s + 3)`` for every s, each ``[B, W // 4, O]``."""
    size, channels, outputs = kernel.shape
    shifts = size // STRIDE
    blocks = x[:, : x.shape[1] // STRIDE * STRIDE].reshape(len(x), -1, STRIDE * channels)
    kernel = kernel.reshape(shifts, STRIDE * channels, outputs)
    y = product(blocks, jnp.swapaxes(kernel, 0, 1).reshape(STRIDE * channels, shifts * outputs))
    return jnp.split(y, shifts, axis=2)


def pooling_matrix(inputs: int, outputs: int) -> np.ndarray:
    """``[inputs, outputs]`` adaptive average pool.

    Output i is the mean of the inputs from ``floor(i inputs / outputs)`` to ``ceil((i + 1) inputs /
    outputs)`` exclusive, as PyTorch's AdaptiveAvgPool1d.
    """
    place, output = np.arange(inputs)[:, None], np.arange(outputs)
    inside = (place >= output * inputs // outputs) & (place < -(-(output + 1) * inputs // outputs))
    return inside / inside.sum(axis=0)


def _init_attention(key: jax.Array, size: int) -> tuple[Params, jax.Array]:
    """A square kernel without bias and its gain, 0; and the kernel's direction."""
    kernel_key, direction_key = jax.random.split(key)
    kernel = jax.nn.initializers.xavier_normal()(kernel_key, (size, size), jnp.float32)
    direction = init_spectral(direction_key, size, size)[1]
    return {"kernel": kernel, "gain": jnp.zeros((), jnp.float32)}, direction


def _init_convolution(key: jax.Array, size: int, inputs: int) -> Params:
    shape = (size, inputs, CHANNELS)
    kernel = jax.nn.initializers.xavier_uniform()(key, shape, jnp.float32)
    return {"kernel": kernel, "bias": jnp.zeros(CHANNELS, jnp.float32)}
