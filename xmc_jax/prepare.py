"""Check a data set, see what it is made of, and write the form that training reads fastest.

python -m xmc_jax.prepare --input=PATH --output=DIR
"""

from __future__ import annotations

from absl import flags

from xmc_jax.host import console

_INPUT = flags.DEFINE_string(
    "input", None, "Folder, one .jsonl/.tsv/.csv file, or catalog name.", required=True
)
_OUTPUT = flags.DEFINE_string("output", "", "New folder for the canonical form; '' = only check.")
_TEXT = flags.DEFINE_enum(
    "text", "", ["", "title", "title+content"], "What a text is made of; '' = as the catalog says."
)

_PROPENSITY = console.define_propensity()
console.define_reading()


def main(argv: list[str]) -> None:
    """Parse flags, make one call, print the report."""
    from xmc_jax.data.readers.reading import Reading
    from xmc_jax.data.summaries import summary

    del argv
    console.setup()
    try:
        reading = Reading.of(console.reading())
        for line in summary.prepare(
            _INPUT.value,
            _OUTPUT.value,
            text=_TEXT.value,
            reading=reading,
            propensity=_PROPENSITY.value,
        ):
            print(line, flush=True)
    except (ValueError, OSError) as error:
        console.fail(error)


if __name__ == "__main__":
    console.run(main)
