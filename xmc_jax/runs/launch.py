"""Start runs, or continue them: from a configuration to a trained and evaluated model."""

from __future__ import annotations

import dataclasses
import statistics
import time
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging
from ml_collections import ConfigDict

from xmc_jax import files
from xmc_jax.contracts import Weights
from xmc_jax.data import texts as text_files
from xmc_jax.data.readers import formats, layouts
from xmc_jax.data.summaries import summary
from xmc_jax.metrics.propensity import label_frequency
from xmc_jax.runs import device_memory, initial, open_runs, settings
from xmc_jax.systems import upgrades
from xmc_jax.training import checkpoints, refresh, training_data, workdir
from xmc_jax.training.loop import Run, TrainingError, train


@dataclasses.dataclass
class Start:
    """A run before its first step.

    Attributes:
      run: the run.
      config: resolved.
      weights: first parameters.
      meta: of the work directory; None where the run is new.
      description, summary: of the model (`xmc_jax.contracts.Built`).
      source: folder or file of the data.
    """

    run: Run
    config: ConfigDict
    weights: Weights
    meta: dict[str, Any] | None
    description: dict[str, Any]
    summary: str
    source: Path


def start(
    config: ConfigDict, folder: Path, *, overrides: Collection[str] | None = None
) -> dict[str, Any]:
    """Train as configured, or continue; evaluate the chosen checkpoint on the test rows.

    Args:
      config: from ``configs/``.
      folder: the work directory; made if it is not there.
      overrides: fields set on the command line; see `workdir.claim`.

    Returns:
      The evaluation that is written to ``eval-test-<step>.json`` (of the held-out rows where the
      data set has no test rows).

    Raises:
      WorkdirError, PlanError, CheckpointError, TrainingError: with what to do.
    """
    settings.check(config)
    with workdir.held(folder):
        try:
            return _start(config, folder, overrides)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise TrainingError(
                f"{folder}: out of memory on {jax.devices()[0]} ({str(error).splitlines()[0]}). "
                f"Take {device_memory.advice(config)}, in a new --workdir."
            ) from error


def _start(config: ConfigDict, folder: Path, overrides: Collection[str] | None) -> dict[str, Any]:
    given = config.to_dict()
    meta = workdir.claim(folder, given, overrides, upgrade=upgrades.upgrade)
    if meta is not None:
        workdir.set_aside_damaged(folder, meta)
    try:
        begun = prepare(config, folder, meta)
        _keep_labels(begun.run)
        _keep_frequency(begun.run)
        if begun.meta is None:
            _begin(begun, given)
        elif problem := workdir.damage(folder, begun.meta):
            raise workdir.WorkdirError(
                f"{problem}, now that it was made again: what it is made of has changed, such as a "
                "library or a pretrained model. Choose another --workdir."
            )
    except BaseException:
        workdir.discard(folder)
        raise
    run = begun.run
    _mend_first_refresh(begun)
    shapes = device_memory.state_shapes(run)
    restored = checkpoints.restore_latest(folder, shapes, lacking=run.lacking)
    info: dict[str, Any] = {}
    if restored is None:
        state = run.system.first_state(run.data, begun.weights)
    else:
        state, info = restored
        logging.info("continuing %s from step %d of %d", folder, int(state.step), run.total_steps)
    del restored, begun  # beside the state their arrays would be there twice
    if int(state.step) < run.total_steps or not info.get("evaluated"):
        state = train(run, state)
    del state
    opened = open_runs.open_run(folder, run=run)
    ranker = opened.make_retrieval()
    if run.data.test is None and run.data.held_out is None:
        logging.info("no test rows and no held-out rows: there is nothing to evaluate on")
        return {}
    split = "test" if run.data.test else "held_out"
    return open_runs.evaluate_run(opened, split=split, ranker=ranker)


