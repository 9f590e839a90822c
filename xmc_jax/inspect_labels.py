"""Show which labels stand together with chosen ones: what Gandalf's soft targets are made of.

python -m xmc_jax.inspect_labels --data=wordnet-mini --labels="LABEL|LABEL" --output=labels.png
"""

from __future__ import annotations

from pathlib import Path

from absl import flags

from xmc_jax.host import console

_DATA = flags.DEFINE_string(
    "data", None, "Folder, one .jsonl/.tsv/.csv file, or catalog name.", required=True
)
_LABELS = flags.DEFINE_string(
    "labels", "", "Texts of labels or their numbers, | between them; '' = the most frequent ones."
)
_OUTPUT = flags.DEFINE_string("output", "", "Picture (.png) to write; '' = terminal only.")
_DEPTH = flags.DEFINE_integer("depth", 10, "Neighbours of a label.", lower_bound=1)


def main(argv: list[str]) -> None:
    """Parse flags, make one call, print the bars."""
    from xmc_jax.data.readers import formats
    from xmc_jax.data.summaries import label_charts

    del argv
    console.setup()
    try:
        dataset = formats.load(formats.find_folder(_DATA.value))
        names = _LABELS.value.split("|")
        charts = label_charts.find(dataset, [name for name in names if name], depth=_DEPTH.value)
        print("\n".join(label_charts.lines(charts)))
        if _OUTPUT.value:
            label_charts.save_png(charts, Path(_OUTPUT.value))
            print(f"picture: {_OUTPUT.value}")
    except (ValueError, OSError) as error:
        console.fail(error)


if __name__ == "__main__":
    console.run(main)
