"""Start, continue and open runs: from a configuration or a work directory to objects."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging
from ml_collections import ConfigDict

from xmc_jax import (
    build,
    checkpoints,
    encoders,
    evaluation,
    frozen,
    label_pool,
    memory,
    metrics,
    phases,
    plan,
    training_data,
    workdir,
)
from xmc_jax.data import formats, layouts, summary
from xmc_jax.data import texts as text_files
from xmc_jax.data import tokenizer as tokenizers
from xmc_jax.propensity import inverse_propensity
from xmc_jax.ranking import Ranker
from xmc_jax.train_loop import CompiledStep, Run, initial_state, train


def start(
    config: ConfigDict, folder: Path, *, overrides: Collection[str] | None = None
) -> dict[str, Any]:
    """Train as configured, or continue; evaluate the chosen checkpoint on the test rows.

    Args:
      config: from ``configs/``.
      folder: the work directory; made if it is not there.
      overrides: fields set on the command line; see `workdir.open_run`.

    Returns:
      The evaluation that is written to ``eval-test-<step>.json`` (of the held-out rows where the
      data set has no test rows).

    Raises:
      WorkdirError, PlanError, CheckpointError, TrainingError: with what to do.
    """
    plan.check(config)
    build.system(config)  # names of losses
    with workdir.held(folder):
        return _start(config, folder, overrides)


def _start(config: ConfigDict, folder: Path, overrides: Collection[str] | None) -> dict[str, Any]:
    meta = workdir.open_run(folder, config.to_dict(), overrides)
    try:
        run, step, params, meta = _prepare(config, folder, meta)
    except BaseException:
        workdir.discard(folder)
        raise
    run.epochs = meta["epochs"]
    restored = checkpoints.restore_latest(
        folder, jax.eval_shape(lambda: initial_state(run, params, step.optimizer, table=False))
    )
    if restored is None:
        state, info = initial_state(run, params, step.optimizer), {}
    else:
        state, info = restored
        logging.info("continuing %s from step %d of %d", folder, int(state.step), run.total_steps)
    if int(state.step) < run.total_steps or not info.get("evaluated"):
        state = train(run, state, step)
    del state
    opened = open_run(folder, run=run)
    if run.data.test is None and run.data.held_out is None:
        logging.info("no test rows and no held-out rows: there is nothing to evaluate on")
        return {}
    return evaluate_run(opened, split="test" if run.data.test else "held_out")


def _prepare(
    config: ConfigDict, folder: Path, meta: dict[str, Any] | None
) -> tuple[Run, CompiledStep, Any, dict[str, Any]]:
    """Everything up to the first step: the run, its step, first parameters and meta data."""
    dataset, entry, source = training_data.read_dataset(config)
    if meta is None:
        if layouts.detect(source).kind != layouts.CANONICAL:  # nobody has looked at it yet
            print(f"{source}:", *summary.describe(dataset), sep="\n")
            print(f"  numbers to beat: python -m xmc_jax.prepare --input={source}")
        resolved, chosen = plan.resolve(config, dataset)
        for name, value in chosen.items():
            logging.info("chosen for this data and device: %s = %s", name, value)
    else:
        resolved = ConfigDict({**meta["resolved"], "data": config.data})
        _check_digest(folder, meta, dataset.digest, source)
    texts = text_files.JoinedTexts(dataset.train.texts, dataset.label_texts)
    tokenizer = encoders.tokenizer(resolved, texts, folder / "tokenizer")
    data = training_data.load(resolved, dataset, entry, tokenizer)
    parts = build.parts(resolved, folder, data, tokenizer.get_vocab_size())
    run = Run(
        config=resolved,
        folder=folder,
        data=parts.data,
        model=parts.model,
        source=parts.system.source(resolved, parts.model, parts.data),
        embedder=parts.embedder,
        epochs=resolved.epochs,
        system=parts.system,
    )
    step = CompiledStep(run)
    if meta is None:
        meta = _begin(run, step, parts.params, config.to_dict(), source)
    return run, step, parts.params, meta


def _begin(
    run: Run,
    step: CompiledStep,
    params: Any,
    given: dict[str, Any],
    source: Path,
) -> dict[str, Any]:
    """Say what will be done, check memory, settle the number of epochs, write ``meta.json``."""
    config, data = run.config, run.data
    print(
        f"{data.dataset.name}: {len(data.rows):,} training rows, {data.num_labels:,} labels, "
        f"{config.encoder.name} encoder, {run.source.batch_size} queries and "
        f"{run.source.pool_size} labels a batch, {run.source.steps_per_epoch:,} steps an epoch"
    )
    for line in memory.state(run, step):
        print(line)
    epochs = config.epochs
    if config.max_minutes > 0:
        epochs = min(epochs, _epochs_in_budget(run, params, step))
        print(f"epochs: {epochs} in {config.max_minutes:g} minutes")
    if "phases" in config:
        config.phases = phases.scaled(config.phases, epochs)
    text_files.write_lines(run.folder / "labels", data.dataset.label_texts)
    meta = {
        "config": given,
        "resolved": config.to_dict(),
        "epochs": epochs,
        "encoder": encoders.describe(run.model),
        "num_labels": data.num_labels,
        "entry": dataclasses.asdict(data.entry),
        "data": {"digest": data.dataset.digest, "folder": str(source.absolute())},
        "versions": workdir.versions(),
        "device": str(jax.devices()[0]),
    }
    return workdir.begin(run.folder, meta)


def _epochs_in_budget(run: Run, params: Any, step: CompiledStep) -> int:
    """Time some steps and an evaluation's embedding on a throw-away state."""
    copy = jax.tree.map(lambda x: jax.numpy.array(x, copy=True), params)
    state = initial_state(run, copy, step.optimizer, table=False)
    times: list[float] = []
    for number, (batch, _, _) in enumerate(run.source.ahead(0, 0)):
        step.compile(state, batch)
        started = time.perf_counter()
        state, parts = step(state, batch, 1.0)
        jax.block_until_ready(parts)
        times.append(time.perf_counter() - started)
        if number == 8:
            break
    sample = np.arange(min(4096, data_size := len(run.data.label_tokens)))
    run.embedder.both(params, run.data.label_tokens, sample)
    started = time.perf_counter()
    run.embedder.both(params, run.data.label_tokens, sample)
    texts = data_size + (len(run.data.held_out.rows) if run.data.held_out else 0)
    evaluation_seconds = (time.perf_counter() - started) * texts / len(sample)
    return plan.epochs_in(
        run.config.max_minutes,
        step=statistics.median(times),
        steps_per_epoch=run.source.steps_per_epoch,
        evaluation=evaluation_seconds,
        every=min(run.config.eval_epochs, run.config.refresh_epochs),
    )


