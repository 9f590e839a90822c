"""What a reader may count on in the tree: who names families, one meaning a name, things once."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import xmc_jax
from xmc_jax.systems import FAMILIES
from xmc_jax.systems.frugal.options import FrugalOptions
from xmc_jax.systems.frugal.ranking import FrugalRanker
from xmc_jax.systems.unidec.options import UniDECOptions
from xmc_jax.systems.unidec.ranking import HEADS
from xmc_jax.training.options import PoolOptions

PACKAGE = Path(xmc_jax.__file__).parent
fields = lambda kind: {field.name for field in dataclasses.fields(kind)}
OPTIONS = (fields(UniDECOptions) | fields(FrugalOptions)) - fields(PoolOptions)
HEAD_NAMES = {*HEADS, *FrugalRanker.heads}
# Options whose names are words of other rooms too; they are no less options behind `config.`.
ORDINARY = {
    "clusters": "of queries, which are batches (data/batching)",
    "dropout": "a share, of no family",
    "encoder": "contracts.Encoder; a rate; what a stage trains",
    "graph": "of labels (data/graph)",
    "index": "of a Ranker: how labels are searched",
    "label_graph": "a module (data/graph)",
    "offset": "a place in a file",
    "stages": "contracts.Stage",
    "table": "contracts.Table; a rate; a printed one",
}
CONFIGURATIONS = re.compile(r"(^|_)(config|options|resolved|given|values|settings)$")


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Parsed modules of the package, by path below it."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in paths
    }


def docstrings(tree: ast.AST) -> set[int]:
    """Identities of the constants that are docstrings, also those of attributes."""
    bodies = (node.body for node in ast.walk(tree) if isinstance(getattr(node, "body", 0), list))
    lines = (line for body in bodies for line in body if isinstance(line, ast.Expr))
    return {id(line.value) for line in lines if isinstance(line.value, ast.Constant)}


def names_of(node: ast.AST) -> list[str]:
    """Identifiers and words of texts at a node of a tree."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.findall(r"\w+", node.value)
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").split(".")
    if isinstance(node, ast.alias):
        return [*node.name.split("."), node.asname or ""]
    parts = (getattr(node, field, None) for field in ("id", "attr", "arg", "name"))
    return [part for part in parts if isinstance(part, str)]


