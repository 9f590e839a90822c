"""Charts of a label's neighbours: the right numbers, a readable terminal, a picture."""

from __future__ import annotations

import importlib.util
import sys

import numpy as np
import pytest
import tiny
from scipy.sparse import csr_matrix

from xmc_jax.data.dataset import Split, make_dataset
from xmc_jax.data.summaries import label_charts

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


@pytest.fixture
def dataset():
    rows = [[0, 1], [0, 1], [0, 1, 2], [0, 3], [3], [0, 2]]
    labels = np.zeros((6, 5), np.float32)
    for row, ids in enumerate(rows):
        labels[row, ids] = 1
    pairs = np.zeros((0, 2), np.int64)
    train = Split([f"point {i}" for i in range(6)], csr_matrix(labels), pairs)
    texts = ["Fir", "oak", "pine " * 20, "$el_m^", "yew"]
    return make_dataset("trees", train, train.take([0]), texts)


def test_neighbours_are_conditionals_strongest_first(dataset):
    fir, elm, yew = label_charts.find(dataset, [" fir", "$EL_M^", "4"])
    assert (fir.label, fir.points, elm.points, yew.points) == ("Fir", 5, 2, 0)
    assert fir.texts == ["oak", "pine " * 20, "$el_m^"]
    np.testing.assert_allclose(fir.shares, [3 / 5, 2 / 5, 1 / 5])
    assert elm.texts == ["Fir"] and elm.shares == [0.5]
    assert yew.texts == [] and not yew.shares.size
    assert label_charts.find(dataset, ["fir"], depth=1)[0].texts == ["oak"]
    assert [one.points for one in label_charts.find(dataset, [])] == [5, 3, 2, 2]


def test_terminal(dataset):
    lines = label_charts.lines(label_charts.find(dataset, ["Fir", "yew"]), delta=0.3)
    assert lines[0] == "Fir (5 training points)"
    assert lines[1].endswith(" 0.60 " + "█" * 24) and lines[3].endswith(" 0.20 " + "░" * 8)
    assert "pine pine" in lines[2] and "…" in lines[2]
    assert lines[4:] == ["yew (0 training points)", "  stands with no other label"]


def test_unknown_labels(dataset):
    with pytest.raises(ValueError, match=r"no label 'oaks' among 5; .* Near ones: oak\."):
        label_charts.find(dataset, ["oaks"])
    with pytest.raises(ValueError, match="no label '5' among 5"):
        label_charts.find(dataset, ["5"])


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="matplotlib is an optional extra")
def test_picture(dataset, tmp_path):
    found = label_charts.find(dataset, ["Fir", "$el_m^", "yew"])
    label_charts.save_png(found, tmp_path / "labels.png")
    assert (tmp_path / "labels.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["labels.png"]


def test_picture_without_matplotlib(dataset, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"pip install 'xmc_jax\[plots\]'"):
        label_charts.save_png(label_charts.find(dataset, ["Fir"]), tmp_path / "labels.png")
    assert not list(tmp_path.iterdir())


def test_binary():
    done = tiny.run("inspect_labels", "--data=wordnet-mini", "--labels=7|0", "--depth=3")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sum("training points)" in line for line in lines) == 2 and len(lines) <= 8
    done = tiny.run("inspect_labels", "--data=wordnet-mini", "--labels=no such thing")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "no label 'no such thing' among 1,858" in done.stderr
