"""Start runs, or continue them: from a configuration to a trained and evaluated model."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging
from ml_collections import ConfigDict

from xmc_jax.runs import build, device_memory, open_runs, settings
from xmc_jax.training import checkpoints, stages, training_data, workdir
from xmc_jax.systems import encoders
from xmc_jax.data.readers import layouts
from xmc_jax.data.summaries import summary
from xmc_jax.data import texts as text_files
from xmc_jax.metrics.propensity import label_frequency
from xmc_jax.training.loop import CompiledStep, Run, TrainingError, initial_state, train


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
    settings.check(config)
    build.system(config)  # names of losses
    with workdir.held(folder):
        try:
            return _start(config, folder, overrides)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise TrainingError(
                f"{folder}: out of memory on {jax.devices()[0]} ({str(error).splitlines()[0]}). "
                "Take a smaller config.batch_size and config.pool_size, a smaller config.head_dim, "
                "or config.table.dtype=bfloat16, in a new --workdir."
            ) from error


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
    restored = params = None  # beside the state they would be there twice
    if int(state.step) < run.total_steps or not info.get("evaluated"):
        state = train(run, state, step)
    del state
    opened = open_runs.open_run(folder, run=run)
    if run.data.test is None and run.data.held_out is None:
        logging.info("no test rows and no held-out rows: there is nothing to evaluate on")
        return {}
    return open_runs.evaluate_run(opened, split="test" if run.data.test else "held_out")


def _prepare(
    config: ConfigDict, folder: Path, meta: dict[str, Any] | None
) -> tuple[Run, CompiledStep, Any, dict[str, Any]]:
    """Everything up to the first step: the run, its step, first parameters and meta data."""
    dataset, entry, source = training_data.read_dataset(config)
    if meta is None:
        if layouts.detect(source).kind != layouts.CANONICAL:  # nobody has looked at it yet
            print(f"{source}:", *summary.describe(dataset), sep="\n")
            print(f"  numbers to beat: python -m xmc_jax.prepare --input={source}")
        resolved, chosen = settings.resolve(config, dataset)
        for name, value in chosen.items():
            logging.info("chosen for this data and device: %s = %s", name, value)
        settings.check(resolved)
    else:
        resolved = ConfigDict({**meta["resolved"], "data": config.data})
        written = workdir.read_json(folder / "meta.json")["resolved"]
        resolved.tail_weight = written.get("tail_weight", 0.0)  # as when it is opened
        open_runs.check_digest(folder, meta, dataset.digest, source)
    texts = text_files.JoinedTexts(dataset.train.texts, dataset.label_texts)
    tokenizer = encoders.tokenizer(resolved, texts, folder / "tokenizer")
    data = training_data.load(resolved, dataset, entry, tokenizer)
    if meta is None:
        for line in training_data.lost(resolved, data, tokenizer):
            logging.warning("%s", line)
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
    _keep_frequency(run)
    return run, step, parts.params, meta


def _keep_frequency(run: Run) -> None:
    """Write what a tail weight needs, for predictions that do not read the data."""
    labels = run.data.dataset.train.labels
    path = run.folder / open_runs.FREQUENCY
    if not path.exists():
        with workdir.replacing(path, binary=True) as file:
            frequency = label_frequency(labels).astype(np.int32)
            np.savez(file, frequency=frequency, points=labels.shape[0])


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
    for line in device_memory.state(run, step):
        print(line)
    epochs = config.epochs
    if config.max_minutes > 0:
        fitting = _epochs_in_budget(run, params, step)
        why = f", the most by config.epochs; {fitting} would fit" if fitting > epochs else ""
        epochs = min(epochs, fitting)
        print(f"epochs: {epochs} in {config.max_minutes:g} minutes{why}")
    if "phases" in config:
        config.phases = stages.scaled(config.phases, epochs)
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
    slowest = stages.of(run.config)[-1].first  # in its last phase a model has all of its parts
    for number, (batch, _, _) in enumerate(run.source.ahead(slowest, 0)):
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
    return settings.epochs_in(
        run.config.max_minutes,
        step=statistics.median(times),
        steps_per_epoch=run.source.steps_per_epoch,
        evaluation=evaluation_seconds,
        every=min(run.config.eval_epochs, run.config.refresh_epochs),
    )
