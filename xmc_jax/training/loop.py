"""The training loop: evaluate, save, draw the next batch, step, log."""

from __future__ import annotations

import collections
import dataclasses
import math
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging
from tqdm import tqdm

from xmc_jax.contracts import Batches, Stage, System, TrainState
from xmc_jax.host import allocator
from xmc_jax.host.signals import Interrupted, StopRequests
from xmc_jax.metrics.propensity import inverse_propensity, tail_bonus
from xmc_jax.training import checkpoints, evaluation, refresh
from xmc_jax.training import stages as stage_list
from xmc_jax.training.metrics_log import MetricsLog
from xmc_jax.training.options import TrainingOptions
from xmc_jax.training.state import all_finite, warmup_cosine
from xmc_jax.training.step import CompiledStep
from xmc_jax.training.training_data import TrainingData

CHOSEN_BY = "P@5"  # of held-out rows, best head, filtered
SAVE_SECONDS = 600  # between checkpoints within an epoch


class TrainingError(RuntimeError):
    """Training cannot go on."""


@dataclasses.dataclass
class Run:
    """What the loop works with; made by ``xmc_jax.runs.launch``.

    Attributes:
      options: what the loop reads of the run's options.
      folder: the work directory.
      data: as the system's training reads it.
      system: what differs between families: first state, step, stages, refresh, ranking.
      source: of the batches.
      stages: of the run; together they are its epochs.
    """

    options: TrainingOptions
    folder: Path
    data: TrainingData
    system: System
    source: Batches
    stages: Sequence[Stage]

    def __post_init__(self) -> None:
        self._steps: dict[str, CompiledStep] = {}

    @property
    def epochs(self) -> int:
        """Of all stages."""
        return sum(stage.epochs for stage in self.stages)

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self.epochs * self.source.shapes.steps

    def step(self, stage: Stage) -> CompiledStep:
        """The step of a stage; stages that train the same share one."""
        if stage.trains not in self._steps:
            self._steps[stage.trains] = CompiledStep(self.system.make_step(stage.trains))
        return self._steps[stage.trains]

    def reads(self, step: int) -> int | None:
        """The epoch whose refresh the run must have to go on exactly from a checkpoint."""
        per_epoch = self.source.shapes.steps
        due = refresh.due(self.options, self.stages, step // per_epoch)
        if due is None or step in (due * per_epoch, self.total_steps):
            return None  # it needs none, or makes it from this very state
        return due

    def lacking(self, step: int) -> str | None:
        """What the run would need to go on exactly from a checkpoint, and does not have."""
        due = self.reads(step)
        return None if due is None else refresh.damage(self.folder, due)

    @property
    def num_compiled(self) -> int:
        """Shapes that steps were compiled for."""
        return sum(len(step.compiled) for step in self._steps.values())

    def factor(self, step: int) -> float:
        """Factor of the learning rates after ``step`` steps; it rises and falls in each stage."""
        per_epoch, total = self.source.shapes.steps, self.total_steps
        if len(self.stages) > 1:
            stage = stage_list.at(self.stages, step // per_epoch)
            step, total = step - stage.first * per_epoch, stage.epochs * per_epoch
        return warmup_cosine(
            step, total_steps=total, warmup_steps=round(self.options.lr.warmup * total)
        )


def held_out_score(
    run: Run, state: TrainState, epoch: int
) -> tuple[float | None, dict[str, float]] | None:
    """Score by which the checkpoint is chosen, and the metrics behind it.

    Tables that no stage has trained yet are left out, and a checkpoint from before a stage that
    trains them has no score: it is not the model that was asked for.

    Args:
      run: the run.
      state: after an epoch.
      epoch: which.

    Returns:
      None where there are no held-out rows.
    """
    split = run.data.held_out
    if split is None:
        return None
    until = [stage.trains == "encoder" for stage in run.stages if stage.first <= epoch]
    untrained, later = all(until), len(until) < len(run.stages)
    weights = state.weights._replace(tables={}) if untrained else state.weights
    data, options = run.data, run.options
    propensities = inverse_propensity(data.dataset.train.labels, a=data.entry.a, b=data.entry.b)
    ranker = run.system.ranker(
        weights,
        data.label_tokens,
        bonus=tail_bonus(options.tail_weight, propensities),
        kind="auto",
        seed=options.seed,
    )
    deep = evaluation.depth(split, (1, 3, 5))
    ids, _ = evaluation.predict_split(ranker, split, ranker.heads[0], k=deep)
    measured = evaluation.measure(ids, split, propensities, (1, 3, 5))["filtered"]
    return None if untrained and later else measured[CHOSEN_BY], measured


def train(run: Run, state: TrainState) -> TrainState:
    """Train from ``state`` to the end.

    Args:
      run: what to train on.
      state: where to begin (a fresh state, or a restored one).

    Returns:
      The last state; checkpoints lie in the work directory.

    Raises:
      TrainingError: the loss is not finite.
      Interrupted: SIGTERM, SIGHUP or Ctrl-C; the state was saved first.
    """
    allocator.give_back()  # what reading the data took
    done = int(state.step)
    log = MetricsLog(run.folder, done)
    per_epoch = run.source.shapes.steps
    bar = tqdm(total=run.total_steps, initial=done, desc="training", unit=" steps")
    with StopRequests() as requests, bar:
        loop = _Loop(run, log, bar, requests)
        if checkpoints.info(run.folder, done).get("evaluated"):
            loop.evaluated_step = done  # killed after that save: do not evaluate and log it twice
        for epoch in range(done // per_epoch, run.epochs):
            first = int(state.step) - epoch * per_epoch
            if first == 0:
                state = loop.between_epochs(state, epoch)
            else:
                loop.use_refresh(state, epoch)
            state = loop.epoch(state, epoch, first)
        loop.evaluate_and_save(state, run.epochs)
        loop.stop_if_asked(state)
    logging.info("%d shapes of the step were compiled", run.num_compiled)
    log.close()
    return state


class _Loop:
    """The state of the loop that is not the model's: what was logged, what waits to be read."""

    def __init__(self, run: Run, log: MetricsLog, bar: tqdm, requests: StopRequests) -> None:
        self.run, self.log, self.bar, self.requests = run, log, bar, requests
        self.waiting: collections.deque[tuple[int, dict[str, Any], dict[str, float]]] = (
            collections.deque()
        )
        self.saved_at = time.monotonic()
        self.evaluated_step = -1

    def between_epochs(self, state: TrainState, epoch: int) -> TrainState:
        """Evaluate and save where due, then refresh where due."""
        run, stage = self.run, stage_list.at(self.run.stages, epoch)
        refresh_due = refresh.due(run.options, run.stages, epoch) == epoch
        if epoch and epoch % run.options.eval_epochs == 0:
            self.evaluate_and_save(state, epoch)
        elif epoch and refresh_due:
            self.save(state, epoch)  # a killed refresh begins again from here
        if epoch and stage.first == epoch:
            # Not saved: a function of the state that was, so it is made again if need be.
            before = stage_list.before(run.stages, stage)
            state = run.system.begin_stage(run.data, state, stage, before)
        self.use_refresh(state, epoch)
        return state

    def use_refresh(self, state: TrainState, epoch: int) -> None:
        """Hand the batch source the refresh that serves an epoch, making it if it is due now."""
        run = self.run
        due = refresh.due(run.options, run.stages, epoch)
        if due is None:
            run.source.use(None)
            return
        current = refresh.load(run.folder, due)
        if current is None:
            if lacking := run.lacking(int(state.step)):
                raise TrainingError(
                    f"{lacking}: epoch {epoch} cannot be continued exactly. Run the same command "
                    "again to go back to a checkpoint before that refresh."
                )
            if (run.folder / refresh.FOLDER / str(due)).exists():
                problem = refresh.damage(run.folder, due)
                logging.warning("%s: the refresh is made again", problem)
            current = self._refresh_now(state, epoch)
        refresh.prune(run.folder, {due, *self._refreshes_of_checkpoints()})
        run.source.use(current)

    def _refresh_now(self, state: TrainState, epoch: int) -> refresh.Refresh:
        """Make a refresh; the state was saved before, so that a signal need not wait."""
        run = self.run
        try:
            with self.requests.at_once():
                write = lambda folder: run.system.write_refresh(folder, epoch, run.data, state)
                return refresh.write(run.folder, epoch, write)
        except Interrupted:
            self._say_how_to_continue(state)
            raise

    def _refreshes_of_checkpoints(self) -> set[int | None]:
        """Epochs of the refreshes that a run resumed from any of the checkpoints would read."""
        run = self.run
        infos = [checkpoints.info(run.folder, step) for step in checkpoints.steps(run.folder)]
        epochs = [info["epoch"] for info in infos if "epoch" in info]
        return {refresh.due(run.options, run.stages, epoch) for epoch in epochs}

    def evaluate_and_save(self, state: TrainState, epoch: int) -> None:
        """Held-out metrics, a checkpoint with the score, and no more checkpoints than needed."""
        if self.evaluated_step == int(state.step):
            return
        self.settle(state, epoch - 1)
        started = time.perf_counter()
        measured, score = held_out_score(self.run, state, epoch - 1), None
        if measured is not None:
            score, metrics = measured
            seconds = round(time.perf_counter() - started, 2)
            self.log.write(int(state.step), epoch=epoch, held_out=metrics, seconds=seconds)
            tqdm.write(
                f"epoch {epoch}: held-out "
                + "  ".join(
                    f"{name} {value:.2f}" for name, value in metrics.items() if "P@" in name
                )
            )
        self.save(state, epoch, score, evaluated=True)

    def save(
        self, state: TrainState, epoch: int, score: float | None = None, *, evaluated: bool = False
    ) -> None:
        """Write a checkpoint and remove what is no longer needed."""
        if not evaluated:
            self.settle(state, epoch)
        facts = {"epoch": epoch, "held_out": score, "evaluated": evaluated}
        with self.requests.saving():
            checkpoints.save(self.run.folder, state, facts)
            checkpoints.prune(self.run.folder)
        self.saved_at = time.monotonic()
        if evaluated:
            self.evaluated_step = int(state.step)

    def epoch(self, state: TrainState, epoch: int, first: int) -> TrainState:
        """All steps of an epoch from ``first`` on."""
        seen = np.zeros(self.run.data.num_labels, bool)
        sums: collections.Counter[str] = collections.Counter()
        steps, started = 0, time.perf_counter()
        run, stage = self.run, stage_list.at(self.run.stages, epoch)
        step = run.step(stage)
        for batch, stats, labels in run.source.ahead(stage, epoch, first):
            number = epoch * run.source.shapes.steps + first + steps
            state, parts = step(state, batch, run.factor(number))
            self.waiting.append((number + 1, parts, stats))
            steps += 1
            seen[labels[labels >= 0]] = True
            sums.update(stats)
            self.bar.update()
            if len(self.waiting) > 1:
                self.read_one(epoch, sums["tokens"] / (time.perf_counter() - started))
            self._stop_or_save(state, epoch)
        self.read_all(epoch)
        seconds = time.perf_counter() - started
        pool = {name: value / max(steps, 1) for name, value in sums.items()}
        self.log.write(
            int(state.step),
            epoch=epoch,
            epoch_steps=steps,
            pool=pool,
            labels_seen=int(seen.sum()),
            seconds=round(seconds, 2),
            tokens_per_second=round(sums["tokens"] / seconds),
            queries_per_second=round(steps * run.source.shapes.queries / seconds),
        )
        return state

    def settle(self, state: TrainState, epoch: int) -> None:
        """Wait for all steps, check losses and the state: nothing that is NaN is ever saved."""
        self.read_all(epoch)
        if not all_finite(state):  # the last update may overflow though its loss was a number
            raise self._diverged(int(state.step), epoch, "values in the state that are not finite")

    def read_all(self, epoch: int) -> None:
        """Wait for all steps and check their losses."""
        while self.waiting:
            self.read_one(epoch)

    def read_one(self, epoch: int, tokens_per_second: float = 0.0) -> None:
        """Read the oldest step's losses; they are on their way while the next step runs."""
        number, parts, stats = self.waiting.popleft()
        values = {name: float(value) for name, value in parts.items()}
        if not math.isfinite(values["loss"]) or not math.isfinite(values["gradient_norm"]):
            what = f"loss {values['loss']}, gradient norm {values['gradient_norm']}"
            raise self._diverged(number, epoch, what)
        parts_of_loss = [n.removeprefix("loss_") for n in values if n.startswith("loss_")]
        self.bar.set_postfix_str(
            f"loss {values['loss']:.3f}"
            + "".join(f" {name} {values[f'loss_{name}']:.3f}" for name in parts_of_loss)
            + (f", {tokens_per_second / 1e3:.1f} K tokens/s" if tokens_per_second else ""),
            refresh=False,
        )
        options = self.run.options
        if number % options.log_steps == 0 or number == 1:
            peaks, factor = options.lr, self.run.factor(number - 1)
            rates = {name: factor * getattr(peaks, name) for name in ("encoder", "heads", "table")}
            self.log.write(number, epoch=epoch, **values, lr=rates, pool=stats)

    def _diverged(self, step: int, epoch: int, what: str) -> TrainingError:
        saved = checkpoints.steps(self.run.folder)
        last = f"that of step {saved[-1]} in" if saved else "none in"
        return TrainingError(
            f"step {step} (epoch {epoch}): {what}. Training stopped; the last good checkpoint is "
            f"{last} {self.run.folder / 'checkpoints'}. Lower the learning rates (config.lr) or "
            "set config.lr.clip_norm=1, in a new --workdir."
        )

    def _stop_or_save(self, state: TrainState, epoch: int) -> None:
        if self.requests.signal:
            self.save(state, epoch)
            self.stop_if_asked(state)
        if time.monotonic() - self.saved_at > SAVE_SECONDS:
            self.save(state, epoch)

    def stop_if_asked(self, state: TrainState) -> None:
        """Stop if a signal came; the state has been saved."""
        if self.requests.signal:
            self._say_how_to_continue(state)
            raise Interrupted(128 + self.requests.signal)

    def _say_how_to_continue(self, state: TrainState) -> None:
        tqdm.write(
            f"{signal.Signals(self.requests.signal).name}: step {int(state.step)} of "
            f"{self.run.total_steps} is saved in {self.run.folder}. Run the same command again to "
            "continue."
        )
