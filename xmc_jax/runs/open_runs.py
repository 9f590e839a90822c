"""Open trained runs: from a work directory to a model, its predictions and its evaluation."""

from __future__ import annotations

import dataclasses
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from xmc_jax import catalog, files, metrics
from xmc_jax.contracts import Examples, Ranker, System, Tokens, Weights
from xmc_jax.data import texts as text_files
from xmc_jax.data.readers import formats
from xmc_jax.data.tokens import tokenizer as tokenizers
from xmc_jax.metrics.propensity import inverse_propensity, tail_bonus, weights_of
from xmc_jax.runs import retrieval_files
from xmc_jax.runs.settings import family_of
from xmc_jax.systems import upgrades
from xmc_jax.training import checkpoints, evaluation, training_data, workdir
from xmc_jax.training.loop import Run
from xmc_jax.training.options import TrainingOptions

FREQUENCY = workdir.FREQUENCY

MADE_AGAIN = "Call xmc_jax.train as for this run once more: it makes the file again."


@dataclasses.dataclass
class OpenRun:
    """A trained run, opened for evaluation or prediction.

    Attributes:
      folder: its work directory.
      meta: ``meta.json``, as this version writes it.
      options: of its family.
      step: the checkpoint that was opened.
      weights: parameters, model state and tables.
      system: of its family.
      tokenizer: of the run.
      tail_weight: t of `xmc_jax.metrics.propensity.tail_bonus`.
      data: once they are loaded.
    """

    folder: Path
    meta: dict[str, Any]
    options: TrainingOptions
    step: int
    weights: Weights
    system: System
    tokenizer: Any
    tail_weight: float
    data: training_data.TrainingData | None = None

    @property
    def reading(self) -> formats.Reading:
        """How the files of its data are read."""
        return formats.Reading.of(self.meta["resolved"]["reading"])

    def label_texts(self) -> text_files.LineTexts:
        """Texts of the labels, by id.

        Raises:
          WorkdirError: the file is missing or damaged.
        """
        path = self.folder / "labels"
        try:
            texts = text_files.LineTexts(path)
            held = f"{sum(1 for _ in texts)} texts"
        except (OSError, UnicodeDecodeError) as error:
            held = f"what cannot be read ({error})"
        if held != f"{self.meta['num_labels']} texts":
            raise workdir.WorkdirError(
                f"{path} holds {held}, expected {self.meta['num_labels']} texts. {MADE_AGAIN}"
            )
        return texts

    def ranker(
        self,
        tokens: Tokens | None = None,
        *,
        kind: str = "exact",
        keep_indexes: bool = False,
        remembered: retrieval_files.Remembered | None = None,
    ) -> Ranker:
        """Of some labels, with retrieval where it is kept; it knows the run's labels alone.

        Args:
          tokens: label texts, the run's and perhaps more; default the run's, once data are loaded.
          kind: index: exact, hnsw, ivf or auto.
          keep_indexes: keep every head's index, not the last one alone.
          remembered: points that came after training, whose new labels are among ``tokens``.

        Raises:
          ValueError: what the system does not allow, or what is remembered without retrieval.
        """
        known = self.meta["num_labels"]
        if remembered is not None and not self.options.retrieval.enabled:
            raise ValueError(
                f"{self.folder}: it keeps no training points beside which others could be "
                "remembered. Train with config.retrieval.enabled=True."
            )
        examples = None if remembered is None else remembered.examples(known)
        base = self._base_ranker(tokens, kind, keep_indexes, examples)
        if base.num_labels > (known if remembered is None else remembered.labels.shape[1]):
            return base
        return retrieval_files.ranker(self._owner, base, kind=kind, remembered=remembered)

    def make_retrieval(self) -> Ranker:
        """Keep what retrieval needs (`xmc_jax.runs.retrieval_files.make`); the run's ranker."""
        data, form = self.load_data(), self.options.text_form
        queries = data.label_queries or data.label_tokens
        if data.label_queries is None and form.query_prefix != form.label_prefix:
            texts = data.dataset.label_texts
            queries = training_data.token_store(form, self.tokenizer, texts, "query")
            queries = self.system.read(queries)
        base = self._base_ranker(None, "exact", keep_indexes=True)
        return retrieval_files.make(self._owner, base, data, queries)

    @property
    def _owner(self) -> retrieval_files.Owner:
        meta = self.meta
        return retrieval_files.Owner(
            self.folder, self.step, meta["data"].get("digest"), meta["num_labels"], self.options
        )

    def _base_ranker(
        self,
        tokens: Tokens | None,
        kind: str,
        keep_indexes: bool,
        examples: Examples | None = None,
    ) -> Ranker:
        """The model's own."""
        if tokens is None:
            tokens = self.load_data().label_tokens
        return self.system.ranker(
            self.weights,
            tokens,
            bonus=self._bonus(len(tokens)),
            kind=kind,
            seed=self.options.seed,
            keep_indexes=keep_indexes,
            examples=examples,
        )

    def _bonus(self, num_labels: int) -> np.ndarray | None:
        """What labels get for being rare; those that the run does not know have no points."""
        if not self.tail_weight:
            return None
        frequency, points = read_frequency(self.folder)
        frequency = np.pad(frequency, (0, num_labels - len(frequency)))
        try:
            a, b = (float(self.meta["entry"][name]) for name in "ab")
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged_meta(self.folder, error) from error
        return tail_bonus(self.tail_weight, weights_of(frequency, points, a=a, b=b))

    def load_data(self, data: str = "") -> training_data.TrainingData:
        """The run's data set; ``data`` says where it is now if it was moved."""
        if self.data is None:
            kept, resolved = self.meta["data"].get("folder"), self.meta["resolved"]
            if not isinstance(kept, str):
                raise _damaged_meta(self.folder, ValueError(f"data.folder is {kept!r}"))
            folder = data or (kept if Path(kept).exists() else resolved["data"])
            try:
                dataset, entry, source = training_data.read_dataset(
                    resolved["dataset"],
                    folder,
                    max_length=self.options.max_length,
                    share_of=self.options.share_of,
                    propensity=resolved.get("propensity", ""),
                    reading=self.reading,
                )
            except formats.DataError as error:
                if data:
                    raise
                raise workdir.WorkdirError(
                    f"{self.folder}: its data are not at {kept} as when training began. Say where"
                    f" they are now with --data=PATH. ({error})"
                ) from error
            check_digest(self.folder, self.meta, dataset.digest, source)
            loaded = training_data.load(self.options, dataset, entry, self.tokenizer)
            self.data = loaded.read_by(self.system.read)
        return self.data