def _mend_first_refresh(begun: Start) -> None:
    """Make refresh 0 again where it is damaged and a checkpoint needs it: its state is known.

    Raises:
      WorkdirError: another one came out.
    """
    run, saved = begun.run, checkpoints.steps(begun.run.folder)
    if 0 not in map(run.reads, saved) or begun.config.get("init_from"):
        return
    problem = refresh.damage(run.folder, 0)
    if problem is None:
        return
    logging.warning("%s: the refresh is made again", problem)
    state = run.system.first_state(run.data, begun.weights)
    written = refresh.checksums(run.folder, 0)

    def make(folder: Path) -> dict[str, Any]:
        facts = run.system.write_refresh(folder, 0, run.data, state)
        if written not in ({}, files.checksums(folder)):
            raise workdir.WorkdirError(
                f"{problem}, and another refresh came out when it was made again: what it is made "
                "of has changed, such as a library or a pretrained model. To train from the "
                f"beginning, remove {run.folder / 'checkpoints'}, or choose another --workdir."
            )
        return facts

    refresh.write(run.folder, 0, make)


def prepare(config: ConfigDict, folder: Path, meta: dict[str, Any] | None) -> Start:
    """Everything up to the first step, but for what is written of a run that begins.

    Args:
      config: as given.
      folder: the work directory, which gets the tokenizer and what else the system keeps there.
      meta: of the run to be continued, or None.
    """
    reading = formats.Reading.of((meta["resolved"] if meta else config).get("reading", {}))
    if meta is None:
        folder_or_file = formats.find_folder(config.dataset, config.data or None)
        reading = formats.reading_for(folder_or_file, reading)
    dataset, entry, source = training_data.read_dataset(
        config.dataset,
        config.data,
        max_length=config.max_length,
        share_of=(meta["resolved"] if meta else config).get("share_of", "rows"),
        propensity=(meta["resolved"] if meta else config).get("propensity", ""),
        reading=reading,
    )
    if meta is None:
        if layouts.detect(source).kind != layouts.CANONICAL:  # nobody has looked at it yet
            print(f"{source}:", *summary.summarise(dataset), sep="\n")
            flags = "".join(f" {flag}" for flag in reading.given)
            print(f"  numbers to beat: python -m xmc_jax.prepare --input={source}{flags}")
        resolved, chosen = settings.resolve(config, dataset)
        resolved.reading.update(dataclasses.asdict(reading))
        for name, value in chosen.items():
            logging.info("chosen for this data and device: %s = %s", name, value)
        settings.check(resolved)
    else:
        resolved = ConfigDict({**meta["resolved"], "data": config.data})
        open_runs.check_digest(folder, meta, dataset.digest, source)
    family, options = settings.family_of(resolved), settings.options_of(resolved)
    if config.get("init_from") and not (folder / "tokenizer").exists():
        initial.take_tokenizer(Path(config.init_from), folder)
    texts = text_files.JoinedTexts(dataset.train.texts, dataset.label_texts)
    tokenizer = family.tokenizer(options, texts, folder / "tokenizer")
    data = training_data.load(options, dataset, entry, tokenizer)
    if meta is None:
        for line in training_data.lost(options.max_length, data, tokenizer):
            warned = line.removeprefix("warning: ")
            logging.log(logging.INFO if warned == line else logging.WARNING, "%s", warned)
    built = family.build(options, folder, data, tokenizer)
    weights = built.weights
    if config.get("init_from") and not checkpoints.steps(folder):
        weights = initial.take_weights(Path(config.init_from), family.transfers, built)
    run = Run(
        options=options,
        folder=folder,
        data=built.data,
        system=built.system,
        source=built.system.source(built.data),
        stages=family.stages(options, resolved.epochs if meta is None else meta["epochs"]),
    )
    return Start(run, resolved, weights, meta, built.description, built.summary, source)


def _keep_labels(run: Run) -> None:
    """Write the label texts, unless they are there."""
    texts, path, crc32 = run.data.dataset.label_texts, run.folder / "labels", 0
    for block in text_files.encoded_blocks(texts):
        crc32 = zlib.crc32(block, crc32)
    written = files.checksums(run.folder, path.name)
    if not written or written[path.name][1] != crc32:
        text_files.write_lines(path, texts)


