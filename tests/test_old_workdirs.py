"""Work directories of commit 6654296 (`tests/workdirs/README.md`): opened, asked, continued."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tiny

from xmc_jax import predictor
from xmc_jax.runs import open_runs
from xmc_jax.training import checkpoints

FIXTURES = Path(__file__).parent / "workdirs"
NAMES = ("unidec", "inceptionxml-lf")
TABLES = {"unidec": "classifier", "inceptionxml-lf": "free_weights"}


@pytest.fixture(params=NAMES)
def old(request, tmp_path, monkeypatch) -> tuple[Path, dict[str, Any]]:
    """A copy of a run, beside its data; and what is expected of it."""
    monkeypatch.setenv("XMC_CACHE", str(tmp_path / "cache"))
    shutil.copy(FIXTURES / "points.tsv", tmp_path)
    shutil.copytree(FIXTURES / request.param, tmp_path / request.param)
    expected = json.loads((FIXTURES / f"expected-{request.param}.json").read_text())
    return tmp_path / request.param, expected


def assert_heads(heads: dict[str, Any], expected: dict[str, Any]) -> None:
    """Metrics are counts of hits: they are the same, but for the order of sums."""
    assert heads.keys() == expected.keys()
    for head, tables in expected.items():
        for kind, metrics in tables.items():
            if isinstance(metrics, dict):
                assert heads[head][kind] == pytest.approx(metrics, abs=1e-6), (head, kind)


def test_opens_evaluates_and_predicts(old):
    folder, expected = old
    fixture = expected["fixture"]
    assert "format" not in json.loads((folder / "meta.json").read_text())
    assert checkpoints.best_step(folder) == fixture["opened"]
    for step, heads in fixture["heads"].items():
        opened = open_runs.open_run(folder, step=int(step))
        evaluated = open_runs.evaluate_run(opened, data=str(folder.parent / "points.tsv"))
        assert_heads(evaluated["heads"], heads)
    model = predictor.load(folder)
    assert tuple(model.heads) == tuple(fixture["predictions"])
    for head, answers in fixture["predictions"].items():
        ids, scores = model.predict_ids(fixture["texts"], k=5, head=head)
        np.testing.assert_array_equal(ids, answers["ids"])
        np.testing.assert_allclose(scores, answers["scores"], atol=2e-6)


def test_is_continued_as_by_its_own_code(old):
    """The losses, the last arrays with the optimiser's, and the evaluation; then it is finished."""
    folder, expected = old
    continued = expected["continued"]
    arguments = [*expected["flags"], f"--data={folder.parent}", f"--workdir={folder}"]
    process = tiny.run("train", *arguments)
    assert process.returncode == 0, process.stderr
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = {str(line["step"]): line["loss"] for line in lines if "loss" in line}
    for step, loss in continued["losses"].items():
        assert losses[step] == pytest.approx(loss, rel=1e-5), step
    assert checkpoints.steps(folder)[-1] == continued["step"]
    arrays = saved_arrays(folder, continued["step"], TABLES[folder.name])
    assert arrays.keys() == continued["arrays"].keys()
    for name, (total, squares) in continued["arrays"].items():
        assert np.square(arrays[name]).sum() == pytest.approx(squares, rel=1e-4, abs=1e-12), name
        room = 1e-4 * np.abs(arrays[name]).sum() + 1e-9  # a sum may be of terms that cancel
        assert arrays[name].sum() == pytest.approx(total, abs=room), name
    (evaluated,) = folder.glob("eval-test-*.json")
    evaluation = json.loads(evaluated.read_text())
    assert evaluation["step"] == continued["evaluation"]["step"]
    assert_heads(evaluation["heads"], continued["evaluation"]["heads"])
    manifest = folder / "checkpoints" / str(continued["step"]) / checkpoints.MANIFEST
    assert json.loads(manifest.read_text())["format"] == checkpoints.FORMAT
    before = manifest.read_bytes()
    again = tiny.run("train", *arguments)
    assert again.returncode == 0, again.stderr
    assert manifest.read_bytes() == before  # there was nothing left to do


def saved_arrays(folder: Path, step: int, table: str) -> dict[str, np.ndarray]:
    """Arrays of a checkpoint, by the names that they had in commit 6654296."""
    with ocp.StandardCheckpointer() as reader:
        read = lambda part: reader.restore((folder / "checkpoints" / str(step) / part).absolute())
        trees = {part: read(part) for part in ("model", "optimizer")}
    arrays = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(trees):
        name = "/".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
        name = name.replace("model/model_state/", "model/params/")
        name = re.sub(f"^model/tables/{table}$", "model/table", name)
        name = name.replace(f"optimizer/tables/{table}/", "optimizer/table_state/")
        arrays[name] = np.asarray(leaf).astype(np.float64)
    return arrays
