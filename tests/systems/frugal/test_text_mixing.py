"""MixUp, Label-MixUp and synonyms, against plain loops; in batches, and in whole runs."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import test_source as sources
import test_step as steps
import tiny

from xmc_jax.runs import launch, settings
from xmc_jax.systems.frugal import family, text_mixing
from xmc_jax.systems.frugal.source import make_source
from xmc_jax.systems.frugal.step import frugal_loss

Q, P, C = 6, 9, 4


def drawn(rng: np.random.Generator):
    """Targets, mask and clusters of six slots, the last of which holds no query."""
    queries = np.array([4, 8, 1, 3, 7, -1])
    where = rng.random((Q, P)) < 0.8
    where[:, 0] = True
    where[-1] = False
    targets = (rng.random((Q, P)) < 0.3) & where
    targets[:-1, 0] = True
    clusters = rng.random((Q, C)) < 0.4
    clusters[-1] = False
    return queries, targets, where, clusters


def test_mixup_against_a_plain_loop():
    queries, targets, where, clusters = drawn(np.random.default_rng(0))
    partners = set()
    for seed in range(20):
        mix = text_mixing.mixup(np.random.default_rng(seed), queries, targets, where, clusters)
        assert sorted(mix.partners[:-1]) == list(range(Q - 1)) and mix.partners[-1] == Q - 1
        assert not mix.where[-1].any() and (mix.shares >= 0).all() and (mix.shares <= 1).all()
        for i, (j, share) in enumerate(zip(mix.partners, mix.shares)):
            for p in range(P):
                expected = share * targets[i, p] + (1 - share) * targets[j, p]
                assert mix.targets[i, p] == pytest.approx(expected, abs=1e-6)
                assert mix.where[i, p] == (where[i, p] and where[j, p])
            for c in range(C):
                expected = share * clusters[i, c] + (1 - share) * clusters[j, c]
                assert mix.cluster_targets[i, c] == pytest.approx(expected, abs=1e-6)
        partners.update(enumerate(mix.partners.tolist()))
    assert len(partners) > 4 * (Q - 1) - 3  # everybody meets nearly everybody


def test_label_mixup_against_a_plain_loop():
    _, targets, where, clusters = drawn(np.random.default_rng(1))
    of_columns = np.array([0, 1, 2, 3, 0, 1, 2, 3, 0])
    seen = np.zeros((Q, P))
    for seed in range(300):
        mix, columns = text_mixing.label_mixup(
            np.random.default_rng(seed), targets, where, clusters, of_columns
        )
        np.testing.assert_array_equal(mix.partners, np.arange(Q) + Q)
        np.testing.assert_array_equal(mix.where, where)
        assert columns[-1] == -1
        for i, (column, share) in enumerate(zip(columns[:-1], mix.shares)):
            assert targets[i, column]
            seen[i, column] += 1
            own = np.arange(P) == column
            expected = share * targets[i] + (1 - share) * own
            np.testing.assert_allclose(mix.targets[i], expected, atol=1e-6)
            cluster = np.arange(C) == of_columns[column]
            expected = share * clusters[i] + (1 - share) * cluster
            np.testing.assert_allclose(mix.cluster_targets[i], expected, atol=1e-6)
    for row, positives in zip(seen[:-1], targets[:-1]):  # drawn evenly
        assert abs(row[positives] - 300 / positives.sum()).max() < 60


def test_shares_are_beta():
    _, targets, where, clusters = drawn(np.random.default_rng(2))
    shares = np.concatenate(
        [
            text_mixing.mixup(
                np.random.default_rng(s), np.arange(Q), targets, where, clusters
            ).shares
            for s in range(500)
        ]
    )
    assert abs(shares.mean() - 0.5) < 0.03
    alpha = text_mixing.ALPHA  # variance of Beta(a, a): 1 / (4 (2 a + 1))
    assert shares.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.05)


def test_synonyms_are_the_nearest_tokens():
    rng = np.random.default_rng(3)
    table = rng.normal(size=(40, 6)).astype(np.float32)
    table[7], table[8] = 3 * table[6], 2 * table[6]  # the same direction
    there = rng.random(40) < 0.8
    there[6:9] = True
    found = text_mixing.synonyms(table, there)
    unit = table / np.linalg.norm(table, axis=1, keepdims=True)
    for token, near in enumerate(found):
        if not there[token]:
            assert (near == token).all()
            continue
        scores = np.where(there, unit @ unit[token], -np.inf)
        scores[token] = -np.inf
        best = np.sort(scores)[::-1][: text_mixing.NEIGHBOURS]
        assert token not in near and len(set(near.tolist())) == text_mixing.NEIGHBOURS
        np.testing.assert_allclose(np.sort(scores[near])[::-1], best, atol=1e-5)
    few = text_mixing.synonyms(table, np.arange(40) < 3)
    assert sorted(few[0].tolist()) == [0, 0, 0, 1, 2]  # itself, where there are no more


def test_a_tenth_of_the_tokens_is_replaced():
    rng = np.random.default_rng(4)
    ids = rng.integers(0, 20, 20_000).astype(np.uint16)
    near = (np.arange(20)[:, None] + np.arange(1, 6)) % 20
    found = text_mixing.replace(rng, ids, near)
    assert found.dtype == np.uint16
    changed = found != ids
    assert changed.mean() == pytest.approx(text_mixing.REPLACED, abs=0.01)
    steps_away = (found[changed].astype(int) - ids[changed]) % 20
    assert set(steps_away.tolist()) == {1, 2, 3, 4, 5}


def test_the_loss_of_mixed_features():
    """The step's mix of texts 0..Q-1 with Q..2Q-1 is that of features mixed before."""
    rng = np.random.default_rng(5)
    state, _ = steps.state_of(rng)
    batch = steps.batch_of(rng, free=False)
    number = steps.QUERIES
    both = {name: rng.normal(size=(2 * number, steps.DIM)) for name in ("meta", "extreme")}
    shares = rng.random(number).astype(np.float32)
    partners = rng.permutation(number).astype(np.int32) + number
    share = shares[:, None]
    mixed = {k: share * x[:number] + (1 - share) * x[partners] for k, x in both.items()}
    of = lambda features, batch: frugal_loss(
        steps.LookUp(),
        {**steps.whole(state), "queries": features},
        None,
        batch,
        jax.random.key(0),
        1.0,
    )[0]
    found = of(both, batch._replace(partners=partners, shares=shares))
    np.testing.assert_allclose(found, of(mixed, batch), rtol=1e-5)


