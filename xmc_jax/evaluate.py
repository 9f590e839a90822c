"""Evaluate a trained run.

python -m xmc_jax.evaluate --workdir=runs/unidec-wordnet-mini
"""

from __future__ import annotations

from pathlib import Path

from absl import flags

from xmc_jax.host import console

_WORKDIR = flags.DEFINE_string("workdir", None, "Work directory of a run.", required=True)
_SPLIT = flags.DEFINE_enum("split", "test", ["test", "held_out"], "Rows to evaluate.")
_HEAD = flags.DEFINE_string("head", None, "One of the run's heads; default all there are.")
_INDEX = flags.DEFINE_enum("index", "exact", ["exact", "hnsw", "ivf"], "How labels are searched.")
_KS = flags.DEFINE_list("ks", ["1", "3", "5"], "Cut-offs.")
_STEP = flags.DEFINE_integer("step", None, "Checkpoint; default the one chosen on held-out rows.")
_TAIL = flags.DEFINE_float(
    "tail_weight",
    None,
    "t: rank by score + t ln w, w a label's inverse propensity: above 0 rare labels come earlier. "
    "Default the run's.",
)
_PROPENSITY = console.define_propensity()
_DATA = flags.DEFINE_string("data", "", "Where the data set is now, if it was moved.")
_FULL = flags.DEFINE_bool(
    "full", False, "Print all metrics, not only those that fit in 100 columns."
)
_SAVE = flags.DEFINE_string(
    "save_predictions", "", "Write ids and scores of the heads to this .npz."
)


def main(argv: list[str]) -> None:
    """Parse flags, make one call, print the result."""
    from xmc_jax.runs import open_runs, result_tables

    del argv
    console.setup()
    try:
        if not all(k.isdigit() and int(k) > 0 for k in _KS.value):
            raise ValueError(f"--ks={','.join(_KS.value)}: expected numbers such as 1,3,5.")
        ks = tuple(int(k) for k in _KS.value)
        opened = open_runs.open_run(Path(_WORKDIR.value), step=_STEP.value, tail_weight=_TAIL.value)
        result, thresholds, number = open_runs.evaluate_and_save(
            opened,
            split=_SPLIT.value,
            heads=(_HEAD.value,) if _HEAD.value else None,
            kind=_INDEX.value,
            ks=ks,
            data=_DATA.value,
            propensity=_PROPENSITY.value,
            save_predictions=_SAVE.value,
        )
    except (ValueError, OSError) as error:
        console.fail(error)
    print(result_tables.table(result, full=_FULL.value))
    print(result_tables.threshold_table(thresholds, next(iter(result["heads"])), number))


if __name__ == "__main__":
    console.run(main)
