"""Prediction in three lines of Python.

>>> from xmc_jax import predictor
>>> model = predictor.load("runs/unidec-wordnet-mini")  # doctest: +SKIP
>>> model.predict(["edible fruit of a palm"], k=3)  # doctest: +SKIP
[[("date: sweet edible fruit of the date palm", 1.41), ...]]
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from xmc_jax import evaluation, runs
from xmc_jax.data import corpus
from xmc_jax.data import index as indexes
from xmc_jax.data.texts import LineTexts

BLOCK_TEXTS = 8192  # of a file, in memory at once


def load(
    workdir: str | Path,
    *,
    new_labels: str | Path | Sequence[str] | None = None,
    kind: str = "exact",
    step: int | None = None,
) -> Predictor:
    """Open a run for prediction.

    Args:
      workdir: work directory of a run; nothing else is needed.
      new_labels: label texts (or a file of them, one a line) to be added. They have no classifier
        row, so a run that has new labels ranks all labels with the DE head.
      kind: index: exact, hnsw or ivf.
      step: a checkpoint; default the one chosen on held-out rows.

    Raises:
      WorkdirError, CheckpointError: not a work directory, no sound checkpoint.
    """
    return Predictor(runs.open_run(Path(workdir), step=step), new_labels=new_labels, kind=kind)


class Predictor:
    """A trained run and an index of its labels."""

    def __init__(
        self,
        opened: runs.OpenRun,
        *,
        new_labels: str | Path | Sequence[str] | None = None,
        kind: str = "exact",
    ) -> None:
        """Embed the labels; an index is built for a head when it is first used."""
        self._run, self._kind = opened, kind
        known = opened.label_texts()
        added: list[str] = []
        if new_labels is not None:
            is_file = isinstance(new_labels, (str, Path))
            added = list(LineTexts(new_labels)) if is_file else list(new_labels)
        self.num_known = len(known)
        self.label_texts: Sequence[str] = [*known, *added] if added else known
        self._labels = evaluation.label_vectors(
            opened.embedder,
            opened.params,
            None if added else opened.table,
            self._tokens(self.label_texts),
        )
        self._indexes: dict[str, indexes.Index] = {}

    @property
    def heads(self) -> tuple[str, ...]:
        """Heads that can be asked, the default first."""
        return self._labels.heads

    def encode(self, texts: Sequence[str], *, head: str | None = None) -> np.ndarray:
        """Vectors of texts, ``[n, d]`` (``[n, 2 d]`` for concat); dot products are scores."""
        return evaluation.query_vectors(
            self._run.embedder, self._run.params, self._tokens(texts), None, self._head(head)
        )

    def predict_ids(
        self,
        texts: Sequence[str],
        *,
        k: int = 10,
        head: str | None = None,
        exclude_same_text: bool = False,
        vectors: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Label ids ``[n, k]`` (-1 = none) and scores of texts, best first.

        Scores are in [-1, 1], of concat in [-2, 2].
        """
        head = self._head(head)
        if head not in self._indexes:
            self._indexes[head] = indexes.Index.build(
                self._labels.of(head), self._kind, seed=self._run.config.seed
            )
        if vectors is None:
            vectors = self.encode(texts, head=head)
        # A data set may hold one text under several ids: all of them are left out.
        extra = self._most_repeated() if exclude_same_text else 0
        scores, ids = self._indexes[head].search(vectors, min(k + extra, len(self.label_texts)))
        if exclude_same_text:
            same = self._same_text(texts, ids)
            order = np.argsort(same, axis=1, kind="stable")
            ids = np.take_along_axis(np.where(same, -1, ids), order, 1)
            scores = np.take_along_axis(np.where(same, -np.inf, scores), order, 1)
        return ids[:, :k], scores[:, :k]

    def predict(
        self,
        texts: Sequence[str],
        *,
        k: int = 10,
        head: str | None = None,
        min_score: float | None = None,
        exclude_same_text: bool = False,
    ) -> list[list[tuple[str, float]]]:
        """Label texts and scores of texts, best first.

        Args:
          texts: any texts.
          k: labels a text, at most.
          head: ``de``, ``clf`` or ``concat``; default the best there is.
          min_score: labels that score less are left out.
          exclude_same_text: leave out labels with the text's own words.
        """
        ids, scores = self.predict_ids(texts, k=k, head=head, exclude_same_text=exclude_same_text)
        floor = -np.inf if min_score is None else min_score
        return [
            [
                (self.label_texts[i], float(score))
                for i, score in zip(row_ids, row_scores)
                if i >= 0 and score >= floor
            ]
            for row_ids, row_scores in zip(ids.tolist(), scores.tolist())
        ]

    def _head(self, head: str | None) -> str:
        head = head or self.heads[0]
        if head not in self.heads:
            reason = (
                "new labels have no classifier row"
                if self._run.table is not None
                else ("the run has no classifier")
            )
            raise ValueError(f"head {head!r}: expected one of {self.heads}; {reason}.")
        return head

    def _tokens(self, texts: Sequence[str]) -> corpus.TokenStore:
        config = self._run.config
        return corpus.encode(
            texts,
            self._run.tokenizer,
            max_length=config.max_length,
            special_tokens=config.encoder.name != "bag",
        )

    def _most_repeated(self) -> int:
        if not hasattr(self, "_repeated"):
            self._ids_by_text: dict[str, list[int]] = {}
            for i, text in enumerate(self.label_texts):
                self._ids_by_text.setdefault(_normal(text), []).append(i)
            self._repeated = max(len(ids) for ids in self._ids_by_text.values())
        return self._repeated

    def _same_text(self, texts: Sequence[str], ids: np.ndarray) -> np.ndarray:
        same = np.zeros(ids.shape, bool)
        for row, text in enumerate(texts):
            own = self._ids_by_text.get(_normal(text))
            if own:
                same[row] = np.isin(ids[row], own)
        return same