def open_run(
    folder: Path,
    *,
    step: int | None = None,
    tail_weight: float | None = None,
    run: Run | None = None,
) -> OpenRun:
    """Open the chosen checkpoint of a work directory (best held-out score, else the last).

    Args:
      folder: the work directory.
      step: another checkpoint.
      tail_weight: t of `xmc_jax.metrics.propensity.tail_bonus`; default the configuration's.
      run: the run that was just trained, whose data and compiled functions are used again.

    Raises:
      WorkdirError, CheckpointError: not a work directory, no sound checkpoint.
      ValueError: a ``tail_weight`` out of range.
    """
    meta = upgrades.upgrade(workdir.read_meta(folder))
    workdir.check_entries(folder, meta, workdir.NEEDED)
    try:
        family = family_of(meta["resolved"])
        options = family.options(meta["resolved"])
    except (ValueError, TypeError, AttributeError) as error:
        raise _damaged_meta(folder, error) from error
    tail_weight = options.tail_weight if tail_weight is None else float(tail_weight)
    least, most = family.bounds.get("tail_weight", (-np.inf, None))
    if not least <= tail_weight <= (np.inf if most is None else most):
        raise ValueError(
            f"tail_weight: found {tail_weight}, expected a number from {least} to {most}."
        )
    if tail_weight and not (folder / FREQUENCY).exists():
        raise workdir.WorkdirError(
            f"tail_weight = {tail_weight:g}: {folder / FREQUENCY} is missing, as in runs of "
            "before this setting. Call xmc_jax.train as for this run once more: it writes the file."
        )
    read = [name for name in workdir.STARTED if tail_weight or name != FREQUENCY]
    if problem := workdir.damage(folder, meta, *read):
        raise workdir.WorkdirError(f"{problem}. {MADE_AGAIN}")
    try:
        system = run.system if run else family.open(options, folder, meta)
    except (KeyError, TypeError, AttributeError) as error:
        raise _damaged_meta(folder, error) from error
    shapes = system.weight_shapes(meta["num_labels"])
    if step is None:
        step, weights = checkpoints.restore_best(folder, shapes)
    else:
        weights = checkpoints.restore_weights(folder, step, shapes)
    return OpenRun(
        folder=folder,
        meta=meta,
        options=options,
        step=step,
        weights=weights,
        system=system,
        tokenizer=tokenizers.load_tokenizer(folder / "tokenizer"),
        tail_weight=tail_weight,
        data=run.data if run else None,
    )


def _damaged_meta(folder: Path, error: Exception) -> workdir.WorkdirError:
    return workdir.WorkdirError(
        f"{folder / 'meta.json'} is damaged ({error!r}). {workdir.PUT_BACK}"
    )