def _keep_frequency(run: Run) -> None:
    """Write what a tail weight needs, for predictions that do not read the data."""
    labels = run.data.dataset.train.labels
    frequency, points = label_frequency(labels).astype(np.int32), labels.shape[0]
    try:
        kept, kept_points = open_runs.read_frequency(run.folder)
        same = kept_points == points and np.array_equal(kept, frequency)
    except workdir.WorkdirError:
        same = False
    if not same:
        with files.replacing(run.folder / open_runs.FREQUENCY, binary=True) as file:
            np.savez(file, frequency=frequency, points=points)


def _begin(begun: Start, given: dict[str, Any]) -> None:
    """Say what will be done, check memory, settle the number of epochs, write ``meta.json``."""
    run, config, data = begun.run, begun.config, begun.run.data
    shapes = run.source.shapes
    print(
        f"{data.dataset.name}: {len(data.rows):,} training rows, {data.num_labels:,} labels, "
        f"{begun.summary}, {shapes.queries} queries and "
        f"{shapes.labels} labels a batch, {shapes.steps:,} steps an epoch"
    )
    for line in device_memory.state(run, config):
        print(line)
    epochs = config.epochs
    if config.max_minutes > 0:
        fitting = _epochs_in_budget(run, begun.weights, config.max_minutes)
        if fitting < epochs:
            print(
                f"{fitting} epochs are trained: more do not fit in {config.max_minutes:g} minutes"
            )
        else:
            print(
                f"{epochs} epochs are trained, as config.epochs says; "
                f"{config.max_minutes:g} minutes would be enough for {fitting}"
            )
        epochs = min(epochs, fitting)
    family = settings.family_of(config)
    config.update(family.scaled(config.to_dict(), epochs))
    run.stages = family.stages(run.options, epochs)
    meta = {
        "format": upgrades.FORMAT,
        "config": given,
        "resolved": config.to_dict(),
        "epochs": epochs,
        "encoder": begun.description,
        "num_labels": data.num_labels,
        "entry": dataclasses.asdict(data.entry),
        "data": {"digest": data.dataset.digest, "folder": str(begun.source.absolute())},
        "versions": workdir.versions(),
        "device": str(jax.devices()[0]),
    }
    begun.meta = workdir.begin(run.folder, meta)


def _epochs_in_budget(run: Run, weights: Weights, minutes: float) -> int:
    """Time some steps and an evaluation's embedding on a throw-away state."""
    weights = jax.tree.map(lambda x: jax.numpy.array(x, copy=True), weights)
    state = run.system.first_state(run.data, weights, measure=True)
    times: list[float] = []
    # The last stage of those that train everything: a model may get parts on the way.
    slowest = [stage for stage in run.stages if stage.trains == "all"] or run.stages
    stage = slowest[-1]
    step = run.step(stage)
    for number, (batch, _, _) in enumerate(run.source.ahead(stage, stage.first, 0)):
        step.compile(state, batch)
        started = time.perf_counter()
        state, parts = step(state, batch, 1.0)
        jax.block_until_ready(parts)
        times.append(time.perf_counter() - started)
        if number == 8:
            break
    tokens = run.data.label_tokens
    sample = np.arange(min(4096, len(tokens)))
    # The state was first, so that its weights are whole; the copy went with the steps.
    embed = lambda: run.system.embed_some(state.weights, tokens, sample)
    embed()
    started = time.perf_counter()
    embed()
    texts = len(tokens) + (len(run.data.held_out.rows) if run.data.held_out else 0)
    evaluation_seconds = (time.perf_counter() - started) * texts / len(sample)
    return settings.epochs_in(
        minutes,
        step=statistics.median(times),
        steps_per_epoch=run.source.shapes.steps,
        evaluation=evaluation_seconds,
        every=min(run.options.eval_epochs, run.options.refresh_epochs),
    )
