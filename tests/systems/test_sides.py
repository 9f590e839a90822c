"""What a run knows of sides: prefixes of texts, and two towers."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny

from xmc_jax import predictor
from xmc_jax.contracts import Stage, TextForm
from xmc_jax.data.tokens import token_stores
from xmc_jax.data.tokens import tokenizer as tokenizers
from xmc_jax.data.tokens.token_stores import TokenStore
from xmc_jax.models.heads.unidec import UniDEC
from xmc_jax.runs import launch, open_runs
from xmc_jax.systems.unidec.embedder import Embedder
from xmc_jax.systems.unidec.step import TABLE
from xmc_jax.training import augmentation, refresh, training_data, workdir
from xmc_jax.training.state import new_state

WORKDIRS = Path(__file__).parent.parent / "workdirs"
QUERY, LABEL = "number or ", "old "
PREFIXES = {"encoder__query_prefix": QUERY, "encoder__label_prefix": LABEL}
STILL = {"encoder__dropout": 0.0, "encoder__token_dropout": 0.0, "head_dropout": 0.0}
CONFIGS = {"unidec": tiny.config, "frugal": lambda *a, **k: tiny.frugal_config("eclare", *a, **k)}
ONE = Stage(0, 1)


@pytest.fixture(scope="module")
def prepared(own_data, tmp_path_factory):
    """Runs of one and of two towers before their first step, without dropout."""
    changes = {**STILL, **PREFIXES}
    folder, starts = tmp_path_factory.mktemp("prepared"), {}
    for towers in (1, 2):
        config = tiny.config(own_data, encoder__towers=towers, **changes)
        starts[towers] = launch.prepare(config, folder / str(towers), None)
    return starts


@pytest.fixture(scope="module")
def trained(own_data, tmp_path_factory) -> tuple[Path, dict]:
    """A finished run of two towers with prefixes, and its evaluation."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    changes = dict(encoder__towers=2, gandalf__enabled=True, epochs=1, **PREFIXES)
    config = tiny.config(own_data, **changes)
    return folder, launch.start(config, folder)


def assert_texts(store, texts: list[str], tokenizer, first: int = 0) -> None:
    expected = token_stores.encode(texts, tokenizer, max_length=16, special_tokens=False)
    flat, lengths = store.gather(np.arange(first, first + len(texts)))
    np.testing.assert_array_equal(flat, expected.ids)
    np.testing.assert_array_equal(lengths, expected.lengths())


@pytest.mark.parametrize("family", CONFIGS)
def test_texts_stand_behind_the_prefix_of_their_side(family, own_data, tmp_path):
    begun = launch.prepare(CONFIGS[family](own_data, **PREFIXES), tmp_path, None)
    data, tokenizer = begun.run.data, tokenizers.load_tokenizer(tmp_path / "tokenizer")
    dataset = data.dataset
    assert_texts(data.train_tokens, [QUERY + text for text in dataset.train.texts], tokenizer)
    assert_texts(data.label_tokens, [LABEL + text for text in dataset.label_texts], tokenizer)
    assert_texts(data.test.tokens, [QUERY + text for text in dataset.test.texts], tokenizer)
    assert data.held_out.tokens is data.train_tokens and data.label_queries is None


def test_label_texts_as_points_are_queries(own_data, prepared):
    data = prepared[1].run.data
    tokenizer = tokenizers.load_tokenizer(prepared[1].run.folder / "tokenizer")
    texts = data.dataset.label_texts
    for prefixes, label_queries in ((PREFIXES, True), ({"encoder__query_prefix": ""}, False)):
        options = tiny.options(tiny.config(own_data, gandalf__enabled=True, **prefixes))
        loaded = training_data.load(options, data.dataset, data.entry, tokenizer)
        assert (loaded.label_queries is not None) == label_queries
        joined = augmentation.augment(options, loaded)
        query = options.text_form.query_prefix
        first = joined.first_text_row
        assert first == len(data.dataset.train.texts)
        assert_texts(joined.train_tokens, [query + text for text in texts], tokenizer, first)
        label = options.text_form.label_prefix
        assert_texts(joined.label_tokens, [label + text for text in texts], tokenizer)