def _check_digest(folder: Path, meta: dict[str, Any], digest: str, source: Path) -> None:
    if meta["data"]["digest"] != digest:
        raise workdir.WorkdirError(
            f"{source}: the data changed since {folder} was started from {meta['data']['folder']} "
            f"(digest {digest}, expected {meta['data']['digest']}). Put the old data back, or "
            "choose another --workdir."
        )


@dataclasses.dataclass
class OpenRun:
    """A trained run, opened for evaluation or prediction.

    Attributes:
      folder: its work directory.
      meta: ``meta.json``.
      config: the resolved configuration.
      step: the checkpoint that was opened.
      params: parameters.
      table: classifier table as stored, or None.
      embedder: of its model.
      system: its `xmc_jax.train_loop.Run.system`.
      tokenizer: of the run.
      frozen: its frozen layers, where it has some.
    """

    folder: Path
    meta: dict[str, Any]
    config: ConfigDict
    step: int
    params: Any
    table: Any
    embedder: Any
    system: Any
    tokenizer: Any
    data: training_data.TrainingData | None = None
    frozen: frozen.FrozenLayers | None = None

    def label_texts(self) -> text_files.LineTexts:
        """Texts of the labels, by id."""
        return text_files.LineTexts(self.folder / "labels")

    def ranker(self, **options: Any) -> Ranker:
        """Of the data set's labels, once its data are loaded; options: ``kind``, ``seed``."""
        options = {"seed": self.config.seed, **options}
        tokens = self.data.label_tokens
        return self.system.ranker(self.embedder, self.params, self.table, tokens, **options)

    def load_data(self, data: str = "") -> training_data.TrainingData:
        """The run's data set; ``data`` says where it is now if it was moved."""
        if self.data is None:
            config = self.config.copy_and_resolve_references()
            there = self.meta["data"]["folder"]  # where it was when the run began
            config.data = data or (there if Path(there).exists() else config.data)
            try:
                dataset, entry, source = training_data.read_dataset(config)
            except formats.DataError as error:
                if data:
                    raise
                raise workdir.WorkdirError(
                    f"{self.folder}: its data are not at {there} as when training began. Say where"
                    f" they are now with --data=PATH. ({error})"
                ) from error
            _check_digest(self.folder, self.meta, dataset.digest, source)
            loaded = training_data.load(config, dataset, entry, self.tokenizer)
            self.data = frozen.freeze(loaded, self.frozen) if self.frozen else loaded
        return self.data


