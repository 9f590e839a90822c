"""Prediction in three lines of Python.

>>> from xmc_jax import predictor
>>> model = predictor.load("runs/unidec-wordnet-mini")  # doctest: +SKIP
>>> model.predict(["edible fruit of a palm"], k=3)  # doctest: +SKIP
[[("date: sweet edible fruit of the date palm", 1.41), ...]]
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from xmc_jax.contracts import Side, Tokens
from xmc_jax.data.readers import own_rows
from xmc_jax.data.readers.decoding import STANDARD_INPUT, Decoder
from xmc_jax.data.readers.reading import AS_FOUND, Reading
from xmc_jax.data.tokens import token_stores
from xmc_jax.files import replacing
from xmc_jax.runs import open_runs
from xmc_jax.training.training_data import with_prefix

BLOCK_TEXTS = 8192  # of a file, in memory at once


def load(
    workdir: str | Path,
    *,
    new_labels: str | Path | Sequence[str] | None = None,
    kind: str = "exact",
    step: int | None = None,
    tail_weight: float | None = None,
) -> Predictor:
    """Open a run for prediction.

    Args:
      workdir: work directory of a run; nothing else is needed.
      new_labels: label texts (or a file of them, one a line) to be added, blank ones left out. They
        have no classifier row, so a run that has new labels ranks all labels with the DE head.
      kind: index: exact, hnsw or ivf.
      step: a checkpoint; default the one chosen on held-out rows.
      tail_weight: t: labels are ranked by score + t ln w_l, w_l the inverse propensity, so that
        above 0 the rarer ones come earlier (new labels are the rarest); default the
        configuration's. Labels are then searched exactly.

    Raises:
      WorkdirError, CheckpointError: not a work directory, no sound checkpoint.
    """
    opened = open_runs.open_run(Path(workdir), step=step, tail_weight=tail_weight)
    return Predictor(opened, new_labels=new_labels, kind=kind)


class Predictor:
    """A trained run and an index of its labels."""

    def __init__(
        self,
        opened: open_runs.OpenRun,
        *,
        new_labels: str | Path | Sequence[str] | None = None,
        kind: str = "exact",
    ) -> None:
        """Embed the labels; an index is built for a head when it is first used."""
        self._run = opened
        known = opened.label_texts()
        added: list[str] = []
        if new_labels is not None:
            if isinstance(new_labels, (str, Path)):
                new_labels = list(read_texts(new_labels))
            added = [text for text in new_labels if text.strip()]
        self.num_known = len(known)
        self.label_texts: Sequence[str] = [*known, *added] if added else known
        tokens = self._tokens(self.label_texts, "label", keep=not added)
        self._ranker = opened.ranker(tokens, kind=kind, keep_indexes=True)

    @property
    def reading(self) -> Reading:
        """How the files were read that the run learnt from."""
        return self._run.reading

    @property
    def heads(self) -> tuple[str, ...]:
        """Heads that can be asked, the default first."""
        return self._ranker.heads

    def label_vectors(self, *, head: str | None = None) -> np.ndarray:
        """Vectors of the labels, ``[L, w]``, in the order of ids."""
        return self._ranker.label_vectors(self._head(head))

    def encode(self, texts: Sequence[str], *, head: str | None = None) -> np.ndarray:
        """Vectors of texts, ``[n, v]`` (of UniDEC ``v`` is d, and 2 d for concat).

        Scores are their dot products with `label_vectors`, and the tail weight's part; of a frugal
        classifier the vectors are features for labels and for clusters, side by side.
        """
        return self._ranker.query_vectors(self._tokens(texts, "query"), None, self._head(head))

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

        Scores are in [-1, 1], of concat in [-2, 2]; of a frugal classifier they are probabilities.
        A tail weight adds its part (a factor, of probabilities). A blank text has no labels.
        """
        head = self._head(head)
        if vectors is None:
            vectors = self.encode(texts, head=head)
        # A data set may hold one text under several ids: all of them are left out.
        extra = self._most_repeated() if exclude_same_text else 0
        scores, ids = self._ranker.search(vectors, head, k + extra)
        if exclude_same_text:
            same = self._same_text(texts, ids)
            order = np.argsort(same, axis=1, kind="stable")
            ids = np.take_along_axis(np.where(same, -1, ids), order, 1)
            scores = np.take_along_axis(np.where(same, -np.inf, scores), order, 1)
        blank = np.array([not text.strip() for text in texts], bool)[:, None]
        return np.where(blank, -1, ids[:, :k]), np.where(blank, -np.inf, scores[:, :k])

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
          head: one of ``heads``; default the first.
          min_score: labels that score less are left out.
          exclude_same_text: leave out labels with the text's own words.
        """
        ids, scores = self.predict_ids(texts, k=k, head=head, exclude_same_text=exclude_same_text)
        return [
            [(label["text"], label["score"]) for label in row]
            for row in _rows(self, ids, scores, min_score)
        ]

    def _head(self, head: str | None) -> str:
        head = head or self.heads[0]
        if head not in self.heads:
            reason = self._ranker.why_not(head)
            raise ValueError(f"head {head!r}: expected one of {self.heads}; {reason}.")
        return head

    def _tokens(self, texts: Sequence[str], side: Side, *, keep: bool = False) -> Tokens:
        """Of texts; ``keep`` what it costs to read them, for the next time."""
        if isinstance(texts, str):  # its letters would be taken for texts
            raise ValueError(f"found one string, {texts[:40]!r}; expected a list of texts: [text].")
        form, read = self._run.options.text_form, self._run.system.read
        tokens = token_stores.encode(
            with_prefix(form, texts, side),
            self._run.tokenizer,
            max_length=form.max_length,
            special_tokens=form.special_tokens,
        )
        try:
            return read(tokens, keep=keep)
        except OSError as error:
            if not keep:
                raise
            logging.warning("%s What the frozen layers put out for labels is not kept.", error)
            return read(tokens, keep=False)

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


def check_files(source: str, *targets: str) -> None:
    """Try what can be tried before labels are embedded, which may take minutes.

    Raises:
      OSError: the source cannot be read, or the folder of a target is not there.
    """
    if source != "-":
        open(source, "rb").close()
    for target in targets:
        if target not in ("", "-") and not Path(target).absolute().parent.is_dir():
            raise OSError(f"{target} cannot be written: there is no such folder.")


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
    text_column: str = "",
    encoding: str = "",
) -> None:
    """Predict for a file of texts, block by block.

    Each output line is ``{"text", "labels": [{"id", "text", "score"}]}``.

    Args:
      model: from `load`.
      source: file of texts, one a line, or ``-``; or one as `xmc_jax.prepare` takes (TSV, CSV, JSON
        Lines), whose labels are not read.
      target: JSON Lines file, or ``-``; written under a temporary name, then renamed.
      k, head, min_score, exclude_same_text: as `Predictor.predict`.
      embeddings: ``.npy`` file for the texts' vectors.
      text_column: where such a file has the texts; default as in training, or a usual name.
      encoding: of the file; default UTF-8, and for other lines that of training.

    Raises:
      DataError: a file of rows is broken, or its column of texts is not known.
      OSError: a file cannot be read or written; nothing half-written is left.
    """
    with contextlib.ExitStack() as stack:
        lines = read_texts(source, text_column=text_column, encoding=encoding, kept=model.reading)
        out = sys.stdout if target == "-" else stack.enter_context(replacing(target))
        kept = stack.enter_context(replacing(embeddings, binary=True)) if embeddings else None
        rows = 0
        if kept:
            width = model.encode([], head=head).shape[1]
            _write_header(kept, (0, width))
        for texts in _blocks(lines):
            vectors = model.encode(texts, head=head)
            if kept:
                kept.write(np.ascontiguousarray(vectors, "<f4"))
                rows += len(texts)
            ids, scores = model.predict_ids(
                texts, k=k, head=head, exclude_same_text=exclude_same_text, vectors=vectors
            )
            for text, labels in zip(texts, _rows(model, ids, scores, min_score)):
                labels = [{**label, "score": round(label["score"], 6)} for label in labels]
                out.write(json.dumps({"text": text, "labels": labels}, ensure_ascii=False) + "\n")
        if kept:
            kept.seek(0)
            _write_header(kept, (rows, width))  # NumPy leaves room for a longer first axis


def _rows(
    model: Predictor, ids: np.ndarray, scores: np.ndarray, min_score: float | None
) -> Iterator[list[dict[str, Any]]]:
    floor = -np.inf if min_score is None else min_score
    for row_ids, row_scores in zip(ids.tolist(), scores.tolist()):
        yield [
            {"id": i, "text": model.label_texts[i], "score": score}
            for i, score in zip(row_ids, row_scores)
            if i >= 0 and score >= floor
        ]


def _write_header(file: Any, shape: tuple[int, int]) -> None:
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)


def read_texts(
    source: str | Path,
    *,
    text_column: str = "",
    encoding: str = "",
    kept: Reading = AS_FOUND,
) -> Iterator[str]:
    """Yields the texts of a file (`predict_file`) or, as ``-``, of standard input."""
    path, given = Path(source), Reading(text_column=text_column, encoding=encoding)
    decoder = Decoder(path, encoding, otherwise="" if given.encoding else kept.encoding)
    if own_rows.holds_rows(path):
        column = given.text_column or kept.text_column
        yield from own_rows.row_texts(decoder, column, kept=not text_column)
    elif text_column:
        raise ValueError(
            f"{source}: found one text a line, and --text_column={text_column}; expected a file "
            "that ends in .tsv, .csv, .json or .jsonl (or such a file with .gz)."
        )
    else:
        yield from _whole_lines(decoder)
    for note in decoder.check():
        logging.warning("%s", note)


def _whole_lines(decoder: Decoder) -> Iterator[str]:
    for number, text in enumerate(decoder.lines()):
        if number == 0 and ("\t" in text or text.startswith("{")):
            logging.warning(
                "%s: each line is taken for one text as a whole; call the file .tsv or .jsonl if "
                "it has columns or keys",
                "standard input" if decoder.path == STANDARD_INPUT else decoder.path,
            )
        yield text


def _blocks(texts: Iterable[str]) -> Iterator[list[str]]:
    """Texts, a block at a time."""
    texts = iter(texts)
    while block := list(itertools.islice(texts, BLOCK_TEXTS)):
        yield block


def _normal(text: str) -> str:
    return text.strip().casefold()
