"""Equal steps, pictures and predictions of the experiments with Gandalf."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import types

import numpy as np
import pytest
import tiny
from ledger_rows import made
from scipy.sparse import csr_matrix

from experiments import (
    equal_steps,
    figure_gandalf_bins,
    figure_gandalf_share,
    ledger,
    pictures,
    table_label_texts,
    table_predictions,
)
from experiments.ledger import FRUGAL, Row
from experiments.table_gandalf import TABLE as GANDALF
from experiments.table_systems import TABLE as SYSTEMS
from experiments.table_systems import UNIDEC_STEPS
from xmc_jax.data import splits
from xmc_jax.runs import launch, open_runs
from xmc_jax.training import augmentation
from xmc_jax.training.training_data import EvaluationSplit

OF_GANDALF = (SYSTEMS, GANDALF, figure_gandalf_share.TABLE)
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


def test_rows_with_and_without_gandalf_make_as_many_steps():
    for table in OF_GANDALF:
        for row in table.rows:
            steps = equal_steps.STEPS if row.config == FRUGAL else UNIDEC_STEPS
            assert row.by_data.keys() == (set(row.only) or steps.keys())
            for dataset in row.by_data:
                config = ledger.configuration(dataset, row, 0)
                epoch = equal_steps.steps_per_epoch(config)
                assert abs(config.epochs * epoch - steps[dataset]) <= epoch / 2, (row, dataset)
                if config.gandalf == {**config.gandalf, "points": "all", "share": 1.0}:
                    assert abs(config.epochs * epoch / steps[dataset] - 1) < 0.02
                apart = epoch * config.refresh_epochs
                assert apart <= config.epochs * epoch and config.eval_epochs * epoch == apart


@pytest.mark.parametrize(
    "options",
    [
        *({}, {"enabled": True}, {"enabled": True, "points": "labels"}),
        *({"enabled": True, "points": "sample"}, {"enabled": True, "share": 0.5}),
        {"enabled": True, "skip_labels_that_are_points": True},
    ],
)
def test_steps_of_an_epoch_are_those_of_the_data(options, tmp_path, mini):
    config = mini.config.copy_and_resolve_references()
    config.batch_size = 8
    config.gandalf.update(options)
    rows = augmentation.augment(tiny.options(config), mini.run.data).rows
    assert equal_steps.steps_per_epoch(config) == -(-len(rows) // 8)


def test_labels_that_are_points_are_counted(mini):
    dataset = mini.run.data.dataset
    points, labels = splits.text_codes(dataset.train.texts, dataset.label_texts)
    number = equal_steps.LABELS_THAT_ARE_POINTS["LF-WordNetTitles-Mini"]
    assert np.isin(labels, points).sum() == number


@pytest.fixture(scope="module")
def mini(tmp_path_factory):
    """The bundled data before the first step."""
    config = ledger.configuration("wordnet-mini", Row("x", {"batching": "random"}), 0)
    return launch.prepare(config, tmp_path_factory.mktemp("mini"), None)


def gandalf_rows(dataset="wordnet-mini"):
    """Ledger rows of all that the pictures need, two seeds; values differ by row and seed."""
    rows = []
    for number, row in enumerate([*SYSTEMS.rows, *figure_gandalf_share.TABLE.rows]):
        for seed in (0, 1) if row.fits(dataset) else ():
            bins = [
                {"bin": b, "labels": 10**b, "mean_frequency": 9.0 / b, "value": number + seed + b}
                for b in range(1, 6)
            ]
            made_row = made(row, seed, number + seed, dataset)
            figures = made_row["metrics"]["concat"]
            curve = [{"steps": s, "P@1": s + seed, "PSP@5": 2.0 * s} for s in (10, 20)]
            made_row["metrics"] = {"concat": figures, "clf": figures}
            rows.append({**made_row, "bins": {"concat": bins, "clf": bins}, "held_out": curve})
    return rows


def test_bins_are_means_over_seeds_of_what_the_ledger_holds():
    rows = gandalf_rows()
    found = figure_gandalf_bins.bins(rows, "wordnet-mini", "unidec", gandalf=True)
    place = [row.name for row in SYSTEMS.rows].index("unidec + Gandalf")
    assert [b["value"] for b in found] == [place + 0.5 + b for b in range(1, 6)]
    text = figure_gandalf_bins.show({"unidec": (found, found)}, "d")
    cells = [f"{place + 0.5 + b:.2f}" for b in (5, 4, 3, 2, 1)]
    assert f"| d | unidec + Gandalf | {' | '.join(cells)} | " in text
    for row in rows:
        row.pop("bins")  # a ledger from before they were kept
    with pytest.raises(ValueError, match=r"no row 'astec' with bins .* --only='astec' --data=DIR"):
        figure_gandalf_bins.bins(rows, "wordnet-mini", "astec", gandalf=False)


def test_shares_and_curves_are_means_over_seeds_of_what_the_ledger_holds():
    rows, share = gandalf_rows(), figure_gandalf_share
    without = share.runs(rows, "wordnet-mini", share.WITHOUT)
    assert share.curve(without, "P@1") == ([10, 20], [10.5, 20.5])
    assert share.curve([{"seed": 0}], "P@1") == ([], [])
    first = len(SYSTEMS.rows)
    percent, values = share.shares(rows, "wordnet-mini", "tail", "P@1")
    # 0 and 100 % are rows of the table of systems too; the newest rows count.
    assert percent == [0, 25, 50, 75, 100] and values == [first + n + 0.5 for n in (0, 4, 5, 6, 7)]
    with pytest.raises(ValueError, match=r"row '25 %, at random' on wordnet-mini is not in"):
        whole = [row for row in rows if row["config"]["gandalf.share"] == 1]
        share.shares(whole, "wordnet-mini", "random", "P@1")


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="matplotlib is an optional extra")
def test_pictures_are_drawn(tmp_path):
    rows, folder = gandalf_rows(), tmp_path / "figures"
    found = {
        system: [
            figure_gandalf_bins.bins(rows, "wordnet-mini", system, gandalf=g) for g in (False, True)
        ]
        for system in ("astec", "unidec")
    }
    one = pictures.save(figure_gandalf_bins.draw(found, "d,x=/y"), "bins", "d,x=/y", folder)
    two = pictures.save(figure_gandalf_share.draw(rows, "wordnet-mini"), "share", "d", folder)
    assert [path.relative_to(tmp_path).as_posix() for path in (one, two)] == [
        "figures/bins-d_x__y.png",
        "figures/share-d.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (one, two))
    assert pictures.links("share", folder) == ["![share-d](figures/share-d.png)"]
    shown = figure_gandalf_share.section(rows, folder)
    assert shown == ""  # none of this script's
    (folder / "figure_gandalf_share-d.png").touch()
    shown = figure_gandalf_share.section(rows, folder)
    assert shown.endswith("\n\n![figure_gandalf_share-d](figures/figure_gandalf_share-d.png)")


def test_without_matplotlib_there_is_a_plain_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"pip install 'xmc_jax\[plots\]'"):
        figure_gandalf_share.draw(gandalf_rows(), "wordnet-mini")


class Ranking:
    """Ranks labels by a matrix of scores."""

    heads = ("clf",)

    def __init__(self, scores):
        self._scores = scores

    def query_vectors(self, tokens, rows, head):
        return self._scores[rows]

    def search(self, vectors, head, k):
        ids = np.argsort(-vectors, axis=1)[:, :k]
        return np.take_along_axis(vectors, ids, 1), ids


def test_top_predictions_leave_out_filter_pairs():
    scores = np.random.default_rng(0).random((6, 9))
    filters = np.array([[1, scores[1].argmax()], [4, scores[4].argmax()], [4, 0], [5, 2]])
    split = EvaluationSplit(None, np.arange(6), csr_matrix((6, 9)), filters)
    for row, ids in zip((4, 1), table_predictions.top(Ranking(scores), split, np.array([4, 1]))):
        left_out = filters[filters[:, 0] == row, 1]
        wanted = [label for label in np.argsort(-scores[row]) if label not in left_out]
        assert ids.tolist() == wanted[:5]


def test_test_points_are_chosen_by_text_number_or_lot():
    texts = ["Oat", "7", "oat milk", "Lunar orbiter"]
    choose = table_predictions.choose
    assert choose(texts, [" oat ", "3", "7"], number=9, seed=0).tolist() == [0, 3, 1]
    drawn = choose(texts, [], number=2, seed=1).tolist()
    assert drawn == choose(texts, [], number=2, seed=1).tolist() and len(set(drawn)) == 2
    assert choose(texts, [], number=9, seed=1).tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"no test point 'rye' among 4"):
        choose(texts, ["rye"], number=1, seed=0)


def test_wrong_predictions_are_marked():
    sides = {"without": [["a|b", True], ["c", False]], "with": [["d", True]]}
    result = {"dataset": "D", "command": "C", "points": [{"text": "x", "labels": 3, **sides}]}
    rows = [{"kind": "table_predictions", "command": "C", "result": result}]
    text = table_predictions.section(rows)
    assert text.endswith("| x (3) | a\\|b<br>✗ c | d |") and text.count("| x (3)") == 1


def test_rows_of_label_texts_are_evaluated_by_themselves(tmp_path):
    source = tiny.write_tsv(tmp_path / "points.tsv", rows=200)
    lines = source.read_text().splitlines()
    labels = sorted({label for line in lines for label in line.split("\t")[1].split("|")})
    lines += [f"{a}\t{b}" for a, b in itertools.pairwise(labels)]  # bear a label's text
    source.write_text("\n".join(lines) + "\n")
    for name, gandalf in (("a", False), ("b", True)):
        config = tiny.frugal_config("astec", source, **{"gandalf.enabled": gandalf})
        launch.start(config, tmp_path / name)
    options = types.SimpleNamespace(data="")
    result = table_label_texts.compare(tmp_path / "a", tmp_path / "b", options)
    opened = open_runs.open_run(tmp_path / "b")
    opened.load_data("")
    texts, labels = opened.data.dataset.test.texts, opened.data.dataset.label_texts
    own = [text.casefold() in {label.casefold() for label in labels} for text in texts]
    kinds = list(result["kinds"].values())
    assert 0 < sum(own) < len(own)
    assert [kind["rows"] for kind in kinds] == [sum(own), len(own) - sum(own)]
    whole = open_runs.evaluate_run(opened)["heads"]["clf"]["filtered"]["P@5"]
    parts = [(k["rows"], k["metrics"]["with Gandalf"]["P@5"]) for k in kinds]
    assert sum(n * value for n, value in parts) / len(own) == pytest.approx(whole)
    assert kinds[1]["metrics"][table_label_texts.LOOKUP]["P@1"] == 0
    text = table_label_texts.section(
        [{"kind": "table_label_texts", "command": "C", "result": {**result, "command": "C"}}]
    )
    assert f"| no label's text ({100 * kinds[1]['rows'] / len(own):.1f} %) | " in text
    with pytest.raises(ValueError, match=r"--without=.*: expected a run with config.gandalf"):
        table_label_texts.compare(tmp_path / "b", tmp_path / "b", options)