def options_read(node: ast.AST) -> list[str]:
    """Fields of a configuration that a node names: ``options.X``, ``config["X"]``, "config.X"."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.findall(r"config\.(\w+)", node.value)
    if isinstance(node, (ast.Attribute, ast.Subscript)):
        inner = names_of(node.value)
        if inner and CONFIGURATIONS.search(inner[0]):
            return names_of(node if isinstance(node, ast.Attribute) else node.slice)
    if isinstance(node, ast.Call) and names_of(node.func) in (["get"], ["getattr"]):
        return [name for argument in node.args for name in names_of(argument)]
    return []


def family_words(tree: ast.AST) -> Iterator[str]:
    """Words of a module that belong to a family: its name, its heads, its options."""
    skipped = docstrings(tree)
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        for name in names_of(node):
            lower = name.lower()
            if any(family in lower for family in FAMILIES):
                yield name
            elif HEAD_NAMES & set(lower.split("_")) or lower in OPTIONS - ORDINARY.keys():
                yield name
        yield from (name for name in options_read(node) if name in OPTIONS)


SHARED = [path for path in trees() if path.split("/")[0] not in ("systems", "models")]


@pytest.mark.parametrize("path", SHARED)
def test_no_family_is_named_outside_its_rooms(path: str) -> None:
    assert list(family_words(trees()[path])) == []


@pytest.mark.parametrize(
    "source",
    [
        "from xmc_jax.systems.unidec import step",
        "import xmc_jax.systems.frugal.step as other",
        "class UniDECThing: pass",
        "kind = 'a frugal classifier'",
        "ranker.search(x, 'de', 3)",
        "heads = ('concat', 'other')",
        "clf_vectors = 3",
        "def f(head_dim): pass",
        "f(label_text=True)",
        "x = options.de_weight",
        "x = run.options.table",
        "x = config.encoder.name",
        "x = self._options.index",
        "x = resolved['stages']",
        "x = config.get('clusters')",
        "raise ValueError('Set config.table.dtype=bfloat16.')",
        "raise ValueError(f'{x}: set config.graph.degree.')",
    ],
)
def test_the_search_sees_words_of_families(source: str) -> None:
    assert list(family_words(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        '"""UniDEC and its heads: concat, de, clf."""\nx = 1  # unidec',
        "x = stage.trains == 'encoder'; y = state.tables['table']; z = rates.encoder",
        "x = options.batch_size + config.pool_size",
        "index = 3; decode = concatenate = [index]",
        "for stage in run.stages: stage.options['other']",
    ],
)
def test_the_search_leaves_other_words_alone(source: str) -> None:
    assert list(family_words(ast.parse(source))) == []


def test_words_with_a_second_meaning_are_words_of_families() -> None:
    assert ORDINARY.keys() <= OPTIONS
    assert {"unidec", "frugal"} <= FAMILIES.keys() and {"concat", "de", "clf"} == HEAD_NAMES
    assert {"head_dim", "de_weight", "meta_weight", "phases", "label_text"} <= OPTIONS


def calls(names: set[str]) -> set[tuple[str, str]]:
    """Which modules call something of these names."""
    return {
        (path, name)
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for name in names_of(node.func)
        if name in names
    }


def test_renaming_is_in_one_file() -> None:
    """Whatever is written under a temporary name first goes through it."""
    renaming = {
        (path, node.attr)
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and (node.attr in ("rename", "renames", "move") or ast.unparse(node) == "os.replace")
    }
    assert renaming == {("files.py", "rename"), ("files.py", "replace")}


def test_the_cache_folder_is_read_in_one_place() -> None:
    texts = [
        path
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value == "XMC_CACHE"
    ]
    assert texts == ["files.py"]


def test_steps_end_in_one_place() -> None:
    assert calls({"apply_updates"}) == {("training/step.py", "apply_updates")}
    updates = [
        path
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "row_adam.update"
    ]
    assert updates == ["training/step.py"]


def test_texts_go_through_models_by_one_runner() -> None:
    """Of families: none packs chunks of many texts by itself."""
    runners = {path for path, name in calls({"Chunks"})}
    assert runners == {
        f"systems/{p}" for p in ("frozen_layers.py", "frugal/embedder.py", "unidec/embedder.py")
    }
    packing = {path for path, _ in calls({"count_rows"})}
    assert packing == {"systems/embedding.py"}


def definitions() -> dict[str, list[str]]:
    """Public functions and classes at the top of modules: where each name is defined."""
    where: dict[str, list[str]] = {}
    for path, tree in trees().items():
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name[0] != "_":
                where.setdefault(node.name, []).append(path)
    return where


def test_a_name_has_one_meaning() -> None:
    """Verbs such as ``load`` are said behind their module's name; longer names are there once."""
    once = {"contains", "describe", "l2norm", "memory", "report"}
    for name, paths in definitions().items():
        in_families = all(path.startswith("systems/") for path in paths)  # files of the same names
        if (name in once or "_" in name) and not in_families:
            assert len(paths) == 1, (name, paths)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("open_run", "runs/open_runs.py"),
        ("cache_folder", "files.py"),
        ("scatter_rows", "tables/label_pool.py"),
        ("hold_out", "data/splits.py"),
        ("contains", "data/batching/pools.py"),
        ("l2norm", "models/heads/unidec.py"),
        ("describe", "systems/encoders.py"),
    ],
)
def test_names_that_had_two_meanings_have_one(name: str, path: str) -> None:
    functions = [
        other
        for other, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    assert functions == [path]


def test_names_say_what_they_hold() -> None:
    modules = {Path(path).stem for path in trees()}
    vague = {"rivals", "plan", "towers", "phases", "frozen", "stopper", "memory", "report"}
    assert not vague & (modules | definitions().keys())
    variables = {
        (path, node.id)
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        if node.id in ("found", "there", "made")
    }
    assert not variables


PUBLIC = {  # names that were there before modules moved into rooms
    "losses": "decoupled_softmax_loss pick_some_labels_loss sigmoid_bce_loss supcon_loss "
    "triplet_loss",
    "predictor": "BLOCK_TEXTS Predictor check_files load predict_file",
    "metrics": "evaluate evaluate_bins frequency_bins precision_recall_thresholds",
    "propensity": "inverse_propensity label_frequency weights_of",
    "row_adam": "RowAdamState init update",
    "label_pool": "STORAGE_DTYPES from_storage gather_rows pool_mask scatter_rows to_storage",
    "data.gandalf": "VARIANTS gandalf_targets glas_targets neighbours_held self_targets "
    "symmetric_targets targets walk_targets",
    "models.pretrained": "load_encoder num_layers resolve_folder save_encoder word_embeddings",
}


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_where_they_were(module: str) -> None:
    loaded = importlib.import_module(f"xmc_jax.{module}")
    assert loaded.__doc__
    for name in PUBLIC[module].split():
        assert hasattr(loaded, name), name


@pytest.mark.parametrize("door", ["train", "evaluate", "predict", "prepare", "inspect_labels"])
def test_binaries_have_a_main(door: str) -> None:
    """Their flags bear the same names, so that no process can import two of them."""
    tree = trees()[f"{door}.py"]
    (main,) = (node for node in tree.body if getattr(node, "name", "") == "main")
    assert [argument.arg for argument in main.args.args] == ["argv"]
    last = tree.body[-1]
    assert isinstance(last, ast.If) and ast.unparse(last.test) == "__name__ == '__main__'"
    assert ast.unparse(last.body[-1]) == "console.run(main)"
