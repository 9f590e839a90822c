"""Every frugal system with every data set: it builds, is complete, and its step has one shape."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict
from test_configs import DATASETS, ROOT

from configs import frugal
from xmc_jax import catalog
from xmc_jax.contracts import TokenBatch
from xmc_jax.models.frugal.classifier import Frugal
from xmc_jax.runs import device_memory, settings
from xmc_jax.systems import FAMILIES, encoders
from xmc_jax.systems.frugal.family import frugal_model
from xmc_jax.systems.frugal.options import FrugalOptions
from xmc_jax.systems.frugal.step import FrugalBatch
from xmc_jax.systems.frugal.system import FrugalSystem
from xmc_jax.training import workdir

SYSTEMS = list(frugal.SYSTEMS)


def resolved(system: str, name: str, option: str = "") -> tuple[ConfigDict, catalog.Entry]:
    """The complete configuration, as for a data set of the catalog's size."""
    entry = catalog.find(name) or catalog.default_entry(name, 5_000, 1_000, 3_000, 32)
    texts = ["six words are in each text"] * 100
    matrix = SimpleNamespace(shape=(entry.num_train, entry.num_labels))
    given = frugal.get_config(f"{system},{name}{option}")
    settings.check(given)
    train = SimpleNamespace(labels=matrix, texts=texts)
    return settings.resolve(given, SimpleNamespace(train=train, label_texts=texts))[0], entry


@pytest.mark.parametrize("option", ["", ",debug", ",gandalf"])
@pytest.mark.parametrize("name", DATASETS)
@pytest.mark.parametrize("system", SYSTEMS)
def test_builds_and_is_complete(system, name, option):
    config, _ = resolved(system, name, option)
    flat = workdir.flatten(config.to_dict())
    # Weights of retrieval are chosen after training.
    left_open = {field for field, value in flat.items() if value is None}
    assert left_open == {"retrieval.points", "retrieval.labels", "retrieval.lexical"}
    assert config.dataset == name and config.gandalf.enabled == (option == ",gandalf")
    assert config.batch_size <= config.pool_size and config.max_length <= config.row_length
    options = settings.options_of(config)
    assert isinstance(options, FrugalOptions)
    stages = FAMILIES["frugal"].stages(options, config.epochs)
    assert [stage.epochs for stage in stages] == [epochs for epochs, *_ in options.phases]
    assert sum(stage.epochs for stage in stages) == config.epochs
    again = ConfigDict(json.loads(json.dumps(config.to_dict())))  # as in a work directory
    assert settings.options_of(again) == options
    assert workdir.flatten(again.to_dict()).keys() == flat.keys()


def test_parts_are_those_of_the_systems():
    """Gandalf, appendix A, and field notes: which system has which parts."""
    made = {system: frugal.get_config(f"{system},amazontitles131k") for system in SYSTEMS}
    text, graph = {"decaf", "eclare", "inceptionxml-lf"}, {"eclare", "inceptionxml-lf"}
    assert {s for s, c in made.items() if c.label_text} == text
    assert {s for s, c in made.items() if c.label_graph} == graph
    assert {s for s, c in made.items() if c.encoder.name == "inception"} == {
        "inceptionxml",
        "inceptionxml-lf",
    }
    assert {s for s, c in made.items() if c.encoder.experts} == {"inceptionxml-lf"}
    assert {s for s, c in made.items() if len(c.phases) == 2} == {"inceptionxml-lf"}
    assert made["inceptionxml-lf"].phases == ((1, False, "pifa"), (1, True, "text"))


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("name", ["LF-AmazonTitles-1.3M", "LF-WordNetTitles", "my_data.tsv"])
def test_setting_a_field_sets_no_other(system, name):
    plain = workdir.flatten(frugal.get_config(f"{system},{name}").to_dict())
    for field, value in plain.items():
        config = frugal.get_config(f"{system},{name}")
        left_open = {"reading.merge_labels": True, "reading.version": 7}.get(
            field, "x" if field.startswith("reading.") else 7
        )
        new = {int: 7, float: 0.25, str: "x", bool: not value, tuple: ((0, 2),)}
        new = new.get(type(value), left_open)
        config.update_from_flattened_dict({field: new})
        changed = workdir.flatten(config.to_dict())
        assert {k for k in plain if plain[k] != changed[k]} <= {field}


