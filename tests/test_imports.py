"""Imports point down, from room to room as the table says; no circle; families apart."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import xmc_jax

ROOT = Path(xmc_jax.__file__).parents[1]
# A row a room, from the top down: what it imports, all of it further down. A room is a folder (its
# folders have rows of their own) or a file of xmc_jax itself. Within a room, folders may need files
# beside them that they share, and files there may join them: modules stand in no circle even so.
ROOMS = {
    "train": "runs training host config_args",
    "evaluate": "runs host",
    "predict": "predictor host",
    "remember": "predictor host",
    "prepare": "data.summaries data.readers host",
    "inspect_labels": "data.summaries data.readers host",
    "predictor": "runs training data.readers data.tokens data metrics contracts files",
    "runs": "systems training data.summaries data.readers data.search data.graph data.tokens data "
    "metrics contracts catalog files",
    "systems": "systems.unidec systems.frugal training models models.frugal models.encoders "
    "data.graph data.batching data.tokens data tables host contracts catalog files",
    "systems.unidec": "systems training models models.heads models.encoders data.search "
    "data.batching data tables losses host contracts catalog config_args",
    "systems.frugal": "systems training models.frugal data.graph data.search data.batching data "
    "tables losses host contracts files",
    "training": "data.search data.graph data.batching data.readers data.tokens data metrics tables "
    "host contracts catalog files",
    "models": "models.encoders files",
    "models.heads": "models contracts",
    "models.frugal": "models.encoders models contracts",
    "models.encoders": "models contracts",
    "data.summaries": "data.readers data.graph data.search data.tokens data metrics catalog files",
    "data.readers": "data catalog files",
    "data": "data.graph files",
    "data.graph": "data.batching contracts",
    "data.search": "data.batching",
    "data.batching": "contracts",
    "data.tokens": "contracts files",
    "propensity": "metrics",
    "label_pool": "tables",
    "row_adam": "tables",
    "losses": "",
    "metrics": "",
    "tables": "",
    "host": "",
    "contracts": "",
    "catalog": "",
    "config_args": "",
    "files": "",
}
MOST_FLOORS = 8
OUTSIDE = {  # rooms that may import these packages and the standard library only
    "losses": {"jax"},
    "tables": {"jax"},
    "metrics": {"numpy", "scipy"},
    "host": {"absl", "jax"},
    "contracts": {"jax", "numpy", "optax", "scipy"},
    "config_args": {"ml_collections"},
    "catalog": set(),
    "files": set(),
}
ONLY_IN = {  # packages that these rooms, or modules of these names, alone may import
    "ml_collections": {"runs", "train", "config_args", "defaults"},
    "flax": {"models"},
    "orbax": {"training"},
    "faiss": {"data"},
    "transformers": {"data"},
}
CONFIGS_MAY = {
    "__future__",
    "ml_collections",
    "xmc_jax.catalog",
    "xmc_jax.config_args",
    "xmc_jax.systems.defaults",
    "xmc_jax.systems.unidec.defaults",
}


def imports(name: str, source: str, *, is_package: bool = False) -> set[str]:
    """Returns the dotted names a module imports; ``from a import b`` counts as ``a.b``."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parent = name.split(".")[: None if is_package else -1]
            base = parent[: len(parent) - node.level + 1] if node.level else []
            module = ".".join([*base, node.module] if node.module else base)
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


@functools.cache
def modules() -> dict[str, Path]:
    """Modules of the package and of ``configs/``, by name."""
    named = {}
    for file in sorted([*ROOT.glob("xmc_jax/**/*.py"), *ROOT.glob("configs/**/*.py")]):
        parts = file.relative_to(ROOT).with_suffix("").parts
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return named


def module_of(name: str) -> str:
    """The module that a dotted name of the package is, or is in."""
    while "." in name and name not in modules():
        name = name.rpartition(".")[0]
    return name


def room_of(module: str) -> str:
    """Its folder below ``xmc_jax``, as ``data.graph``, or its own name; "" = the package itself."""
    if module not in modules():
        return module.split(".")[1]  # of an example in a test
    parts = module.split(".")[1:]
    if modules()[module].name != "__init__.py" and len(parts) > 1:
        parts = parts[:-1]
    return ".".join(parts)


