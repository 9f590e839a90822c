"""Hugging Face folders <-> encoders: an explicit table of tensor names, nothing guessed."""

from __future__ import annotations

import json
import os
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax import traverse_util
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from xmc_jax import files
from xmc_jax.models.encoders.transformer import TransformerConfig, TransformerEncoder

Params = dict[str, Any]

WEIGHTS = "model.safetensors"
FILES = (
    "config.json",
    WEIGHTS,
    "1_Pooling/config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.txt",
)
_CONNECT_SECONDS = 3

# Our path of parameters -> name of the Hugging Face tensors. A module's ".weight" and ".bias" are
# our "kernel" (transposed) or "scale", and "bias"; three modules lie side by side in one kernel.
_EMBEDDINGS = {
    "word": "embeddings.word_embeddings.weight",
    "position": "embeddings.position_embeddings.weight",
    "token_type": "embeddings.token_type_embeddings.weight",
}
_EMBEDDINGS_NORM = "embeddings.LayerNorm"
_LAYERS = {
    "bert": {
        "qkv": tuple(f"encoder.layer.{{}}.attention.self.{x}" for x in ("query", "key", "value")),
        "attention_out": ("encoder.layer.{}.attention.output.dense",),
        "attention_norm": ("encoder.layer.{}.attention.output.LayerNorm",),
        "mlp_in": ("encoder.layer.{}.intermediate.dense",),
        "mlp_out": ("encoder.layer.{}.output.dense",),
        "mlp_norm": ("encoder.layer.{}.output.LayerNorm",),
    },
    "distilbert": {
        "qkv": tuple(f"transformer.layer.{{}}.attention.{x}_lin" for x in "qkv"),
        "attention_out": ("transformer.layer.{}.attention.out_lin",),
        "attention_norm": ("transformer.layer.{}.sa_layer_norm",),
        "mlp_in": ("transformer.layer.{}.ffn.lin1",),
        "mlp_out": ("transformer.layer.{}.ffn.lin2",),
        "mlp_norm": ("transformer.layer.{}.output_layer_norm",),
    },
}
# Heads of pretraining tasks and buffers that an encoder of texts has no use for.
_UNUSED = re.compile(
    r"pooler\.|cls\.(predictions|seq_relationship)\.|vocab_(transform|layer_norm|projector)\."
    r"|embeddings\.position_ids$"
)


def load_encoder(
    folder_or_hub_name: str | Path,
    *,
    pooling: str | None = None,
    compute_dtype: str = "float32",
    remat: bool = False,
    max_segments: int = 32,
    attention: str = "xla",
) -> tuple[TransformerEncoder, Params]:
    """Loads a BERT or DistilBERT encoder from ``config.json`` and ``model.safetensors``.

    Args:
      folder_or_hub_name: a local folder, else a name on the Hugging Face hub.
      pooling: "mean" or "cls"; None = as the folder's ``1_Pooling/config.json`` says, else "mean".
      compute_dtype, remat, max_segments, attention: see :class:`TransformerEncoder`.

    Returns:
      The encoder and its parameters, float32.

    Raises:
      ValueError: no such folder; no network and the name is not in the local cache; not a BERT or
        DistilBERT model; no safetensors file; tensors missing, left over or of another shape.
    """
    folder = resolve_folder(folder_or_hub_name)
    config = TransformerConfig.from_huggingface(_read_json(folder / "config.json"))
    encoder = TransformerEncoder(
        config=config,
        pooling=pooling or _folder_pooling(folder) or "mean",
        compute_dtype=compute_dtype,
        remat=remat,
        max_segments=max_segments,
        attention=attention,
    )
    return encoder, _from_tensors(config, _Tensors(folder))


