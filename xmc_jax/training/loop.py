"""The training loop: evaluate, save, draw the next batch, step, log."""

from __future__ import annotations

import collections
import dataclasses
import math
import signal
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging
from ml_collections import ConfigDict
from tqdm import tqdm

from xmc_jax.host import allocator
from xmc_jax.host.signals import Interrupted, Stopper
from xmc_jax.metrics.propensity import inverse_propensity
from xmc_jax.systems.unidec.ranking import tail_bonus
from xmc_jax.training import checkpoints, evaluation, refresh, stages, workdir
from xmc_jax.training.source import BatchSource
from xmc_jax.training.state import TrainState, all_finite, warmup_cosine
from xmc_jax.training.training_data import TrainingData

CHOSEN_BY = "P@5"  # of held-out rows, best head, filtered
SAVE_SECONDS = 600  # between checkpoints within an epoch


class TrainingError(RuntimeError):
    """Training cannot go on."""


@dataclasses.dataclass
class Run:
    """What the loop works with; made once by ``xmc_jax.runs.launch.start``.

    ``system`` holds what differs between UniDEC (``xmc_jax.systems.unidec.system``) and the frugal
    family (``xmc_jax.systems.frugal.system``): optimiser, step, first state, phases, refresh, ranking.
    """

    config: ConfigDict
    folder: Path
    data: TrainingData
    model: Any
    source: BatchSource
    embedder: Any
    epochs: int
    system: Any

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self.epochs * self.source.steps_per_epoch

    def factor(self, step: int) -> float:
        """Factor of the learning rates after ``step`` steps; it rises and falls in each phase."""
        per_epoch, total = self.source.steps_per_epoch, self.total_steps
        ranges = stages.of(self.config)
        if len(ranges) > 1:
            phase = stages.at(self.config, step // per_epoch)
            step, total = step - phase.first * per_epoch, phase.epochs * per_epoch
        return warmup_cosine(
            step, total_steps=total, warmup_steps=round(self.config.lr.warmup * total)
        )


class CompiledStep:
    """The step, compiled once for each number of packed rows; the shapes are counted."""

    def __init__(self, run: Run) -> None:
        """Build the jitted step; nothing is compiled yet."""
        self.optimizer = run.system.optimizer(run.config)
        self._jitted = run.system.make_step(run, self.optimizer)
        self.compiled: dict[Any, Any] = {}

    def compile(self, state: TrainState, batch: Any) -> Any:
        """The executable for the batch's shapes; ``state`` may be shapes only."""
        leaves, structure = jax.tree.flatten(batch)
        shapes = structure, *(leaf.shape for leaf in leaves)
        if shapes not in self.compiled:
            started = time.perf_counter()
            # Shapes only: a resumed run compiles the same program as one that was not stopped.
            abstract = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state, batch)
            )
            self.compiled[shapes] = self._jitted.lower(*abstract, np.float32(1)).compile()
            logging.info(
                "compiled the step for %d rows in %.1f s (shape %d)",
                batch.tokens.ids.shape[0],
                time.perf_counter() - started,
                len(self.compiled),
            )
        return self.compiled[shapes]

    def __call__(
        self, state: TrainState, batch: Any, factor: float
    ) -> tuple[TrainState, dict[str, Any]]:
        """One step; the state is donated."""
        return self.compile(state, batch)(state, batch, np.float32(factor))


def initial_state(run: Run, params: Any, optimizer: Any, *, table: bool = True) -> TrainState:
    """The state at step 0.

    Args:
      run: the run.
      params: first parameters of the model.
      optimizer: of the parameters.
      table: False leaves at zero what takes time (to measure a step before the real start).
    """
    return run.system.initial_state(run, params, optimizer, table=table)


def held_out_score(run: Run, state: TrainState) -> tuple[float, dict[str, float]] | None:
    """Score by which the checkpoint is chosen, and the metrics behind it."""
    split = run.data.held_out
    if split is None:
        return None
    weights = _inverse_propensity(run.data)
    ranker = run.system.ranker(
        *(run.embedder, state.params, state.table, run.data.label_tokens),
        bonus=tail_bonus(run.config.tail_weight, weights),
        kind="auto",
        seed=run.config.seed,
    )
    deep = evaluation.depth(split, (1, 3, 5))
    ids, _ = evaluation.predict_split(ranker, split, ranker.heads[0], k=deep)
    found = evaluation.report(ids, split, weights, (1, 3, 5))["filtered"]
    return found[CHOSEN_BY], found


def _inverse_propensity(data: TrainingData) -> np.ndarray:
    return inverse_propensity(data.dataset.train.labels, a=data.entry.a, b=data.entry.b)


