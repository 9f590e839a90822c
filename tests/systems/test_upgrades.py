"""What ``meta.json`` of each format becomes; a later one is refused."""

from __future__ import annotations

import copy
import json

import pytest

from xmc_jax.runs import open_runs
from xmc_jax.systems import upgrades
from xmc_jax.training import workdir

OLD = {"config": {"seed": 0}, "resolved": {"seed": 0}, "epochs": 2}


def test_without_a_format_what_came_later_is_filled_in():
    given = copy.deepcopy(OLD)
    expected = {"seed": 0, "family": "unidec", "tail_weight": 0.0, "share_of": "texts"}
    expected |= {"reading": {"version": 1}, "retrieval": {"enabled": False}, "unseen_weight": 0.0}
    assert upgrades.upgrade(given) == {**OLD, "resolved": expected, "format": upgrades.FORMAT}
    assert given == OLD  # it is not changed


def test_without_a_format_what_is_there_stays():
    resolved = {"family": "frugal", "tail_weight": 0.5, "clusters": {"size": 4}}
    made = upgrades.upgrade({**OLD, "resolved": resolved})["resolved"]
    later = {"share_of": "texts", "reading": {"version": 1}, "retrieval": {"enabled": False}}
    assert made == {**resolved, "clusters": {"size": 4, "weight": 1.0}, **later}
    weighted = {**resolved, "clusters": {"weight": 0.2}, "share_of": "rows", "reading": {}}
    weighted["retrieval"] = {"enabled": True}
    assert upgrades.upgrade({**OLD, "resolved": weighted})["resolved"] == weighted


def test_vocabularies_were_lower_cased_and_without_marks():
    resolved = {"encoder": {"dim": 4}}
    made = upgrades.upgrade({**OLD, "resolved": resolved})["resolved"]
    assert made["encoder"] == {"dim": 4, "lower": True, "strip_accents": True}


def test_format_3_lacks_retrieval_alone():
    resolved = {"family": "frugal", "reading": {}}
    made = upgrades.upgrade({**OLD, "resolved": resolved, "format": 3})
    expected = {**resolved, "retrieval": {"enabled": False}}
    assert made == {**OLD, "resolved": expected, "format": upgrades.FORMAT}


def test_this_format_is_taken_as_it_is():
    meta = {**OLD, "resolved": {"family": "frugal", "clusters": {}}, "format": upgrades.FORMAT}
    assert upgrades.upgrade(meta) == meta


def test_a_later_format_is_refused(tmp_path):
    later = {**OLD, "format": upgrades.FORMAT + 1}
    (tmp_path / "meta.json").write_text(json.dumps(later))
    said = rf"format {upgrades.FORMAT + 1}, .* knows {upgrades.FORMAT}: .* later version"
    for use in (
        lambda: upgrades.upgrade(later),
        lambda: open_runs.open_run(tmp_path),
        lambda: workdir.claim(tmp_path, OLD["config"], upgrade=upgrades.upgrade),
    ):
        with pytest.raises(ValueError, match=said):
            use()


def test_a_run_that_goes_on_is_upgraded(tmp_path):
    (tmp_path / "meta.json").write_text(json.dumps(OLD))
    claimed = workdir.claim(tmp_path, OLD["config"], upgrade=upgrades.upgrade)
    assert claimed == upgrades.upgrade(OLD)
    assert json.loads((tmp_path / "meta.json").read_text()) == OLD  # nothing is written for it