def test_every_field_is_read():
    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / "xmc_jax").rglob("*.py")}
    text = re.sub(
        r"^(NAMES|BOUNDS)(: [^=]*)? = {.*?^}",
        "",
        "\n".join(sources.values()),
        flags=re.MULTILINE | re.DOTALL,
    )
    flat = workdir.flatten(frugal.get_config("inceptionxml-lf,my_data.tsv").to_dict())
    unread = [f for f in flat if not re.search(rf"\.{f.rpartition('.')[2]}\b", text)]
    assert not unread


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clusters.top": 0}, r"config.clusters.top = 0: expected at least 1"),
        ({"batching": "clusters"}, r"config.batching = 'clusters': expected one of random"),
        ({"phases": ((1, True, "tex"),)}, r"config.phases holds \(1, True, 'tex'\)"),
        ({"phases": ((1, False, "pifa"),)}, r"their absence config.label_text = True"),
        ({"classifier": False}, r"nothing is left of a label"),
        (
            {"hard_negatives": False},
            r"config.hard_negatives = False.* mined labels: --config.eta=0",
        ),
        ({"warmup_epochs": 2}, r"config.warmup_epochs = 2: .* Set them to True and 0"),
        ({"label_graph": True}, r"needs config.label_text = True"),
    ],
)
def test_what_cannot_be_is_refused(changes, message):
    config = frugal.get_config("astec,wordnet-mini")
    config.update_from_flattened_dict(changes)
    with pytest.raises(settings.PlanError, match=message):
        settings.check(config)


def test_an_unknown_system_is_named():
    with pytest.raises(ValueError, match=r"system 'wordnet-mini'; expected one of astec, decaf"):
        frugal.get_config("wordnet-mini")


def test_commands_in_the_docstring_are_right():
    """Each command names a system, a data set of the catalog or a path, and known options."""
    commands = re.findall(r"--config=configs/frugal\.py:(\S+)", frugal.__doc__)
    assert len(commands) == 3
    assert [frugal.get_config(c).dataset for c in commands] == [
        "LF-WordNetTitles-Mini",
        "LF-AmazonTitles-131K",
        "OWN_FOLDER_OR_FILE",
    ]


def shapes_of(options: FrugalOptions, model: Frugal, num_labels: int, *, free: bool) -> FrugalBatch:
    """Shapes of a batch, from the numbers in the options alone."""
    shape = lambda dims, kind: jax.ShapeDtypeStruct(dims, kind)

    def tokens(texts: int) -> TokenBatch:
        packed = (texts, options.row_length)
        arrays = [shape(packed, kind) for kind in (np.uint16, np.uint8, np.uint16)]
        return TokenBatch(*arrays, shape((texts,), np.int32), shape((texts,), np.uint8))

    queries, pool = options.batch_size, min(options.pool_size, num_labels)
    graph = (pool, options.graph.tokens)
    return FrugalBatch(
        tokens=tokens(queries),
        label_tokens=tokens(pool) if model.label_text else None,
        graph_ids=shape(graph, np.int32) if model.label_graph else None,
        graph_weights=shape(graph, np.float32) if model.label_graph else None,
        pool_ids=shape((pool,), np.int32),
        targets=shape((queries, pool), np.bool_),
        where=shape((queries, pool), np.bool_),
        cluster_targets=shape((queries, model.num_clusters), np.bool_),
        free_weights=shape((), np.bool_) if free else None,
    )


@pytest.mark.parametrize("name", ["LF-AmazonTitles-1.3M", "LF-WordNetTitles-Mini"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_step_keeps_the_shapes_of_its_state(system, name):
    """Nothing is allocated: 1.3 million labels are only looked at."""
    config, entry = resolved(system, name)
    options = settings.options_of(config)
    queries = encoders.queries(options.encoder, 500, options.max_length)
    model = frugal_model(options, queries, entry.num_labels)
    made = FrugalSystem(options, model)
    step, data = made.make_step("all"), SimpleNamespace(num_labels=entry.num_labels)
    state = jax.eval_shape(
        lambda weights: made.first_state(data, weights, measure=True),
        made.weight_shapes(entry.num_labels)._replace(tables={}),
    )
    assert jax.tree.structure(made.weight_shapes(entry.num_labels)) == jax.tree.structure(
        state.weights
    )
    for stage in FAMILIES["frugal"].stages(options, config.epochs):
        free = stage.options["free_weights"]
        batch = shapes_of(options, model, entry.num_labels, free=free)
        after, parts = jax.eval_shape(step, state, batch, np.float32(1))
        assert jax.tree.structure(after) == jax.tree.structure(state)
        for found, expected in zip(jax.tree.leaves(after), jax.tree.leaves(state)):
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert parts["loss"].shape == ()


@pytest.mark.parametrize("system", SYSTEMS)
def test_smaller_settings_are_valid_and_smaller(system):
    config, _ = resolved(system, "amazontitles1.3m")
    seen = list(device_memory.smaller_settings(config))
    assert len(seen) >= 4
    for changes in seen:
        smaller = config.copy_and_resolve_references()
        smaller.update_from_flattened_dict(changes)
        settings.check(smaller)