def read_frequency(folder: Path) -> tuple[np.ndarray, int]:
    """Points of each label and points in all, of the original training labels.

    Raises:
      WorkdirError: the file is missing or damaged.
    """
    path = folder / FREQUENCY
    try:
        with np.load(path) as kept:
            return kept["frequency"], int(kept["points"])
    except (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise workdir.WorkdirError(f"{path} cannot be read ({error}). {MADE_AGAIN}") from error


def evaluate_run(
    opened: OpenRun,
    *,
    split: str = "test",
    heads: tuple[str, ...] | None = None,
    kind: str = "exact",
    ks: tuple[int, ...] = (1, 3, 5),
    data: str = "",
    propensity: str = "",
    keep: dict[str, Any] | None = None,
    ranker: Ranker | None = None,
) -> dict[str, Any]:
    """Evaluate an opened run on a split and write ``eval-<split>-<step>.json``.

    Heads, index, cut-offs, tail weight or propensities other than the usual ones are added to the
    file's name.

    Args:
      opened: the run.
      split: ``test`` or ``held_out``.
      heads: which; default all there are.
      kind: index: exact, hnsw or ivf.
      ks: cut-offs.
      data: where the data set is now, if it was moved.
      propensity: ``A,B`` for PSP@k; "" = the run's. A tail weight keeps those of the run.
      keep: if given, gets ``{head: (ids, scores)}``.
      ranker: the run's, if it is there already.

    Raises:
      ValueError: the data set has no such split, or the run no such head.
    """
    loaded, rows = _read_split(opened, split, data)
    entry = catalog.with_propensity(loaded.entry, propensity)
    ranker = ranker or opened.ranker(kind=kind)
    if unknown := set(heads or ()) - set(ranker.heads):
        raise ValueError(
            f"head {', '.join(sorted(unknown))}: this run has no such head; expected one of "
            f"{', '.join(ranker.heads)}."
        )
    if kind == "exact":
        logging.info("%s", ranker.search_cost(len(rows.rows)))
    result = evaluation.evaluate(
        ranker,
        rows,
        loaded.dataset.train.labels,
        inverse_propensity(loaded.dataset.train.labels, a=entry.a, b=entry.b),
        heads=heads,
        ks=ks,
        keep=keep,
    )
    result = {
        "step": opened.step,
        "split": split,
        "index": kind,
        "rows": len(rows.rows),
        "rows_without_labels": int((np.diff(rows.truth.indptr) == 0).sum()),
        "propensity": {"a": entry.a, "b": entry.b},
        "tail_weight": opened.tail_weight,
        **result,
    }
    parts = [split, str(opened.step), *(heads or ()), *([kind] if kind != "exact" else [])]
    if opened.tail_weight != opened.options.tail_weight:
        parts.append(f"tail{opened.tail_weight:g}")
    if entry != loaded.entry:
        parts.append(f"propensity{entry.a:g},{entry.b:g}")
    if ks != (1, 3, 5):
        parts += [f"at{k}" for k in ks]
    try:
        files.write_json(opened.folder / f"eval-{'-'.join(parts)}.json", result)
    except OSError as error:  # somebody else's work directory
        logging.warning("%s The evaluation is not kept there.", error)
    return json.loads(json.dumps(result))


def evaluate_and_save(
    opened: OpenRun, *, save_predictions: str = "", **options: Any
) -> tuple[dict[str, Any], list[dict[str, float]], int]:
    """``evaluate_run``, plus score thresholds from held-out rows.

    Args:
      opened: the run.
      save_predictions: ``.npz`` file for ``<head>_ids`` and ``<head>_scores``.
      **options: of ``evaluate_run``.

    Returns:
      The evaluation, a table of thresholds of the first head, and of how many held-out rows it is
      (without any it is empty).
    """
    if save_predictions and not Path(save_predictions).absolute().parent.is_dir():
        raise ValueError(f"--save_predictions={save_predictions}: there is no such folder.")
    keep: dict[str, Any] | None = {} if save_predictions else None
    loaded, _ = _read_split(opened, options.get("split", "test"), options.get("data", ""))
    ranker = opened.ranker(kind=options.get("kind", "exact"))  # labels are embedded once
    result = evaluate_run(opened, keep=keep, ranker=ranker, **options)
    if save_predictions and keep is not None:
        arrays = {}
        for head, (ids, scores) in keep.items():
            arrays[f"{head}_ids"], arrays[f"{head}_scores"] = ids, scores
        with files.replacing(save_predictions, binary=True) as file:
            np.savez(file, **arrays)
    held_out = loaded.held_out
    if held_out is None:
        return result, [], 0
    head = next(iter(result["heads"]))
    ids, scores = evaluation.predict_split(ranker, held_out, head, k=100)
    thresholds = metrics.precision_recall_thresholds(
        scores, ids, held_out.truth, filter_pairs=held_out.filter_pairs
    )
    return result, thresholds, len(held_out.rows)


def _read_split(
    opened: OpenRun, split: str, data: str
) -> tuple[training_data.TrainingData, training_data.EvaluationSplit]:
    """The run's data and the rows of one of its splits."""
    loaded = opened.load_data(data)
    rows = {"test": loaded.test, "held_out": loaded.held_out}.get(split)
    if rows is None:
        raise ValueError(
            f"split {split!r}: this run has no such rows; expected 'test' or 'held_out', and the "
            "data set must have test rows, or config.held_out_share be above 0."
        )
    return loaded, rows


def check_digest(folder: Path, meta: dict[str, Any], digest: str, source: Path) -> None:
    """The data are those that the run was started with.

    Raises:
      WorkdirError: they are not.
    """
    begun = meta.get("data", {})
    if begun.get("digest") != digest:
        raise workdir.WorkdirError(
            f"{source}: the data changed since {folder} was started from {begun.get('folder')} "
            f"(digest {digest}, expected {begun.get('digest')}). Put the old data back, or "
            "choose another --workdir."
        )
