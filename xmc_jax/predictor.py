"""Prediction in three lines of Python.

>>> from xmc_jax import predictor
>>> model = predictor.load("runs/unidec-wordnet-mini")  # doctest: +SKIP
>>> model.predict(["edible fruit of a palm"], k=3)  # doctest: +SKIP
[[("date: sweet edible fruit of the date palm", 1.41), ...]]
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from xmc_jax import files
from xmc_jax.contracts import Side, Tokens
from xmc_jax.data.readers import own_rows
from xmc_jax.data.readers.decoding import STANDARD_INPUT, Decoder
from xmc_jax.data.readers.raw_readers import TextPlace
from xmc_jax.data.readers.reading import AS_FOUND, Reading
from xmc_jax.data.texts import is_blank
from xmc_jax.data.tokens import token_stores
from xmc_jax.metrics.ranked_lists import cut_off
from xmc_jax.runs import open_runs, retrieval_files
from xmc_jax.runs import remembered as remembering
from xmc_jax.training.retrieval import RetrievalRanker
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
      new_labels: label texts (or a file of them, one a line) to be added; blank, known and repeated
        ones are left out. They have no classifier row, so a run that has new labels ranks all
        labels with the DE head.
      kind: index: exact, hnsw or ivf.
      step: a checkpoint; default the one chosen on held-out rows.
      tail_weight: t: labels are ranked by score + t ln w_l, w_l the inverse propensity, so that
        above 0 the rarer ones come earlier (new labels are the rarest); default the
        configuration's. Labels are then searched exactly.

    Raises:
      WorkdirError, CheckpointError: not a work directory, no sound checkpoint.
      ValueError: new_labels is a text, and no file.
    """
    if isinstance(new_labels, str) and not os.path.isfile(new_labels):
        raise ValueError(
            f"new_labels: found one string, {new_labels[:60]!r}, which is no file; expected a list "
            "of label texts, [text], or a file of them."
        )
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
        self._run, self._kind = opened, kind
        if isinstance(new_labels, (str, Path)):
            new_labels = list(read_texts(new_labels, kept=self.reading))
        self._new_labels = new_labels or []
        self._open()

    def _open(self) -> None:
        """Read what is remembered, and embed."""
        known = self._run.label_texts()
        self.num_known = len(known)
        added: list[str] = []
        points, remembered = remembering.read_all(self._run.folder), None
        if points.texts:
            labels, added = remembering.number_labels(points, known, len(known))
            remembered = retrieval_files.Remembered(
                self._tokens(points.texts, "query"), labels, self._tokens(added, "query")
            )
        by_text = _unknown(self._new_labels, [*known, *added] if added else known)
        added = [*added, *by_text]
        self.label_texts: Sequence[str] = [*known, *added] if added else known
        tokens = self._tokens(self.label_texts, "label", keep=not added)
        self._ranker = self._run.ranker(
            tokens, kind=self._kind, keep_indexes=True, remembered=remembered
        )
        self._points = points.texts

    def add(self, texts: Iterable[str], labels: Iterable[Sequence[str]]) -> int:
        """Remember labelled points, without training: they count at once, wherever it is opened.

        Texts become keys of retrieval. A label that the run does not know joins: its row in the
        classifier is the mean of its points' unit vectors.

        Args:
          texts: of the points.
          labels: label texts of each.

        Returns:
          The number by which `forget` takes them back.

        Raises:
          ValueError: blank texts, no labels, a system that takes no new labels, or a run without
            retrieval.
          OSError: the work directory cannot be written to.
        """
        points = remembering.Points(list(_listed(texts)), [list(names) for names in labels])
        number = remembering.add(self._run.folder, points)
        try:
            self._open()
        except BaseException:
            remembering.forget(self._run.folder, number)
            self._open()
            raise
        return number

    def forget(self, number: int) -> None:
        """Take back what `add` remembered.

        Raises:
          ValueError: nothing is remembered by this number.
        """
        remembering.forget(self._run.folder, number)
        self._open()

    @property
    def remembered(self) -> dict[int, int]:
        """What is remembered: number, and how many points."""
        folder = self._run.folder
        return {n: len(remembering.read(folder, n).texts) for n in remembering.numbers(folder)}

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

    def encode(self, texts: Iterable[str], *, head: str | None = None) -> np.ndarray:
        """Vectors of texts, ``[n, v]`` (of UniDEC ``v`` is d, and 2 d for concat).

        Scores are their dot products with `label_vectors`, and what retrieval and the tail weight
        add; of a frugal classifier the vectors are features for labels and for clusters, side by
        side.
        """
        tokens = self._tokens(_listed(texts), "query")
        head, ranker = self._head(head), self._ranker
        if isinstance(ranker, RetrievalRanker) and head == ranker.head:
            head = ranker.base.heads[0]  # the same vectors, without the terms
        return ranker.query_vectors(tokens, None, head)

    def predict_ids(
        self,
        texts: Iterable[str],
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
        texts, k, head = _listed(texts), cut_off(k), self._head(head)
        if vectors is None:
            vectors = self.encode(texts, head=head)
        elif np.ndim(vectors) != 2 or len(vectors) != len(texts):
            raise ValueError(
                f"vectors have shape {np.shape(vectors)}; expected ({len(texts)}, ...), a row for "
                "each text, as `encode` gives them."
            )
        # A data set may hold one text under several ids: all of them are left out.
        extra = self._most_repeated() if exclude_same_text else 0
        scores, ids = self._ranker.search(self._queries(texts, vectors, head), head, k + extra)
        if exclude_same_text:
            same = self._same_text(texts, ids)
            order = np.argsort(same, axis=1, kind="stable")
            ids = np.take_along_axis(np.where(same, -1, ids), order, 1)
            scores = np.take_along_axis(np.where(same, -np.inf, scores), order, 1)
        blank = np.array([is_blank(text) for text in texts], bool)[:, None]
        return np.where(blank, -1, ids[:, :k]), np.where(blank, -np.inf, scores[:, :k])

    def predict(
        self,
        texts: Iterable[str],
        *,
        k: int = 10,
        head: str | None = None,
        min_score: float | None = None,
        exclude_same_text: bool = False,
    ) -> list[list[tuple[str, float]]]:
        """Label texts and scores of texts, best first.

        Args:
          texts: any texts; a generator is read once.
          k: labels a text, at most; 1 or more.
          head: one of ``heads``; default the first.
          min_score: labels that score less are left out.
          exclude_same_text: leave out labels with the text's own words.

        Raises:
          ValueError: one string in the place of texts, k that is no whole number above 0, a
            min_score that is not a number, a head that the run does not have.
        """
        _check_score(min_score)
        ids, scores = self.predict_ids(texts, k=k, head=head, exclude_same_text=exclude_same_text)
        return [
            [(label["text"], label["score"]) for label in row]
            for row in _rows(self, ids, scores, min_score)
        ]

    def explain(
        self, texts: Iterable[str], *, k: int = 10, head: str | None = None, most: int = 3
    ) -> list[list[dict[str, Any]]]:
        """`predict`, and what each score is made of.

        Args:
          texts: any texts.
          k: labels a text.
          head: one of ``heads``; default the first.
          most: training points and label texts that are named for a label.

        Returns:
          For each text, labels as ``{"id", "text", "score", "terms", "because"}``. ``terms`` adds
          up to the score. ``because`` has, where there is retrieval, the training points
          (``points``) and the label texts (``labels``) that voted for the label, with what each
          adds; what its words have in common with the text is the term ``lexical``.

        Raises:
          ValueError: as `predict`.
        """
        texts, head = _listed(texts), self._head(head)
        vectors = self.encode(texts, head=head)
        ids, scores = self.predict_ids(texts, k=k, head=head, vectors=vectors)
        reasons = self._reasons(texts, vectors, ids, head, most)
        rows = _rows(self, ids, scores, None)
        return [
            [{**label, **reason} for label, reason in zip(row, of_row)]
            for row, of_row in zip(rows, reasons)
        ]

    def _queries(self, texts: Sequence[str], vectors: np.ndarray, head: str) -> np.ndarray:
        """What the ranker is asked: vectors, and with retrieval the texts' terms behind them."""
        ranker = self._ranker
        if isinstance(ranker, RetrievalRanker) and head == ranker.head:
            return ranker.with_terms(vectors, texts)
        return vectors

    def _reasons(
        self,
        given: Sequence[str],
        vectors: np.ndarray,
        ids: np.ndarray,
        head: str,
        most: int = 3,
    ) -> Iterator[list[dict[str, Any]]]:
        """What scores are made of, a row of labels after the other."""
        ranker, queries = self._ranker, self._queries(given, vectors, head)
        terms = ranker.terms(queries, head, ids)
        voters: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        if isinstance(ranker, RetrievalRanker) and head == ranker.head:
            voters = ranker.voters(queries, ids, most)
        texts = {name: self._key_texts(name) for name in voters}
        for row in range(len(ids)):
            yield [
                {
                    "terms": {name: float(part[row, place]) for name, part in terms.items()},
                    "because": {
                        name: [
                            {"text": texts[name](key), "adds": float(adds)}
                            for key, adds in zip(keys[row, place].tolist(), added[row, place])
                            if key >= 0
                        ]
                        for name, (keys, added) in voters.items()
                    },
                }
                for place in range(ids.shape[1])
            ]

    def _key_texts(self, name: str) -> Callable[[int], str]:
        """What gives the text of a key of a part; remembered points follow the others."""
        if name == "labels":
            return self.label_texts.__getitem__
        kept, more = retrieval_files.point_texts(self._run.folder), self._points
        return lambda row: kept[row] if row < len(kept) else more[row - len(kept)]

    def _head(self, head: str | None) -> str:
        head = head or self.heads[0]
        if head not in self.heads:
            reason = self._ranker.why_not(head)
            raise ValueError(f"head {head!r}: expected one of {self.heads}; {reason}.")
        return head

    def _tokens(self, texts: Sequence[str], side: Side, *, keep: bool = False) -> Tokens:
        """Of texts; ``keep`` what it costs to read them, for the next time."""
        form, read = self._run.options.text_form, self._run.system.read
        tokens = token_stores.encode(
            with_prefix(form, texts, side),
            self._run.tokenizer,
            max_length=form.max_length,
            special_tokens=form.special_tokens,
        ).of(texts)
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


def _listed(texts: Iterable[str]) -> Sequence[str]:
    """Texts that can be read twice."""
    if isinstance(texts, str):  # its letters would be taken for texts
        raise ValueError(f"found one string, {texts[:40]!r}; expected a list of texts: [text].")
    texts = list(texts)
    for row, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"text {row} (counted from 0) is {text!r:.80}; expected a string.")
    return texts