def save_encoder(folder: str | Path, encoder: TransformerEncoder, params: Params) -> None:
    """Writes a Hugging Face folder that :func:`load_encoder` and transformers read back exactly.

    Args:
      folder: made if need be; files of the same names are replaced.
      encoder: its shape and pooling are written.
      params: its parameters; written as float32.

    Raises:
      OSError: the disk is full or read-only; no half-written file is left.
    """
    folder = Path(folder)
    (folder / "1_Pooling").mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, path, part in _name_table(encoder.config):
        value = np.asarray(_at(params, path), np.float32)
        if part is not None:
            value = np.split(value, part[1], axis=-1)[part[0]]
        tensors[name] = np.ascontiguousarray(value.T if path[-1] == "kernel" else value)
    with files.replacing_path(folder / WEIGHTS) as temporary:
        try:
            save_file(tensors, temporary, metadata={"format": "pt"})
        except SafetensorError as error:  # a full disk is one
            raise OSError(f"{folder / WEIGHTS} cannot be written: {error}") from error
    _write_json(folder / "config.json", encoder.config.to_huggingface())
    _write_json(folder / "modules.json", _SENTENCE_TRANSFORMERS_MODULES)
    modes = {f"pooling_mode_{k}": encoder.pooling == v for k, v in _POOLING_MODES.items()}
    pooling = {"word_embedding_dimension": encoder.dim} | modes
    _write_json(folder / "1_Pooling" / "config.json", pooling)


def num_layers(folder_or_hub_name: str | Path) -> int:
    """Layers of a BERT or DistilBERT folder, by its ``config.json`` alone.

    Raises:
      ValueError: as in :func:`load_encoder`.
    """
    config = _read_json(resolve_folder(folder_or_hub_name) / "config.json")
    return TransformerConfig.from_huggingface(config).num_layers


def word_embeddings(folder_or_hub_name: str | Path) -> np.ndarray:
    """The word embedding table ``[V, H]`` float32 of a BERT or DistilBERT folder.

    Raises:
      ValueError: as in :func:`load_encoder`, or the file has no such table.
    """
    folder = resolve_folder(folder_or_hub_name)
    wanted = _EMBEDDINGS["word"]
    tensors = _Tensors(folder)
    if wanted not in tensors.names:
        raise ValueError(f"{tensors.file}: no tensor {wanted!r}; expected a BERT or DistilBERT")
    return tensors.read(wanted)


def resolve_folder(folder_or_hub_name: str | Path) -> Path:
    """A local folder as it is; a hub name as the folder of its downloaded or cached files.

    Raises:
      ValueError: no such folder, no such model on the hub, or no network.
    """
    name = str(folder_or_hub_name)
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        return path
    is_hub_name = re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", name)
    if isinstance(folder_or_hub_name, Path) or not is_hub_name:
        raise ValueError(f"no such folder: {name}; expected one with config.json and {WEIGHTS}")
    import huggingface_hub  # slow to import, and needed for hub names alone
    from huggingface_hub import errors

    try:
        return Path(
            huggingface_hub.snapshot_download(
                name, allow_patterns=list(FILES), local_files_only=not _hub_is_near()
            )
        )
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ValueError(
            f"{name!r} is neither a folder here nor a model on the Hugging Face hub: check the name"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, OSError) as error:
        raise ValueError(
            f"no folder {name!r} here, and no network to fetch the model of that name, which is "
            "not in the local Hugging Face cache: connect once, or give the folder of a copy"
        ) from error