def test_a_prefix_changes_its_own_texts_alone(own_data, prepared, tmp_path):
    """Rows, labels, tokenizer and first parameters are those of a run without."""
    plain = launch.prepare(tiny.config(own_data, **STILL), tmp_path, None)
    other = prepared[1]
    fields = [workdir.flatten(start.config.to_dict()) for start in (plain, other)]
    different = {name for name, value in fields[0].items() if fields[1][name] != value}
    assert different == {"encoder.query_prefix", "encoder.label_prefix"}
    names = [start.run.folder / "tokenizer/tokenizer.json" for start in (plain, other)]
    assert names[0].read_bytes() == names[1].read_bytes()
    assert plain.description == other.description
    one, two = plain.run.data, other.run.data
    assert one.dataset.digest == two.dataset.digest and (one.labels != two.labels).nnz == 0
    np.testing.assert_array_equal(one.held_out.rows, two.held_out.rows)
    # The prefixes' words occur in the texts, so that they are not the first ones of their token.
    jax.tree.map(np.testing.assert_array_equal, plain.weights.params, other.weights.params)
    tokenizer = tokenizers.load_tokenizer(tmp_path / "tokenizer")
    options = dataclasses.replace(
        other.run.options, encoder=dataclasses.replace(other.run.options.encoder, label_prefix="")
    )
    queries_alone = training_data.load(options, one.dataset, one.entry, tokenizer)
    for found, expected in (
        (queries_alone.train_tokens, two.train_tokens),
        (queries_alone.label_tokens, one.label_tokens),
    ):
        np.testing.assert_array_equal(found.ids, expected.ids)
    assert not np.array_equal(one.train_tokens.ids, two.train_tokens.ids)


@pytest.mark.parametrize("name", ["unidec", "inceptionxml-lf"])
def test_a_run_of_before_has_one_tower_and_no_prefix(name, tmp_path):
    folder = shutil.copytree(WORKDIRS / name, tmp_path / name)
    kept = json.loads((folder / "meta.json").read_text())["resolved"]["encoder"]
    assert not {"towers", "query_prefix", "label_prefix"} & kept.keys()
    options = open_runs.open_run(folder).options
    assert options.text_form == TextForm(options.max_length, special_tokens=False)
    assert options.encoder.towers == 1


def test_a_trained_run_evaluates_and_predicts_with_its_sides(trained):
    folder, result = trained
    opened = open_runs.open_run(folder)
    assert open_runs.evaluate_run(opened) == json.loads(json.dumps(result))
    data, ranker, model = opened.data, opened.ranker(), predictor.load(folder)
    texts = list(data.dataset.test.texts)
    for head in ("concat", "de", "clf"):
        expected = ranker.query_vectors(data.test.tokens, data.test.rows, head)
        np.testing.assert_allclose(model.encode(texts, head=head), expected, atol=1e-6)
        np.testing.assert_allclose(
            model.label_vectors(head=head), ranker.label_vectors(head), atol=1e-6
        )
    known = data.dataset.label_texts[3]
    again = [known.upper()]  # of the same tokens, but another text
    vectors = predictor.load(folder, new_labels=again).label_vectors(head="de")
    np.testing.assert_allclose(vectors[-1], vectors[3], atol=1e-6)
    np.testing.assert_allclose(vectors[3], ranker.label_vectors("de")[3], atol=1e-6)
    assert np.abs(model.encode([known], head="de")[0] - vectors[3]).max() > 0.01


@pytest.mark.parametrize("trains", ["all", "encoder"])
def test_each_tower_learns_from_its_own_side(prepared, trains):
    """Rows of a token table that a step moves are those of the side's tokens in the batch."""
    used, moved = {}, {}
    for towers, begun in prepared.items():
        run, stage = begun.run, ONE._replace(trains=trains)
        params = jax.tree.map(lambda x: jax.numpy.array(x, copy=True), begun.weights.params)
        before = jax.tree.map(np.array, params)["encoder"]
        tables = {TABLE: np.zeros((run.data.num_labels, run.system.dim), np.float32)}
        state = new_state(params, run.system.optimizer, jax.tree.map(jax.numpy.array, tables))
        batch, stats, _ = next(run.source.ahead(stage, 0, 0))
        after = jax.tree.map(np.array, run.step(stage)(state, batch, 1.0)[0].params["encoder"])
        parts = {"query": batch.tokens, "label": batch.label_tokens}
        parts = parts if towers == 2 else {"both": batch.tokens}
        for side, tokens in parts.items():
            pair = (before[side], after[side]) if towers == 2 else (before, after)
            old, new = (tree["tokens"]["embedding"] for tree in pair)
            moved[side] = set(np.flatnonzero((old != new).any(axis=1)).tolist())
            used[side] = set(np.unique(tokens.ids[tokens.segment_ids > 0]).tolist())
        assert (batch.label_tokens is None) == (towers == 1)
        assert stats["tokens"] == sum((x.segment_ids > 0).sum() for x in parts.values())
    assert moved == used
    assert used["query"] != used["label"] and used["query"] | used["label"] == used["both"]