def _unknown(labels: Iterable[str], known: Sequence[str]) -> list[str]:
    """Those that are neither known nor blank, once each."""
    given = [text for text in _listed(labels) if not is_blank(text)]
    new = {text.strip(): text for text in reversed(given)}  # the first of equal ones
    for text in known:
        new.pop(text.strip(), None)
    added = list(reversed(new.values()))
    if len(added) < len(given):
        logging.info("%d new labels are known already, or repeated", len(given) - len(added))
    return added


def _check_score(min_score: float | None) -> None:
    if min_score is not None and not min_score == min_score:
        raise ValueError("min_score: found nan; expected a number, or None for all labels.")


def check_files(source: str, target: str, embeddings: str = "") -> None:
    """Try what can be tried before labels are embedded, which may take minutes.

    Raises:
      OSError: the source cannot be read, a target is a folder or in none, or the vectors cannot be
        written there.
    """
    if source != "-" and not files.is_special(source):  # a pipe is opened once
        open(source, "rb").close()
    for path in (target, embeddings):
        if path in ("", "-"):
            continue
        if Path(path).is_dir():
            raise OSError(f"{path} cannot be written: it is a folder.")
        if not Path(os.path.realpath(path)).parent.is_dir():
            raise OSError(f"{path} cannot be written: there is no such folder.")
    if embeddings and files.is_special(embeddings):
        raise OSError(
            f"{embeddings} cannot be written: a .npy file begins with what is known last."
        )
    if embeddings and os.path.realpath(embeddings) == os.path.realpath(target):
        raise OSError(f"{target} cannot be written: it is to hold labels and vectors at once.")