def _hub_is_near() -> bool:
    """False where a connection fails at once: the library itself would try for many seconds."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or urllib.request.getproxies():
        return True  # the library knows what to do
    hub = urllib.parse.urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((hub.hostname, hub.port or 443), _CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def _name_table(
    config: TransformerConfig,
) -> Iterator[tuple[str, tuple[str, ...], tuple[int, int] | None]]:
    """Yields (tensor name, our path, None or (part, parts) of a kernel that is split)."""
    for ours, theirs in _EMBEDDINGS.items():
        if ours != "token_type" or config.num_token_types:
            yield theirs, ("embeddings", ours), None
    yield f"{_EMBEDDINGS_NORM}.weight", ("embeddings", "norm", "scale"), None
    yield f"{_EMBEDDINGS_NORM}.bias", ("embeddings", "norm", "bias"), None
    for layer in range(config.num_layers):
        for ours, modules in _LAYERS[config.family].items():
            weight = "scale" if ours.endswith("norm") else "kernel"
            for i, module in enumerate(modules):
                part = (i, len(modules)) if len(modules) > 1 else None
                yield f"{module.format(layer)}.weight", (f"layer_{layer}", ours, weight), part
                yield f"{module.format(layer)}.bias", (f"layer_{layer}", ours, "bias"), part


def _from_tensors(config: TransformerConfig, tensors: _Tensors) -> Params:
    """Fills the parameter tree; every tensor must be used and every parameter found."""
    table = list(_name_table(config))
    names = {name for name, _, _ in table}
    skipped = sorted(n for n in tensors.names - names if _UNUSED.match(n))
    missing, left = sorted(names - tensors.names), sorted(tensors.names - names - {*skipped})
    if missing or left:
        raise ValueError(
            f"{tensors.file} does not fit a {config.family} of {config.num_layers} layers: missing "
            f"tensors {missing}; tensors left over {left}: check config.json against the file"
        )
    if skipped:
        logging.info("%s: skipped, not in the encoder: %s", tensors.file, ", ".join(skipped))
    parts: dict[tuple[str, ...], list[np.ndarray]] = {}
    for name, path, _ in table:
        value = tensors.read(name)
        parts.setdefault(path, []).append(value.T if path[-1] == "kernel" else value)
    flat = {path: np.concatenate(values, axis=-1) for path, values in parts.items()}
    expected = traverse_util.flatten_dict(
        jax.eval_shape(TransformerEncoder(config).init, jax.random.key(0))
    )
    for path, value in flat.items():
        if value.shape != expected[path].shape:
            raise ValueError(
                f"{tensors.file}: {[name for name, other, _ in table if other == path]} give "
                f"{'/'.join(path)} the shape {value.shape}; config.json says {expected[path].shape}"
            )
    return traverse_util.unflatten_dict({path: jnp.asarray(x) for path, x in flat.items()})


class _Tensors:
    """A safetensors file whose tensors go by the names of today's bare model."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / WEIGHTS
        if not self.file.is_file():
            _refuse_without_safetensors(folder)
        try:
            self._handle = safe_open(self.file, framework="numpy")
        except Exception as error:  # safetensors has one exception for all that a file can suffer
            raise ValueError(f"{self.file} is damaged ({error}); fetch it again") from error
        self._stored: dict[str, str] = {}
        for stored in self._handle.keys():
            other = self._stored.setdefault(_plain_name(stored), stored)
            if other != stored:
                raise ValueError(f"{self.file}: tensors {other!r} and {stored!r} are the same one")

    @property
    def names(self) -> set[str]:
        return set(self._stored)

    def read(self, name: str) -> np.ndarray:
        return np.asarray(self._handle.get_tensor(self._stored[name]), np.float32)


def _plain_name(name: str) -> str:
    name = re.sub(r"^(bert|distilbert)\.", "", name)
    name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
    return re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)


def _refuse_without_safetensors(folder: Path) -> None:
    if (folder / "pytorch_model.bin").is_file():
        raise ValueError(
            f"{folder} has pytorch_model.bin only, a pickle, which is never read; expected "
            f"{WEIGHTS}. Convert it once, where torch is installed, with transformers' "
            f"AutoModel.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        )
    raise ValueError(f"no {WEIGHTS} in {folder}; expected config.json and {WEIGHTS} side by side")


_POOLING_MODES = {"mean_tokens": "mean", "cls_token": "cls"}
_SENTENCE_TRANSFORMERS_MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]


def _folder_pooling(folder: Path) -> str | None:
    file = folder / "1_Pooling" / "config.json"
    if not file.is_file():
        return None
    settings = _read_json(file)
    modes = [k.removeprefix("pooling_mode_") for k, v in settings.items() if v is True]
    modes = [mode for mode in modes if mode != "include_prompt"]
    if len(modes) != 1 or modes[0] not in _POOLING_MODES:
        raise ValueError(
            f"{file} asks for pooling {modes}; expected one of {sorted(_POOLING_MODES)}: "
            "give pooling='mean' or pooling='cls'"
        )
    return _POOLING_MODES[modes[0]]


def _at(tree: Params, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ValueError(f"no {file.name} in {file.parent}; expected a Hugging Face model folder")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}); fetch it again") from error


def _write_json(file: Path, content: Any) -> None:
    with files.replacing(file) as out:
        out.write(json.dumps(content, indent=2) + "\n")
