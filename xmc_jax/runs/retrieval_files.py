"""What a run keeps for retrieval, in ``retrieval/`` of its work directory, for one checkpoint.

info.json                     what it belongs to, the setting, checksums of the files
points/vectors.npy            [n, w] float16: keys of training points
points/labels.*.npy           their labels, [n, L] as CSR
points/texts                  their texts, one a line, for explanations
labels/vectors.npy            [L, w] float16: keys of label texts, embedded as queries
labels/labels.*.npy           their Gandalf targets, [L, L] as CSR
lexical/*.npy                 TF-IDF index of the label texts (`xmc_jax.data.search.lexical`)
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import logging
from scipy.sparse import csr_matrix

from xmc_jax import files
from xmc_jax.contracts import Examples, Ranker, Tokens
from xmc_jax.data import texts as text_files
from xmc_jax.data.dataset import filter_matrix
from xmc_jax.data.graph import label_graph
from xmc_jax.data.graph.gandalf import gandalf_targets
from xmc_jax.data.search.keys import Keys
from xmc_jax.data.search.lexical import TextIndex
from xmc_jax.metrics.propensity import inverse_propensity
from xmc_jax.training import checkpoints, refresh, retrieval_choice, training_data
from xmc_jax.training.options import RetrievalOptions, TrainingOptions
from xmc_jax.training.retrieval import RetrievalRanker, Setting, texts_of

FOLDER = "retrieval"
PARTS, LEXICAL = ("points", "labels"), "lexical"
FORMAT = 1
LEAST = 0.1  # weight of the points where there are remembered ones and retrieval was not chosen
DELTA, TARGETS = 0.1, 100  # of the label graph: threshold, and most targets of a label
_BLOCK = 1 << 16  # texts embedded at once
_ADVICE = "Free some space there, then run the same command again."


class Owner(NamedTuple):
    """The run that keys are kept for.

    Attributes:
      workdir: its work directory.
      step: its checkpoint.
      digest: of its data.
      num_labels: that it was trained with.
      options: its options.
    """

    workdir: Path
    step: int
    digest: str
    num_labels: int
    options: TrainingOptions


class Remembered(NamedTuple):
    """Points that came after training, and the labels that came with them.

    Attributes:
      tokens: of the points, as queries.
      labels: ``[n, L + M]``, every stored value 1.
      new_labels: texts of the M new labels, as queries.
    """

    tokens: Tokens
    labels: csr_matrix
    new_labels: Tokens

    def examples(self, num_known: int) -> Examples:
        """What the new labels are learned from."""
        return Examples(self.tokens, self.labels[:, num_known:])


def ranker(
    owner: Owner, base: Ranker, *, kind: str = "exact", remembered: Remembered | None = None
) -> Ranker:
    """The run's ranker with retrieval, where it is kept and was chosen; else ``base``.

    Args:
      owner: the run.
      base: its own ranker, of the labels that it was trained with and those that are remembered.
      kind: of the keys' indexes: exact, hnsw, ivf or auto.
      remembered: further points. They are keys even where retrieval was not chosen, with the least
        weight that is chosen from.
    """
    if not owner.options.retrieval.enabled:
        return base
    folder = owner.workdir / FOLDER
    try:
        info = _read_info(owner, base)
    except (OSError, ValueError, KeyError, TypeError) as error:
        logging.warning(
            "%s: %s; labels are ranked without retrieval. Call xmc_jax.train as for this run "
            "once more: it makes it again.",
            folder,
            error,
        )
        return base
    setting = Setting(**info["setting"])
    if remembered is not None and not setting.points:
        setting = dataclasses.replace(setting, points=LEAST)
    if not setting.weights:
        return base
    parts = {
        name: _read_keys(folder / name, owner, kind) for name in PARTS if name in setting.weights
    }
    texts = TextIndex.read(folder / LEXICAL) if setting.lexical else None
    if remembered is not None:
        for name, more in _more_keys(owner, base, remembered).items():
            if name in parts:
                parts[name] = parts[name].joined(more)
        if texts is not None and len(remembered.new_labels):
            texts = texts.joined(texts_of(remembered.new_labels, None))
    return RetrievalRanker(base, parts, setting, texts)


def _more_keys(owner: Owner, base: Ranker, remembered: Remembered) -> dict[str, Keys]:
    """Keys of what is remembered: its points, and the texts of its new labels."""
    head, tokens = base.heads[0], (remembered.tokens, remembered.new_labels)
    points, texts = (
        base.key_vectors(base.query_vectors(some, None, head), head).astype(np.float16)
        for some in tokens
    )
    new = np.arange(owner.num_labels, base.num_labels)
    own = csr_matrix((np.ones(len(new)), (np.arange(len(new)), new)), (len(new), base.num_labels))
    targets = label_graph.conditionals(remembered.labels, new)
    targets.data[targets.data <= DELTA] = 0
    targets = csr_matrix(targets + own, dtype=np.float32)
    targets.eliminate_zeros()
    return {"points": Keys(points, remembered.labels), "labels": Keys(texts, targets)}


def make(
    owner: Owner, base: Ranker, data: training_data.TrainingData, label_queries: Tokens
) -> Ranker:
    """Keep the keys of the run's checkpoint and choose how much they count, unless that was done.

    Args:
      owner: the run.
      base: its own ranker.
      data: that it was trained on.
      label_queries: label texts in the form of queries.

    Returns:
      As `ranker`.

    Raises:
      OSError: the disk is full or read-only; nothing half-written is left.
    """
    options, folder = owner.options.retrieval, owner.workdir / FOLDER
    if not options.enabled:
        return base
    try:
        _read_info(owner, base)
        return ranker(owner, base)
    except (OSError, ValueError, KeyError, TypeError):
        started = time.perf_counter()
    with files.naming(folder, _ADVICE), files.replacing_folder(folder) as temporary:
        setting, facts = _fixed(options), {}
        if setting is None and data.held_out is None:
            logging.info(
                "retrieval: no held-out rows to choose its weights on, so there is none; "
                "config.retrieval.points, .labels and .lexical set them"
            )
            setting = Setting()
        _write_keys(temporary, base, data, label_queries)
        if setting is None or setting.lexical:
            _index_texts(data).write(temporary / LEXICAL)
        if setting is None and data.held_out is not None:
            parts = {name: _read_keys(temporary / name, owner) for name in PARTS}
            labels, entry = data.dataset.train.labels, data.entry
            choice = retrieval_choice.choose(
                base,
                parts,
                data.held_out,
                inverse_propensity(labels, a=entry.a, b=entry.b),
                texts=TextIndex.read(temporary / LEXICAL),
                choose_by=options.choose_by,
            )
            setting, facts = choice.setting, _say(choice, options.choose_by, data)
        assert setting is not None
        for name in ("labels", LEXICAL):  # points are kept: more of them may be remembered
            if name not in setting.weights:
                files.remove(temporary / name)
        info = {
            **_identity(owner, base),
            "setting": dataclasses.asdict(setting),
            "chosen": facts,
            "files": files.checksums(temporary),
        }
        files.write_record(temporary / "info.json", info)
    logging.info("retrieval: %s (%.1f s)", setting, time.perf_counter() - started)
    return ranker(owner, base)


def _fixed(options: RetrievalOptions) -> Setting | None:
    """The setting of a configuration, unless it is left open."""
    weights = options.points, options.labels, options.lexical
    if all(weight is None for weight in weights):
        return None
    return Setting(options.neighbours, options.temperature, *(weight or 0.0 for weight in weights))


def _say(
    choice: retrieval_choice.Choice, metric: str, data: training_data.TrainingData
) -> dict[str, Any]:
    assert data.held_out is not None
    logging.info(
        "retrieval: chosen on %d held-out rows, %s %.2f, without retrieval %.2f",
        len(data.held_out.rows),
        metric,
        choice.chosen[metric],
        choice.without[metric],
    )
    return {
        "rows": len(data.held_out.rows),
        "without": choice.without,
        "chosen": choice.chosen,
        "best": {metric: choice.best},
    }


def _identity(owner: Owner, base: Ranker) -> dict[str, Any]:
    """What the keys were made with."""
    checkpoint = files.content_crc32(checkpoints.info(owner.workdir, owner.step))
    return {
        "format": FORMAT,
        "step": owner.step,
        "checkpoint": checkpoint,
        "head": base.heads[0],
        "data": owner.digest,
    }


def _read_info(owner: Owner, base: Ranker) -> dict[str, Any]:
    """``info.json`` of keys that belong to this checkpoint and are whole.

    Raises:
      OSError, ValueError, KeyError, TypeError: there are none, or they are others', or damaged.
    """
    folder = owner.workdir / FOLDER
    if not folder.is_dir():
        raise ValueError("there is no such folder")
    info = files.read_record(folder / "info.json")
    for name, value in _identity(owner, base).items():
        if info[name] != value:
            raise ValueError(f"it is of {name} {info[name]}, this is {value}")
    if problem := files.damage(folder, info["files"]):
        raise ValueError(problem)
    return info


def _write_keys(
    folder: Path, base: Ranker, data: training_data.TrainingData, label_queries: Tokens
) -> None:
    """Embed the training points and the label texts, and write what they stand for."""
    labels = training_labels(data)
    rows = np.flatnonzero(np.diff(labels.indptr) > 0)
    _write_part(folder / "points", base, data.train_tokens, rows, labels[rows])
    texts = data.dataset.train.texts
    text_files.write_lines(folder / "points" / "texts", (texts[row] for row in rows.tolist()))
    targets = gandalf_targets(labels, delta=DELTA, depth=TARGETS)
    _write_part(folder / "labels", base, label_queries, np.arange(len(label_queries)), targets)


def _index_texts(data: training_data.TrainingData) -> TextIndex:
    """The label texts; terms are counted in them and in the training points."""
    points = np.flatnonzero(np.diff(training_labels(data).indptr) > 0)
    texts = data.dataset.train.texts
    return TextIndex.of(data.dataset.label_texts, (texts[row] for row in points.tolist()))


def training_labels(data: training_data.TrainingData) -> csr_matrix:
    """Labels of the training points, without held-out rows, filter pairs and label texts."""
    labels, pairs = data.original_labels, data.dataset.train.filter_pairs
    if len(pairs):
        barred = labels.multiply(filter_matrix(pairs, labels.shape))
        labels = csr_matrix(labels - barred) if barred.nnz else labels
    return labels


def _write_part(
    folder: Path, base: Ranker, tokens: Tokens, rows: np.ndarray, labels: csr_matrix
) -> None:
    folder.mkdir()
    head = base.heads[0]
    some = (rows[start : start + _BLOCK] for start in range(0, len(rows), _BLOCK))
    blocks = (base.key_vectors(base.query_vectors(tokens, block, head), head) for block in some)
    first = next(blocks, None)
    if first is not None:
        shape = len(rows), first.shape[1]
        refresh.write_blocks(folder / "vectors.npy", itertools.chain([first], blocks), shape, "<f2")
    for name in ("data", "indices", "indptr"):
        np.save(folder / f"labels.{name}.npy", getattr(labels, name))


def _read_keys(folder: Path, owner: Owner, kind: str = "exact") -> Keys:
    """The keys of a part, memory-mapped."""
    read = lambda name: np.load(folder / f"{name}.npy", mmap_mode="r")
    vectors = read("vectors")
    shape = len(vectors), owner.num_labels
    labels = csr_matrix(tuple(read(f"labels.{name}") for name in ("data", "indices", "indptr")))
    labels = csr_matrix((labels.data, labels.indices, labels.indptr), shape)
    return Keys(vectors, labels, kind=kind, seed=owner.options.seed)


def point_texts(workdir: Path) -> text_files.LineTexts:
    """Texts of the training points that are keys, by row."""
    return text_files.LineTexts(workdir / FOLDER / "points" / "texts")