def predict_file(
    model: Predictor,
    source: str,
    target: str,
    *,
    k: int = 10,
    head: str | None = None,
    min_score: float | None = None,
    exclude_same_text: bool = False,
    embeddings: str | None = None,
) -> None:
    """Predict for a file of texts, block by block.

    Each output line is ``{"text", "labels": [{"id", "text", "score"}]}``.

    Args:
      model: from `load`.
      source: file of texts, one a line, or ``-``.
      target: JSON Lines file, or ``-``; written under a temporary name, then renamed.
      k, head, min_score, exclude_same_text: as `Predictor.predict`.
      embeddings: ``.npy`` file for the texts' vectors.
    """
    floor = -np.inf if min_score is None else min_score
    kept: list[np.ndarray] = []
    temporary = target if target == "-" else f"{target}.tmp"
    out = sys.stdout if target == "-" else open(temporary, "w", encoding="utf-8")
    try:
        for texts in _blocks(source):
            vectors = model.encode(texts, head=head)
            if embeddings:
                kept.append(vectors)
            ids, scores = model.predict_ids(
                texts, k=k, head=head, exclude_same_text=exclude_same_text, vectors=vectors
            )
            for text, row_ids, row_scores in zip(texts, ids.tolist(), scores.tolist()):
                labels = [
                    {"id": i, "text": model.label_texts[i], "score": round(score, 6)}
                    for i, score in zip(row_ids, row_scores)
                    if i >= 0 and score >= floor
                ]
                out.write(json.dumps({"text": text, "labels": labels}, ensure_ascii=False) + "\n")
    except BaseException:
        if target != "-":
            out.close()
            os.unlink(temporary)
        raise
    if target != "-":
        out.close()
        os.replace(temporary, target)
    if embeddings:
        np.save(embeddings, np.concatenate(kept) if kept else np.zeros((0, 0), np.float32))


def _blocks(source: str) -> Iterator[list[str]]:
    """Texts of a file or of standard input, a block at a time."""
    stream: Any = sys.stdin if source == "-" else open(source, encoding="utf-8")
    with stream:
        block: list[str] = []
        for line in stream:
            block.append(line.rstrip("\r\n"))
            if len(block) == BLOCK_TEXTS:
                yield block
                block = []
        if block:
            yield block


def _normal(text: str) -> str:
    return text.strip().casefold()