def add_file(model: Predictor, source: str, **reading: Any) -> int:
    """`Predictor.add` of a file of rows, as `xmc_jax.prepare` takes them (TSV, CSV, JSON Lines).

    Args:
      model: from `load`.
      source: the file. Labels are texts, or ids of labels that the run knows.
      **reading: fields of `xmc_jax.data.readers.reading.Reading` that differ from training's.

    Raises:
      DataError: the file is broken, with its line.
      ValueError, OSError: as `Predictor.add`, and an id that the run does not know.
    """
    path = Path(source)
    if not own_rows.holds_rows(path):
        raise ValueError(
            f"{source}: expected rows of texts and labels, in a file that ends in .tsv, .csv, "
            ".json or .jsonl (or such a file with .gz)."
        )
    place = TextPlace(None, dataclasses.replace(model.reading, **reading))
    rows = own_rows.read_rows(path, "train", place)
    for note in rows.notes:
        logging.warning("%s", note)
    names = []
    for name, line in zip(rows.names, rows.first_lines.tolist()):
        if isinstance(name, int) and name >= model.num_known:
            raise ValueError(
                f"{source}, line {line}: label id {name}; expected 0 to {model.num_known - 1}, "
                "which the run knows, or label texts."
            )
        names.append(model.label_texts[name] if isinstance(name, int) else name)
    labels = [
        [names[code] for code in rows.codes[start:stop].tolist()]
        for start, stop in itertools.pairwise(rows.indptr.tolist())
    ]
    whole = [i for i, (text, of) in enumerate(zip(rows.texts, labels)) if text.strip() and of]
    if len(whole) < len(labels):
        logging.warning("%d rows without text or labels are left out", len(labels) - len(whole))
    return model.add([rows.texts[i] for i in whole], [labels[i] for i in whole])