def source_with(variant: str, rng: np.random.Generator):
    """A source, arrays of a refresh by name, and the data as the family gives them to it."""
    options = sources.options_of(gandalf__enabled=True, gandalf__variant=variant)
    _, refresh, graph = sources.source_of(data := sources.data_of(rng, False), rng)
    data = family._augmented(options, data)
    source = make_source(options, data, 255, num_clusters=8, label_text=True, graph=graph)
    return source, refresh, data


@pytest.mark.parametrize("variant", text_mixing.MIXED)
def test_mixed_batches(variant):
    source, refresh, data = source_with(variant, np.random.default_rng(6))
    source.use(refresh)
    queries = source.epoch_queries(0)
    for rows, (batch, _, _) in zip(queries, sources.made(source, 0), strict=True):
        texts = 32 if variant == "label_mixup" else 16
        assert len(batch.tokens.text_row) == texts and batch.shares.shape == (16,)
        assert batch.targets.dtype == batch.cluster_targets.dtype == np.float32
        if variant == "mixup":
            continue
        for slot, row in enumerate(rows):
            place = int(batch.tokens.text_row[16 + slot]), batch.tokens.text_segment[16 + slot]
            if row < 0:
                assert place[1] == 0
                continue
            tokens = batch.tokens.ids[place[0]][batch.tokens.segment_ids[place[0]] == place[1]]
            texts = [data.label_tokens.gather([label])[0] for label in data.labels[row].indices]
            assert any(np.array_equal(tokens, text) for text in texts)


def test_batches_with_synonyms():
    source, refresh, _ = source_with("synonyms", np.random.default_rng(7))
    near = (np.arange(50)[:, None] + np.arange(1, 6)) % 50
    batches = []
    for synonyms in ({}, {"synonyms": near}):
        source.use({**refresh, **synonyms})
        batches.append(next(sources.made(source, 0))[0])
    plain, changed = batches
    np.testing.assert_array_equal(plain.targets, changed.targets)
    np.testing.assert_array_equal(plain.label_tokens.ids, changed.label_tokens.ids)
    there = plain.tokens.segment_ids > 0
    share = (plain.tokens.ids != changed.tokens.ids)[there].mean()
    assert 0.01 < share < 0.3


@pytest.fixture(scope="module")
def plain(own_data, tmp_path_factory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("plain") / "run"
    return folder, launch.start(tiny.frugal_config("inceptionxml", own_data, epochs=2), folder)


@pytest.mark.parametrize("variant", text_mixing.VARIANTS)
def test_runs(variant, own_data, plain, tmp_path):
    """Two refreshes, so that synonyms are replaced; no point joins, and evaluation is the usual."""
    changes = dict(epochs=2, refresh_epochs=1, gandalf__enabled=True, gandalf__variant=variant)
    config = tiny.frugal_config("inceptionxml", own_data, **changes)
    found = launch.start(config, tmp_path / "run")
    assert 0 <= found["heads"]["clf"]["filtered"]["P@1"] <= 100
    lines = [json.loads(x) for x in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert all(np.isfinite(line["loss"]) for line in lines if "loss" in line)
    steps_of = lambda folder: max(int(p.name) for p in Path(folder, "checkpoints").iterdir())
    assert steps_of(tmp_path / "run") == steps_of(plain[0])
    assert found["heads"] != plain[1]["heads"]


def test_not_for_the_dual_encoder(own_data):
    config = tiny.config(own_data, gandalf__enabled=True, gandalf__variant="mixup")
    with pytest.raises(settings.PlanError, match=r"gandalf\.variant = 'mixup'"):
        settings.check(config)