@functools.cache
def arrows() -> dict[str, set[str]]:
    """Which modules of the package each of them imports, also within functions."""
    graph = {}
    for name, file in modules().items():
        if name.startswith("xmc_jax"):
            is_package = file.name == "__init__.py"
            names = imports(name, file.read_text(encoding="utf-8"), is_package=is_package)
            inside = {module_of(other) for other in names if other.split(".")[0] == "xmc_jax"}
            graph[name] = inside - {name, "xmc_jax"}
    return graph


def between_rooms(room: str) -> set[str]:
    """Rooms that a room's modules import."""
    targets = (
        other for name, others in arrows().items() if room_of(name) == room for other in others
    )
    return {room_of(target) for target in targets} - {room}


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Some circle of a graph; [] where there is none."""
    done: set[str] = set()

    def walk(path: list[str]) -> list[str]:
        for other in sorted(graph.get(path[-1], ())):
            if other in path:
                return [*path[path.index(other) :], other]
            if other not in done and (found := walk([*path, other])):
                return found
        done.add(path[-1])
        return []

    return next((found for name in sorted(graph) if (found := walk([name]))), [])


def floors(graph: Mapping[str, set[str]]) -> dict[str, int]:
    """The floor on which each node of a graph without circles stands; 1 = it imports nothing."""

    @functools.cache
    def floor(name: str) -> int:
        return 1 + max((floor(other) for other in graph.get(name, ())), default=0)

    return {name: floor(name) for name in graph}


def wrong_arrows(name: str, source: str, *, is_package: bool = False) -> list[str]:
    """Returns a sentence for each import of the module that the layout forbids."""
    wrong = []
    for target in sorted(imports(name, source, is_package=is_package)):
        top = target.split(".")[0]
        if name.startswith("configs"):
            dotted = {target, target.rpartition(".")[0]}  # the module, or a name in it
            if not dotted & CONFIGS_MAY and top not in CONFIGS_MAY:
                wrong.append(f"{name} imports {target}: configs may not")
            continue
        room = room_of(name) if name != "xmc_jax" else ""
        if top == "xmc_jax":
            module = module_of(target)
            other = "" if module == "xmc_jax" else room_of(module)
            if other not in ("", room, *ROOMS.get(room, "").split()):
                wrong.append(f"{name} imports {target}: the row {room!r} has no {other!r}")
        elif room in OUTSIDE and top not in OUTSIDE[room] | sys.stdlib_module_names:
            wrong.append(f"{name} imports {target}: only {sorted(OUTSIDE[room])} may be used there")
        elif top in ONLY_IN and not {room.split(".")[0], name.split(".")[-1]} & ONLY_IN[top]:
            wrong.append(f"{name} imports {target}: only {sorted(ONLY_IN[top])} may")
        elif top in ("configs", "experiments", "tests"):
            wrong.append(f"{name} imports {target}: the package stands alone")
    return wrong


def test_every_arrow_points_to_a_room_of_its_row() -> None:
    wrong = []
    for name, file in modules().items():
        source = file.read_text(encoding="utf-8")
        wrong += wrong_arrows(name, source, is_package=file.name == "__init__.py")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", ROOMS)
def test_a_row_allows_no_more_than_there_is(room: str) -> None:
    assert set(ROOMS[room].split()) == between_rooms(room)


def test_every_room_has_a_row() -> None:
    assert {room_of(name) for name in arrows() if name != "xmc_jax"} == ROOMS.keys()


def test_rows_stand_from_the_top_down() -> None:
    """No arrow points up, but within a room."""
    order = list(ROOMS)
    up = [
        (room, other)
        for room in ROOMS
        for other in ROOMS[room].split()
        if order.index(other) < order.index(room) and room.split(".")[0] != other.split(".")[0]
    ]
    assert not up


def test_modules_form_no_circle() -> None:
    assert len(arrows()) > 100 and circle(arrows()) == []


def top_rooms() -> dict[str, set[str]]:
    """Arrows between the files and folders that lie directly in ``xmc_jax``."""
    graph: dict[str, set[str]] = {}
    for room, others in ROOMS.items():
        top = room.split(".")[0]
        graph.setdefault(top, set()).update(other.split(".")[0] for other in others.split())
        graph[top].discard(top)
    return graph


def test_rooms_form_no_circle_and_few_floors() -> None:
    assert circle(top_rooms()) == []
    assert max(floors(top_rooms()).values()) <= MOST_FLOORS


def test_the_measures_see_circles_and_floors() -> None:
    line = {"a": {"b"}, "b": {"c"}, "c": set()}
    assert circle(line) == [] and floors(line) == {"a": 3, "b": 2, "c": 1}
    assert circle({**line, "c": {"b"}}) == ["b", "c", "b"]


def test_no_family_imports_another() -> None:
    folders = [path.name for path in (ROOT / "xmc_jax/systems").iterdir() if path.is_dir()]
    families = {f"systems.{name}" for name in folders if not name.startswith("_")}
    assert len(families) >= 2
    for family in families:
        assert not between_rooms(family) & families


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("xmc_jax.metrics.ranking", "from xmc_jax import models"),
        ("xmc_jax.losses.softmax", "import numpy as np"),
        ("xmc_jax.losses.softmax", "import xmc_jax.training.refresh"),
        ("xmc_jax.models.encoders.bag", "from xmc_jax.data.batching.packing import pack"),
        ("xmc_jax.models.encoders.bag", "from ...data.batching import packing"),
        ("xmc_jax.models.encoders.bag", "import ml_collections"),
        (
            "xmc_jax.data.batching.pools",
            "def f():\n    from xmc_jax.models.encoders import pooling",
        ),
        ("xmc_jax.data.batching.pools", "from xmc_jax.systems.unidec.step import step"),
        ("xmc_jax.data.batching.pools", "import flax.linen"),
        ("xmc_jax.systems.unidec.step", "from xmc_jax.systems.frugal import text_mixing"),
        ("xmc_jax.systems.frugal.step", "from xmc_jax.systems.unidec.options import HeadOptions"),
        ("xmc_jax.systems.frugal.step", "from xmc_jax.runs import settings"),
        ("xmc_jax.training.loop", "from xmc_jax.systems import FAMILIES"),
        ("xmc_jax.training.refresh", "from xmc_jax import train"),
        ("xmc_jax.training.refresh", "from configs import unidec"),
        ("xmc_jax.train", "from xmc_jax import evaluate"),
        ("xmc_jax.catalog", "from xmc_jax import metrics"),
        ("xmc_jax.catalog", "import numpy"),
        ("xmc_jax.contracts", "from xmc_jax.tables import row_adam"),
        ("xmc_jax", "from xmc_jax import losses"),
        ("configs.unidec", "import numpy"),
        ("configs.unidec", "from xmc_jax.runs import settings"),
        ("configs.unidec", "from xmc_jax.systems import settings"),
        ("configs.depsl", "from xmc_jax.data import splits"),
        ("configs.depsl", "from configs import unidec"),
    ],
)
def test_the_checker_sees_a_wrong_arrow(name: str, source: str) -> None:
    assert len(wrong_arrows(name, source)) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("xmc_jax.losses.softmax", "import functools\nimport jax.numpy\nfrom . import _reduce"),
        ("xmc_jax.data.summaries.baselines", "from xmc_jax import metrics\nfrom . import summary"),
        ("xmc_jax.models.heads.unidec", "import flax\nfrom xmc_jax.contracts import TokenBatch"),
        ("xmc_jax.systems.unidec.step", "from xmc_jax.training.state import new_state"),
        ("xmc_jax.train", "from xmc_jax import __version__\nfrom xmc_jax.runs import launch"),
        ("configs.unidec", "import ml_collections\nfrom xmc_jax import catalog, config_args"),
        (
            "configs.unidec",
            "from ml_collections import ConfigDict\nfrom xmc_jax.catalog import get",
        ),
    ],
)
def test_the_checker_lets_right_arrows_pass(name: str, source: str) -> None:
    assert wrong_arrows(name, source) == []


def test_a_package_resolves_its_own_dots() -> None:
    assert imports("xmc_jax.losses", "from .margin import x", is_package=True) == {
        "xmc_jax.losses.margin.x"
    }
    assert imports("xmc_jax.data.batching.pools", "from ..texts import x") == {
        "xmc_jax.data.texts.x"
    }


def test_losses_load_with_jax_alone() -> None:
    """In a fresh interpreter, the losses bring in no other third-party package than jax does."""
    code = (
        "import sys, jax, jax.numpy, jax.scipy.special; before = set(sys.modules);"
        "from xmc_jax import losses; print(*(set(sys.modules) - before))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    tops = {name.split(".")[0] for name in result.stdout.split()}
    assert tops <= {"xmc_jax", "jax", "jaxlib"} | sys.stdlib_module_names
