"""DistilBERT and BERT shapes, equal to Hugging Face's, on packed rows."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
from flax import linen as nn

from xmc_jax.contracts import Side, TokenBatch
from xmc_jax.models.encoders import pooling as pool
from xmc_jax.models.encoders.padded import padded_batch
from xmc_jax.models.layers import dropout, gelu, layer_norm, linear, require_key

Params = dict[str, Any]

POOLINGS = {"mean": pool.mean_pool, "cls": pool.cls_pool}
COMPUTE_DTYPES = ("float32", "bfloat16", "float64")
ATTENTIONS = ("xla", "cudnn")

# Our field -> (key in config.json, Hugging Face's default), a family each.
_BERT_KEYS = {
    "vocab_size": ("vocab_size", 30522),
    "dim": ("hidden_size", 768),
    "num_layers": ("num_hidden_layers", 12),
    "num_heads": ("num_attention_heads", 12),
    "mlp_dim": ("intermediate_size", 3072),
    "max_positions": ("max_position_embeddings", 512),
    "num_token_types": ("type_vocab_size", 2),
    "layer_norm_eps": ("layer_norm_eps", 1e-12),
    "dropout": ("hidden_dropout_prob", 0.1),
    "attention_dropout": ("attention_probs_dropout_prob", 0.1),
    "initializer_range": ("initializer_range", 0.02),
    "pad_token_id": ("pad_token_id", 0),
}
_DISTILBERT_KEYS = {
    "vocab_size": ("vocab_size", 30522),
    "dim": ("dim", 768),
    "num_layers": ("n_layers", 6),
    "num_heads": ("n_heads", 12),
    "mlp_dim": ("hidden_dim", 3072),
    "max_positions": ("max_position_embeddings", 512),
    "dropout": ("dropout", 0.1),
    "attention_dropout": ("attention_dropout", 0.1),
    "initializer_range": ("initializer_range", 0.02),
    "pad_token_id": ("pad_token_id", 0),
}
_KEYS = {"bert": _BERT_KEYS, "distilbert": _DISTILBERT_KEYS}
# Settings with one supported value: (family, key) -> value, which is also Hugging Face's default.
_FIXED: dict[str, dict[str, Any]] = {
    "bert": {"hidden_act": "gelu", "position_embedding_type": "absolute", "is_decoder": False},
    "distilbert": {"activation": "gelu"},
}
_ARCHITECTURES = {"bert": "BertModel", "distilbert": "DistilBertModel"}


@dataclass(frozen=True)
class TransformerConfig:
    """Shape of a BERT or DistilBERT encoder; defaults are DistilBERT's.

    The families differ in two places: BERT adds the embedding of token type 0 to every token, and a
    dropout after the attention's output map.
    """

    family: str = "distilbert"  # "bert" or "distilbert"
    vocab_size: int = 30522
    dim: int = 768
    num_layers: int = 6
    num_heads: int = 12
    mlp_dim: int = 3072
    max_positions: int = 512  # longest text, special tokens included
    num_token_types: int = 0  # 2 in BERT, none in DistilBERT
    layer_norm_eps: float = 1e-12
    dropout: float = 0.1
    attention_dropout: float = 0.1
    initializer_range: float = 0.02  # standard deviation of weights drawn by init
    pad_token_id: int = 0  # only written back to config.json

    def __post_init__(self) -> None:
        if self.family not in _KEYS:
            raise ValueError(
                f"model family (model_type) {self.family!r} is not supported; expected one of "
                f"{sorted(_KEYS)}: use a BERT or DistilBERT encoder"
            )
        if self.dim % self.num_heads:
            raise ValueError(f"dim {self.dim} is not a multiple of num_heads {self.num_heads}")
        if (self.num_token_types > 0) != (self.family == "bert"):
            raise ValueError(f"num_token_types {self.num_token_types} in family {self.family!r}")

    @classmethod
    def distilbert(cls, **changes: Any) -> TransformerConfig:
        """distilbert-base: 6 layers, dim 768, 66 million parameters."""
        return cls(**changes)

    @classmethod
    def minilm(cls, **changes: Any) -> TransformerConfig:
        """MiniLM-L6-H384: BERT with 6 layers, dim 384, 23 million parameters."""
        shape: dict[str, Any] = {
            "family": "bert",
            "dim": 384,
            "mlp_dim": 1536,
            "num_token_types": 2,
        }
        return cls(**(shape | changes))

    @classmethod
    def from_huggingface(cls, config: dict[str, Any]) -> TransformerConfig:
        """Reads the dictionary of a ``config.json``.

        Raises:
          ValueError: ``model_type`` is not bert or distilbert, or a setting asks for a computation
            that is not supported (another activation, relative positions, a decoder).
        """
        family: Any = config.get("model_type")
        if family not in _KEYS:
            return cls(family=family)  # raises
        for key, expected in _FIXED[family].items():
            value = config.get(key, expected)
            if value != expected:
                raise ValueError(f"{key} is {value!r} in the model's config; expected {expected!r}")
        keys = _KEYS[family].items()
        fields = {ours: config.get(theirs, default) for ours, (theirs, default) in keys}
        return cls(family=family, **fields)

    def to_huggingface(self) -> dict[str, Any]:
        """The dictionary of a ``config.json`` that Hugging Face reads."""
        values = asdict(self)
        config: dict[str, Any] = {
            "model_type": self.family,
            "architectures": [_ARCHITECTURES[self.family]],
        }
        config |= {theirs: values[ours] for ours, (theirs, _) in _KEYS[self.family].items()}
        return config | _FIXED[self.family] | {"dtype": "float32"}


@dataclass(frozen=True)
class TransformerEncoder:
    """A transformer that turns packed texts into one vector each.

    Parameters (float32 whatever the compute type): ``{"embeddings": {"word": [V, H], "position":
    [max_positions, H], "token_type": [2, H] (BERT), "norm": {"scale", "bias"}}, "layer_0": {"qkv":
    {"kernel": [H, 3H], "bias"}, "attention_out", "attention_norm", "mlp_in", "mlp_out",
    "mlp_norm"}, "layer_1": ...}``.

    Attributes:
      config: the shape.
      pooling: "mean" over a text's tokens or "cls", its first token.
      compute_dtype: type of matrix products and of the residual stream; softmax, layer
        normalisation and pooling are done in 32 bits. "float64" needs JAX_ENABLE_X64 and parameters
        in float64.
      remat: recompute each layer in the backward pass (jax.checkpoint): memory of one layer.
      max_segments: the most texts a row can hold.
      start: layers that are not there, from the embeddings up: ``ids`` are then the hidden states
        that layer ``start - 1`` puts out, ``[R, T, H]``; of all layers (start = num_layers), one
        pooled vector a text in place of its tokens.
      attention: "xla", or "cudnn" for the fused kernel of jax.nn.dot_product_attention on NVIDIA
        GPUs (bfloat16 only; in training the config's attention_dropout must be 0).
    """

    config: TransformerConfig
    pooling: str = "mean"
    compute_dtype: str = "float32"
    remat: bool = False
    max_segments: int = 32
    attention: str = "xla"
    start: int = 0
    shared: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _require_one_of("pooling", self.pooling, POOLINGS)
        _require_one_of("compute_dtype", self.compute_dtype, COMPUTE_DTYPES)
        _require_one_of("attention", self.attention, ATTENTIONS)
        if self.attention == "cudnn" and self.compute_dtype != "bfloat16":
            raise ValueError(
                f"attention 'cudnn' with compute_dtype {self.compute_dtype!r}; expected 'bfloat16'"
            )

    @property
    def dim(self) -> int:
        """Size of a text's vector."""
        return self.config.dim

    def init(self, key: jax.Array) -> Params:
        """Draws parameters: weights N(0, initializer_range), biases 0, norms 1."""
        positions = ids = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        mask = jax.ShapeDtypeStruct((1, 1, 1), jnp.bool_)
        if self.start:
            ids = jax.ShapeDtypeStruct((1, 1, self.dim), jnp.float32)
        return _Transformer(self).lazy_init(key, ids, positions, mask).get("params", {})

    def apply(
        self,
        params: Params,
        tokens: TokenBatch,
        *,
        key: jax.Array | None = None,
        train: bool = False,
        side: Side = "query",
    ) -> jax.Array:
        """One vector a text.

        Args:
          params: see the class.
          tokens: packed texts, each no longer than ``config.max_positions``.
          key: for dropout; needed if and only if ``train``.
          train: dropout or not.
          side: not read: queries and labels are the same here.

        Returns:
          ``[B, H]`` float32; zeros where ``text_segment`` is 0.

        Raises:
          ValueError: ``train=True`` without a key, or arrays of unequal shapes.
        """
        hidden = self.hidden(
            params, tokens.ids, tokens.segment_ids, tokens.positions, key=key, train=train
        )
        return POOLINGS[self.pooling](hidden, tokens, self.max_segments)

    def apply_padded(
        self, params: Params, ids: jax.Array, mask: jax.Array, side: Side = "query"
    ) -> jax.Array:
        """The same of one text a row: see `xmc_jax.models.encoders.padded.padded_batch`."""
        alone = replace(self, max_segments=1)  # pools one text a row, not 32 that are not there
        return alone.apply(params, padded_batch(ids, mask), side=side)

    def hidden(
        self,
        params: Params,
        ids: jax.Array,
        segment_ids: jax.Array,
        positions: jax.Array,
        *,
        key: jax.Array | None = None,
        train: bool = False,
    ) -> jax.Array:
        """Last hidden states ``[R, T, H]`` of packed rows; attention stays within a segment.

        What stands in padding (segment 0) is not read; its own states are finite and mean nothing.
        """
        ids = jnp.asarray(ids) if self.start else jnp.asarray(ids).astype(jnp.int32)
        segments, positions = (jnp.asarray(x).astype(jnp.int32) for x in (segment_ids, positions))
        vector = (self.dim,) if self.start else ()
        if ids.shape != (*segments.shape, *vector) or not segments.shape == positions.shape:
            raise ValueError(
                f"ids {ids.shape}, segment_ids {segments.shape}, positions {positions.shape}; "
                f"expected three arrays [R, T]{' (ids: [R, T, H])' if self.start else ''}"
            )
        real = segments > 0
        mask = (segments[:, :, None] == segments[:, None, :]) & real[:, :, None]  # [R, T, T]
        ids = jnp.where(real[..., None] if self.start else real, ids, 0)
        positions = jnp.where(real, positions, 0)
        return self._run(params, ids, positions, mask, require_key(train, key), train)

    def encode_padded(
        self, params: Params, input_ids: jax.Array, attention_mask: jax.Array
    ) -> jax.Array:
        """Last hidden states ``[B, T, H]`` of padded texts, as Hugging Face's model returns them.

        Args:
          params: see the class.
          input_ids: ``[B, T]`` token ids.
          attention_mask: ``[B, T]``, 1 = token, 0 = padding, which no token attends to.

        Raises:
          ValueError: unequal shapes, or T over ``config.max_positions``.
        """
        ids = jnp.asarray(input_ids).astype(jnp.int32)
        present = jnp.asarray(attention_mask) > 0
        if ids.shape != present.shape or ids.ndim != 2:
            raise ValueError(
                f"input_ids {ids.shape}, attention_mask {present.shape}; expected both [B, T]"
            )
        if ids.shape[1] > self.config.max_positions:
            raise ValueError(
                f"texts of {ids.shape[1]} tokens for an encoder of {self.config.max_positions} "
                "positions: truncate them when tokenising"
            )
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
        mask = jnp.broadcast_to(present[:, None, :], (*ids.shape, ids.shape[1]))
        return self._run(params, ids, positions, mask, None, False)

    def _run(
        self,
        params: Params,
        ids: jax.Array,
        positions: jax.Array,
        mask: jax.Array,
        key: jax.Array | None,
        train: bool,
    ) -> jax.Array:
        if train and self.attention == "cudnn" and self.config.attention_dropout > 0:
            raise ValueError(
                f"attention 'cudnn' with attention_dropout {self.config.attention_dropout}: it has "
                "no dropout; set attention_dropout=0 in the TransformerConfig or attention='xla'"
            )
        rngs = None if key is None else {"dropout": key}
        module = _Transformer(self, train)
        return cast(jax.Array, module.apply({"params": params}, ids, positions, mask, rngs=rngs))


class _Transformer(nn.Module):
    encoder: TransformerEncoder
    train: bool = False

    @nn.compact
    def __call__(self, ids: jax.Array, positions: jax.Array, mask: jax.Array) -> jax.Array:
        if self.encoder.start:
            x = ids.astype(self.encoder.compute_dtype)
        else:
            x = _Embeddings(self.encoder, self.train, name="embeddings")(ids, positions)
        layer = nn.remat(_Layer) if self.encoder.remat else _Layer
        for i in range(self.encoder.start, self.encoder.config.num_layers):
            x = layer(self.encoder, self.train, name=f"layer_{i}")(x, mask)
        return x


class _Block(nn.Module):
    """What embeddings and layers share: parameters by name, dropout, normalisation."""

    encoder: TransformerEncoder
    train: bool

    def drop(self, x: jax.Array, rate: float) -> jax.Array:
        return dropout(x, rate, self.make_rng("dropout") if self.train else None)

    def table(self, name: str, rows: int) -> jax.Array:
        config = self.encoder.config
        initializer = nn.initializers.normal(config.initializer_range)
        return self.param(name, initializer, (rows, config.dim), jnp.float32)

    def linear(self, name: str, x: jax.Array, outputs: int) -> jax.Array:
        spread = self.encoder.config.initializer_range
        return linear(_Linear(x.shape[-1], outputs, spread, name=name)(), x)

    def norm(self, name: str, x: jax.Array) -> jax.Array:
        config = self.encoder.config
        y = layer_norm(x, *_Norm(config.dim, name=name)(), config.layer_norm_eps)
        return y.astype(self.encoder.compute_dtype)


class _Embeddings(_Block):
    @nn.compact
    def __call__(self, ids: jax.Array, positions: jax.Array) -> jax.Array:
        config = self.encoder.config
        x = jnp.take(self.table("word", config.vocab_size), ids, axis=0, mode="clip")  # [R, T, H]
        places = self.table("position", config.max_positions)
        x = x + jnp.take(places, positions, axis=0, mode="clip")
        if config.num_token_types:
            x = x + self.table("token_type", config.num_token_types)[0]
        return self.drop(self.norm("norm", x), config.dropout)


class _Layer(_Block):
    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        config = self.encoder.config
        context = self.attend(self.linear("qkv", x, 3 * config.dim), mask)
        context = self.linear("attention_out", context, config.dim)
        if config.family == "bert":
            context = self.drop(context, config.dropout)
        x = self.norm("attention_norm", x + context)
        y = gelu(self.linear("mlp_in", x, config.mlp_dim))
        y = self.drop(self.linear("mlp_out", y, config.dim), config.dropout)
        return self.norm("mlp_norm", x + y)

    def attend(self, qkv: jax.Array, mask: jax.Array) -> jax.Array:
        """Multi-head attention ``softmax(q k^T / sqrt(d)) v``: ``[R, T, 3H] -> [R, T, H]``."""
        rows, length, width = qkv.shape
        heads = self.encoder.config.num_heads
        size = width // 3 // heads
        q, k, v = (x.reshape(rows, length, heads, size) for x in jnp.split(qkv, 3, axis=-1))
        if self.encoder.attention == "cudnn":
            context = jax.nn.dot_product_attention(
                q, k, v, mask=mask[:, None], implementation="cudnn"
            )
        else:
            wide = jnp.promote_types(qkv.dtype, jnp.float32)
            scores = jnp.einsum("rqhd,rkhd->rhqk", q, k, preferred_element_type=wide) * size**-0.5
            # The largest negative number, not -inf: a row of padding must not become NaN.
            scores = jnp.where(mask[:, None], scores, jnp.finfo(wide).min)
            highest = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
            weights = jnp.exp(scores - highest)  # [R, heads, T, T]
            total = jnp.einsum("rhqk->rqh", weights)[..., None]
            weights = self.drop(weights, self.encoder.config.attention_dropout)
            context = jnp.einsum("rhqk,rkhd->rqhd", weights.astype(qkv.dtype), v)
            # Dividing [T, d] instead of [T, T] numbers a head halves the time on a CPU.
            context = (context / total).astype(qkv.dtype)
        context = context.reshape(rows, length, heads * size)
        return jnp.where(jnp.any(mask, axis=-1)[..., None], context, 0)  # nothing attended: zeros


class _Linear(nn.Module):
    inputs: int
    outputs: int
    spread: float

    @nn.compact
    def __call__(self) -> Params:
        normal = nn.initializers.normal(self.spread)
        kernel = self.param("kernel", normal, (self.inputs, self.outputs), jnp.float32)
        return {
            "kernel": kernel,
            "bias": self.param("bias", nn.initializers.zeros, (self.outputs,), jnp.float32),
        }


class _Norm(nn.Module):
    dim: int

    @nn.compact
    def __call__(self) -> tuple[jax.Array, jax.Array]:
        scale = self.param("scale", nn.initializers.ones, (self.dim,), jnp.float32)
        return scale, self.param("bias", nn.initializers.zeros, (self.dim,), jnp.float32)


def _require_one_of(name: str, value: str, allowed: Any) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; expected one of {sorted(allowed)}")