def predict_file(
    model: Predictor,
    source: str,
    target: str,
    *,
    k: int = 10,
    head: str | None = None,
    min_score: float | None = None,
    exclude_same_text: bool = False,
    explain: bool = False,
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
      explain: labels also have what `Predictor.explain` gives.
      embeddings: ``.npy`` file for the texts' vectors.
      text_column: where such a file has the texts; default as in training, or a usual name.
      encoding: of the file; default UTF-8, and for other lines that of training.

    Raises:
      DataError: a file of rows is broken, or its column of texts is not known.
      OSError: a file cannot be read or written; nothing half-written is left.
      ValueError: as `Predictor.predict`.
    """
    _check_score(min_score)
    check_files(source, target, embeddings or "")
    with contextlib.ExitStack() as stack:
        lines = read_texts(source, text_column=text_column, encoding=encoding, kept=model.reading)
        out = sys.stdout if target == "-" else stack.enter_context(files.replacing(target))
        kept = None
        if embeddings:
            kept = stack.enter_context(files.replacing(embeddings, binary=True))
        rows = 0
        if kept:
            width = model.encode([], head=head).shape[1]
            _write_header(kept, (0, width))
        for texts in _blocks(lines):
            vectors = model.encode(texts, head=head)
            if kept and embeddings:
                with files.naming(embeddings):
                    kept.write(np.ascontiguousarray(vectors, "<f4"))
                rows += len(texts)
            ids, scores = model.predict_ids(
                texts, k=k, head=head, exclude_same_text=exclude_same_text, vectors=vectors
            )
            reasons: Iterable[list[dict[str, Any]]] = itertools.repeat([{}] * ids.shape[1])
            if explain:
                reasons = model._reasons(texts, vectors, ids, model._head(head))
            with contextlib.nullcontext() if target == "-" else files.naming(target):
                rows_of = zip(texts, _rows(model, ids, scores, min_score), reasons)
                for text, labels, because in rows_of:
                    labels = [
                        {**label, "score": round(label["score"], 6), **reason}
                        for label, reason in zip(labels, because)
                    ]
                    row = {"text": text, "labels": labels}
                    out.write(json.dumps(row, ensure_ascii=False) + "\n")
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
