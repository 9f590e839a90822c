"""A small BERT with random weights as a Hugging Face folder, made without this package's code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file


def write(folder: Path, *, dim: int = 32, layers: int = 3, seed: int = 0) -> Path:
    """Write config.json, model.safetensors and tokenizer.json; the same bytes for the same seed.

    Word pieces are characters and pairs of letters, so that no text of English is unknown.

    Args:
      folder: made if it is not there.
      dim: of the hidden states; two heads share it.
      layers: how many.
      seed: of the weights.

    Returns:
      The folder.
    """
    folder.mkdir(exist_ok=True)
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    pieces = [*letters, *(a + b for a in letters for b in letters)]
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    vocab = [*special, *"'(),-./:;&!?", *pieces, *(f"##{piece}" for piece in pieces)]
    ids = {piece: number for number, piece in enumerate(vocab)}
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab=ids, unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens(list(special))
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(token, ids[token]) for token in special[2:4]]
    )
    made.save(str(folder / "tokenizer.json"))
    config = {
        "model_type": "bert",
        "vocab_size": len(vocab),
        "hidden_size": dim,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "intermediate_size": 2 * dim,
        "max_position_embeddings": 64,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "layer_norm_eps": 1e-12,
        "initializer_range": 0.02,
        "pad_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(seed)
    tensors = {
        name: (rng.normal(0, 0.2, shape) + name.endswith("LayerNorm.weight")).astype(np.float32)
        for name, shape in _tensor_shapes(config).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a BERT, in a fixed order."""
    dim, inner = config["hidden_size"], config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], dim),
        "embeddings.position_embeddings.weight": (config["max_position_embeddings"], dim),
        "embeddings.token_type_embeddings.weight": (config["type_vocab_size"], dim),
    }
    modules: dict[str, tuple[int, ...]] = {"embeddings.LayerNorm": (dim,)}
    for i in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{i}"
        modules |= {f"{layer}.attention.self.{x}": (dim, dim) for x in ("query", "key", "value")}
        modules |= {
            f"{layer}.attention.output.dense": (dim, dim),
            f"{layer}.attention.output.LayerNorm": (dim,),
            f"{layer}.intermediate.dense": (inner, dim),
            f"{layer}.output.dense": (dim, inner),
            f"{layer}.output.LayerNorm": (dim,),
        }
    for name, shape in modules.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return shapes