def open_run(folder: Path, *, step: int | None = None, run: Run | None = None) -> OpenRun:
    """Open the chosen checkpoint of a work directory (best held-out score, else the last).

    Args:
      folder: the work directory.
      step: another checkpoint.
      run: the run that was just trained, whose data and compiled functions are used again.

    Raises:
      WorkdirError, CheckpointError: not a work directory, no sound checkpoint.
    """
    meta = workdir.read_json(folder / "meta.json")
    config = ConfigDict(meta["resolved"])
    step = checkpoints.best_step(folder) if step is None else step
    if step is None:
        raise checkpoints.CheckpointError(
            f"{folder / 'checkpoints'}: no sound checkpoint. Run training on it again."
        )
    if run:
        model, system, embedder = run.model, run.system, run.embedder
    else:
        model, system, embedder = build.opened(config, folder, meta)
    params = system.parameter_shapes(model, meta["num_labels"])
    table = None
    if config.classifier:
        shape = (meta["num_labels"], model.dim)
        table = jax.eval_shape(
            lambda: label_pool.to_storage(jax.numpy.zeros(shape), config.table.dtype)
        )
    found = checkpoints.restore_model(folder, step, {"params": params, "table": table})
    return OpenRun(
        folder=folder,
        meta=meta,
        config=config,
        step=step,
        params=found["params"],
        table=found["table"],
        embedder=embedder,
        system=system,
        tokenizer=tokenizers.load_tokenizer(folder / "tokenizer"),
        data=run.data if run else None,
        frozen=frozen.load(folder, getattr(model, "encoder", None), row_length=config.row_length),
    )


def evaluate_run(
    opened: OpenRun,
    *,
    split: str = "test",
    heads: tuple[str, ...] | None = None,
    kind: str = "exact",
    ks: tuple[int, ...] = (1, 3, 5),
    data: str = "",
    keep: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Evaluate an opened run on a split and write ``eval-<split>-<step>.json``.

    Heads, index or cut-offs other than the usual ones are added to the file's name.

    Args:
      opened: the run.
      split: ``test`` or ``held_out``.
      heads: which; default all there are.
      kind: index: exact, hnsw or ivf.
      ks: cut-offs.
      data: where the data set is now, if it was moved.
      keep: if given, gets ``{head: (ids, scores)}``.

    Raises:
      ValueError: the data set has no such split.
    """
    loaded = opened.load_data(data)
    rows = {"test": loaded.test, "held_out": loaded.held_out}.get(split)
    if rows is None:
        raise ValueError(
            f"split {split!r}: this run has no such rows; expected 'test' or 'held_out', and the "
            "data set must have test rows, or config.held_out_share be above 0."
        )
    entry = loaded.entry
    ranker = opened.ranker(kind=kind)
    if kind == "exact":
        logging.info("%s", ranker.memory(len(rows.rows)))
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
        "propensity": {"a": entry.a, "b": entry.b},
        **result,
    }
    parts = [split, str(opened.step), *(heads or ()), *([kind] if kind != "exact" else [])]
    if ks != (1, 3, 5):
        parts += [f"at{k}" for k in ks]
    try:
        workdir.write_json(opened.folder / f"eval-{'-'.join(parts)}.json", result)
    except OSError as error:  # somebody else's work directory
        logging.warning("%s The evaluation is not kept there.", error)
    return json.loads(json.dumps(result))


def evaluate_and_save(
    opened: OpenRun, *, save_predictions: str = "", **options: Any
) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """``evaluate_run``, plus score thresholds from held-out rows.

    Args:
      opened: the run.
      save_predictions: ``.npz`` file for ``<head>_ids`` and ``<head>_scores``.
      **options: of ``evaluate_run``.

    Returns:
      The evaluation, and a table of thresholds of the first head (empty without held-out rows).
    """
    if save_predictions and not Path(save_predictions).absolute().parent.is_dir():
        raise ValueError(f"--save_predictions={save_predictions}: there is no such folder.")
    keep: dict[str, Any] = {}
    result = evaluate_run(opened, keep=keep, **options)
    if save_predictions:
        arrays = {}
        for head, (ids, scores) in keep.items():
            arrays[f"{head}_ids"], arrays[f"{head}_scores"] = ids, scores
        with workdir.replacing(save_predictions, binary=True) as file:
            np.savez(file, **arrays)
    held_out = opened.load_data(options.get("data", "")).held_out
    if held_out is None:
        return result, []
    head = next(iter(result["heads"]))
    ranker = opened.ranker(kind=options["kind"], seed=0)
    ids, scores = evaluation.predict_split(ranker, held_out, head, k=100)
    return result, metrics.precision_recall_thresholds(
        scores, ids, held_out.truth, filter_pairs=held_out.filter_pairs
    )
