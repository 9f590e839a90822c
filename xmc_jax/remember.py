"""Teach a trained run new labelled points, without training; or make it forget them.

python -m xmc_jax.remember --workdir=runs/unidec-wordnet-mini --input=new.tsv
python -m xmc_jax.remember --workdir=runs/unidec-wordnet-mini --forget=1
"""

from __future__ import annotations

from pathlib import Path

from absl import flags

from xmc_jax.host import console

_WORKDIR = flags.DEFINE_string("workdir", None, "Work directory of a run.", required=True)
_INPUT = flags.DEFINE_string("input", "", "Rows of texts and label texts, as for prepare.")
_FORGET = flags.DEFINE_integer("forget", None, "Number of what is to be forgotten.")
console.define_reading()


def main(argv: list[str]) -> None:
    """Parse flags, make one call, print what is remembered."""
    from xmc_jax import predictor

    del argv
    console.setup()
    try:
        if bool(_INPUT.value) == (_FORGET.value is not None):
            raise ValueError("expected one of --input=FILE and --forget=NUMBER.")
        model = predictor.load(Path(_WORKDIR.value))
        if _FORGET.value is not None:
            model.forget(_FORGET.value)
        else:
            predictor.add_file(model, _INPUT.value, **console.reading())
        for number, points in model.remembered.items():
            print(f"{number}: {points} points")
        print(f"{len(model.label_texts) - model.num_known} labels came after training")
    except (ValueError, OSError) as error:
        console.fail(error)


if __name__ == "__main__":
    console.run(main)
