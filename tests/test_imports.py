"""Imports point to lower layers only; models and data do not import each other; losses need jax."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import xmc_jax

ROOT = Path(xmc_jax.__file__).parents[1]
LAYER = {
    0: ("catalog", "config_args"),
    1: ("losses", "tokens", "label_pool", "row_adam", "metrics", "ranked_lists", "propensity"),
    2: ("models", "data"),
    4: ("train", "evaluate", "predict", "prepare", "inspect_labels"),
}
# What is not listed there is layer 3: it joins models and data.
LAYER_OF = {room: layer for layer, rooms in LAYER.items() for room in rooms}
OUTSIDE = {  # rooms that may import these packages and the standard library only
    "losses": {"jax"},
    "metrics": {"numpy", "scipy"},
    "ranked_lists": {"numpy", "scipy"},
    "propensity": {"numpy", "scipy"},
    "catalog": set(),
    "config_args": {"ml_collections"},
}
CONFIGS_MAY = {"configs", "__future__", "ml_collections", "xmc_jax.catalog", "xmc_jax.config_args"}


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


def room_of(name: str) -> str | None:
    """Returns the file or folder directly under xmc_jax, None for the package itself."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and not parts[1].startswith("__") else None


def may_import(room: str, target: str) -> bool:
    layer, other = LAYER_OF.get(room, 3), LAYER_OF.get(target, 3)
    if layer == other:
        return room == target or layer not in (2, 4)
    return other < layer


def wrong_arrows(name: str, source: str, *, is_package: bool = False) -> list[str]:
    """Returns a sentence for each import of the module that the layout forbids."""
    wrong = []
    room = room_of(name)
    for target in sorted(imports(name, source, is_package=is_package)):
        top = target.split(".")[0]
        if name.startswith("configs"):
            dotted = {target, target.rpartition(".")[0]}  # the module, or a name in it
            if not dotted & CONFIGS_MAY and top not in CONFIGS_MAY:
                wrong.append(f"{name} imports {target}: configs may not")
        elif top == "xmc_jax":
            other = room_of(target)
            if other is not None and (room is None or not may_import(room, other)):
                wrong.append(f"{name} imports {target}: an arrow to a higher or neighbouring layer")
        elif room in OUTSIDE and top not in OUTSIDE[room] | sys.stdlib_module_names:
            wrong.append(f"{name} imports {target}: only {sorted(OUTSIDE[room])} may be used there")
        elif top in ("configs", "experiments", "tests"):
            wrong.append(f"{name} imports {target}: the package stands alone")
    return wrong


def modules() -> list[tuple[str, Path]]:
    files = sorted([*ROOT.glob("xmc_jax/**/*.py"), *ROOT.glob("configs/**/*.py")])
    named = []
    for file in files:
        parts = file.relative_to(ROOT).with_suffix("").parts
        named.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), file))
    return named


def test_every_arrow_points_down() -> None:
    found = modules()
    assert len(found) > 10
    wrong = []
    for name, file in found:
        source = file.read_text(encoding="utf-8")
        wrong += wrong_arrows(name, source, is_package=file.name == "__init__.py")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("xmc_jax.metrics", "from xmc_jax import models"),
        ("xmc_jax.losses.softmax", "import numpy as np"),
        ("xmc_jax.losses.softmax", "import xmc_jax.training.refresh"),
        ("xmc_jax.models.encoders.bag", "from xmc_jax.data.batching.packing import pack"),
        ("xmc_jax.models.encoders.bag", "from ..data import packing"),
        ("xmc_jax.data.batching.pools", "def f():\n    from xmc_jax.models import pooling"),
        ("xmc_jax.data.batching.pools", "from xmc_jax.systems.unidec.step import step"),
        ("xmc_jax.training.refresh", "from xmc_jax import train"),
        ("xmc_jax.train", "from xmc_jax import evaluate"),
        ("xmc_jax.catalog", "from xmc_jax import metrics"),
        ("xmc_jax.catalog", "import numpy"),
        ("xmc_jax.training.refresh", "from configs import unidec"),
        ("xmc_jax", "from xmc_jax import losses"),
        ("configs.unidec", "import numpy"),
        ("configs.unidec", "from xmc_jax import build"),
        ("configs.depsl", "from xmc_jax.data import pools"),
    ],
)
def test_the_checker_sees_a_wrong_arrow(name: str, source: str) -> None:
    assert len(wrong_arrows(name, source)) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("xmc_jax.losses.softmax", "import functools\nimport jax.numpy\nfrom . import _reduce"),
        (
            "xmc_jax.data.summaries.baselines",
            "from xmc_jax import propensity\nfrom .formats import Split",
        ),
        ("xmc_jax.models.heads.unidec", "import flax\nfrom xmc_jax.contracts import TokenBatch"),
        (
            "xmc_jax.training.refresh",
            "from xmc_jax import train_step\nfrom xmc_jax.data import index",
        ),
        ("xmc_jax.train", "from xmc_jax import __version__, train_loop"),
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
    assert imports("xmc_jax.data.batching.pools", "from ..tokens import x") == {
        "xmc_jax.contracts.x"
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