def train(run: Run, state: TrainState, step: CompiledStep) -> TrainState:
    """Train from ``state`` to the end.

    Args:
      run: what to train on.
      state: where to begin (a fresh state, or a restored one).
      step: the compiled step.

    Returns:
      The last state; checkpoints lie in the work directory.

    Raises:
      TrainingError: the loss is not finite.
      Interrupted: SIGTERM or Ctrl-C; the state was saved first.
    """
    allocator.give_back()  # what reading the data took
    done = int(state.step)
    log = workdir.MetricsLog(run.folder, done)
    per_epoch = run.source.steps_per_epoch
    bar = tqdm(total=run.total_steps, initial=done, desc="training", unit=" steps")
    with Stopper() as stopper, bar:
        loop = _Loop(run, step, log, bar, stopper)
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
    logging.info("%d shapes of the step were compiled", len(step.compiled))
    log.close()
    return state


class _Loop:
    """The state of the loop that is not the model's: what was logged, what waits to be read."""

    def __init__(self, run: Run, step: CompiledStep, log: Any, bar: Any, stopper: Stopper) -> None:
        self.run, self.step, self.log, self.bar, self.stopper = run, step, log, bar, stopper
        self.waiting: collections.deque[tuple[int, dict[str, Any], dict[str, float]]] = (
            collections.deque()
        )
        self.saved_at = time.monotonic()
        self.evaluated_step = -1

    def between_epochs(self, state: TrainState, epoch: int) -> TrainState:
        """Evaluate and save where due, then refresh where due."""
        config = self.run.config
        refresh_due = refresh.due(config, epoch) == epoch
        if epoch and epoch % config.eval_epochs == 0:
            self.evaluate_and_save(state, epoch)
        elif epoch and refresh_due:
            self.save(state, epoch)  # a killed refresh begins again from here
        if epoch and stages.at(config, epoch).first == epoch:
            # Not saved: a function of the state that was, so it is made again if need be.
            state = self.run.system.begin_phase(self.run, state, self.step.optimizer, epoch)
        self.use_refresh(state, epoch)
        return state

    def use_refresh(self, state: TrainState, epoch: int) -> None:
        """Hand the batch source the refresh that serves an epoch, making it if it is due now."""
        run = self.run
        due = refresh.due(run.config, epoch)
        if due is None:
            run.source.use(None)
            return
        found = refresh.load(run.folder, due)
        if found is None:
            if due != epoch:
                raise TrainingError(
                    f"{run.folder / 'refresh' / str(due)} is missing: epoch {epoch} cannot be "
                    "resumed exactly. Remove the newest checkpoints to go back before that refresh."
                )
            found = self._refresh_now(state, epoch)
        refresh.prune(run.folder, {due, *self._refreshes_of_checkpoints()})
        run.source.use(found)

    def _refresh_now(self, state: TrainState, epoch: int) -> refresh.Refresh:
        """Make a refresh; the state was saved before, so that a signal need not wait."""
        run = self.run
        try:
            with self.stopper.at_once():
                return run.system.refresh(run, state, epoch)
        except Interrupted:
            self._say_how_to_continue(state)
            raise

    def _refreshes_of_checkpoints(self) -> set[int | None]:
        """Epochs of the refreshes that a run resumed from any of the checkpoints would read."""
        folder = self.run.folder
        infos = [checkpoints.info(folder, step) for step in checkpoints.steps(folder)]
        return {refresh.due(self.run.config, info["epoch"]) for info in infos if "epoch" in info}

    def evaluate_and_save(self, state: TrainState, epoch: int) -> None:
        """Held-out metrics, a checkpoint with the score, and no more checkpoints than needed."""
        if self.evaluated_step == int(state.step):
            return
        self.settle(state, epoch - 1)
        started = time.perf_counter()
        found = held_out_score(self.run, state)
        score = None
        if found is not None:
            score, metrics = found
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
        for batch, stats, labels in self.run.source.ahead(epoch, first):
            number = epoch * self.run.source.steps_per_epoch + first + steps
            state, parts = self.step(state, batch, self.run.factor(number))
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
            queries_per_second=round(steps * self.run.source.batch_size / seconds),
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
        if number % self.run.config.log_steps == 0 or number == 1:
            rate = self.run.factor(number - 1)
            rates = {
                "encoder": rate * self.run.config.lr.encoder,
                "heads": rate * self.run.config.lr.heads,
                "table": rate * self.run.config.lr.table,
            }
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
        if self.stopper.signal:
            self.save(state, epoch)
            self.stop_if_asked(state)
        if time.monotonic() - self.saved_at > SAVE_SECONDS:
            self.save(state, epoch)

    def stop_if_asked(self, state: TrainState) -> None:
        """Stop if a signal came; the state has been saved."""
        if self.stopper.signal:
            self._say_how_to_continue(state)
            raise Interrupted(128 + self.stopper.signal)

    def _say_how_to_continue(self, state: TrainState) -> None:
        tqdm.write(
            f"{signal.Signals(self.stopper.signal).name}: step {int(state.step)} of "
            f"{self.run.total_steps} is saved in {self.run.folder}. Run the same command again to "
            "continue."
        )
