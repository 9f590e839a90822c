"""Label texts for texts never seen.

python -m xmc_jax.predict --workdir=runs/unidec-wordnet-mini --input=texts.txt --output=out.jsonl
"""

from __future__ import annotations

from pathlib import Path

from absl import flags

from xmc_jax.host import console, streams

_WORKDIR = flags.DEFINE_string("workdir", None, "Work directory of a run.", required=True)
_INPUT = flags.DEFINE_string("input", "-", "Texts, one a line, or rows as for prepare; - = stdin.")
_OUTPUT = flags.DEFINE_string("output", "-", "JSON Lines; - = standard output.")
_K = flags.DEFINE_integer("k", 10, "Labels a text.", lower_bound=1)
_HEAD = flags.DEFINE_string("head", None, "One of the run's heads; default its best.")
_MIN_SCORE = flags.DEFINE_float("min_score", None, "Leave out labels that score less.")
_SAME = flags.DEFINE_bool(
    "exclude_same_text", False, "Leave out the label with the text's own words."
)
_EXPLAIN = flags.DEFINE_bool(
    "explain", False, "Say what scores are made of, and which training points and labels voted."
)
_STEP = flags.DEFINE_integer("step", None, "Checkpoint; default the one chosen on held-out rows.")
_EMBEDDINGS = flags.DEFINE_string("embeddings", "", "Write the texts' vectors to this .npy.")
_NEW_LABELS = flags.DEFINE_string(
    "new_labels", "", "File of more label texts, ranked by text alone."
)
_TAIL = flags.DEFINE_float(
    "tail_weight",
    None,
    "t: rank by score + t ln w, w a label's inverse propensity: above 0 rare labels come earlier. "
    "Default the run's.",
)
console.define_reading(labels=False)
_INDEX = flags.DEFINE_enum("index", "exact", ["exact", "hnsw", "ivf"], "How labels are searched.")


def main(argv: list[str]) -> None:
    """Parse flags, make one call."""
    from xmc_jax import predictor

    del argv
    console.setup()
    try:
        streams.check(_INPUT.value, _OUTPUT.value)
        streams.write_utf_8()  # as JSON Lines are, whatever the locale
        predictor.check_files(_INPUT.value, _OUTPUT.value, _EMBEDDINGS.value)
        loaded = predictor.load(
            Path(_WORKDIR.value),
            new_labels=Path(_NEW_LABELS.value) if _NEW_LABELS.value else None,
            kind=_INDEX.value,
            step=_STEP.value,
            tail_weight=_TAIL.value,
        )
        predictor.predict_file(
            loaded,
            _INPUT.value,
            _OUTPUT.value,
            k=_K.value,
            head=_HEAD.value,
            min_score=_MIN_SCORE.value,
            exclude_same_text=_SAME.value,
            explain=_EXPLAIN.value,
            embeddings=_EMBEDDINGS.value or None,
            **console.reading(),
        )
    except (ValueError, OSError) as error:
        console.fail(error)


if __name__ == "__main__":
    console.run(main)