def test_batches_of_two_towers_are_those_of_one_in_two_parts(prepared):
    sources = [prepared[towers].run.source for towers in (1, 2)]
    data = prepared[2].run.data
    queries = sources[1].epoch_queries(1)
    pairs = zip(*(source.ahead(ONE, 1, 0) for source in sources), strict=True)
    for rows, ((one, _, labels), (two, _, same)) in zip(queries, pairs, strict=True):
        np.testing.assert_array_equal(labels, same)
        for name in ("pool_ids", "targets", "where"):
            np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
        for tokens, store, texts in (
            (two.tokens, data.train_tokens, rows),
            (two.label_tokens, data.label_tokens, labels),
        ):
            assert len(tokens.text_row) == len(texts)
            for row, segment, text in zip(tokens.text_row, tokens.text_segment, texts):
                found = tokens.ids[row][tokens.segment_ids[row] == segment] if segment else []
                np.testing.assert_array_equal(found, store.gather(np.array([text]))[0])
    shapes = {two.label_tokens.ids.shape for two, _, _ in sources[1].ahead(ONE, 0, 0)}
    assert len(shapes) == 1  # one shape of labels, whatever their texts


def test_the_label_tower_embeds_labels(prepared, tmp_path):
    """In the table's first rows, in mining and in the ranking; queries never pass it."""
    begun = prepared[2]
    run, params = begun.run, begun.weights.params
    system, data = run.system, run.data
    model, towers = system.model, params["encoder"]
    alone = Embedder(UniDEC(model.encoder.label, model.head_dim), row_length=32)
    of = lambda tower, store: alone.de({**params, "encoder": towers[tower]}, store)
    queries, labels = of("query", data.train_tokens), of("label", data.label_tokens)
    assert np.abs(labels - of("query", data.label_tokens)).max() > 0.1
    close = lambda found, expected: np.testing.assert_allclose(found, expected, atol=1e-6)
    close(system.embedder.de(params, data.train_tokens), queries)
    close(system.embedder.de(params, data.label_tokens, side="label"), labels)
    state = system.first_state(data, begun.weights)
    close(state.tables[TABLE].values, run.options.table.scale * labels)
    ranker = system.ranker(state.weights, data.label_tokens)
    close(ranker.label_vectors("de"), labels)
    close(ranker.query_vectors(data.train_tokens, None, "de"), queries)
    close(ranker.query_vectors(data.train_tokens, None, "concat")[:, : system.dim], queries)
    write = lambda folder: system.write_refresh(folder, 0, data, state)
    mined = refresh.write(tmp_path, 0, write)["hard_negatives"]
    scores = queries @ labels.T
    for row in data.rows:
        others = np.setdiff1d(np.arange(data.num_labels), data.labels[row].indices)
        best = np.sort(scores[row, others])[::-1][: mined.shape[1]]
        np.testing.assert_allclose(scores[row, mined[row]], best, atol=1e-5)


def test_one_tower_has_one_program_for_both_sides(prepared):
    for towers, programs in ((1, {"query"}), (2, {"query", "label"})):
        begun = prepared[towers]
        embedder = Embedder(begun.run.system.model, row_length=32)
        stores: dict[str, TokenStore] = {
            "query": begun.run.data.train_tokens,
            "label": begun.run.data.label_tokens,
        }
        for side, store in stores.items():
            embedder.de(begun.weights.params, store, np.arange(3), side=side)
        assert {side for _, side in embedder._functions} == programs
        assert begun.run.system.model.encoder.shared == (towers == 1)
