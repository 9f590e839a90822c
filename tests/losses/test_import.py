"""The losses can be lifted into other code: they need JAX alone, and their examples run."""

from __future__ import annotations

import doctest
import subprocess
import sys
from importlib import import_module

import pytest

ONLY_JAX = """
import sys

import jax

with_jax = set(sys.modules)


class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        allowed = {"jax", "jaxlib", "numpy", "ml_dtypes", "opt_einsum", "xmc_jax"}
        if top not in allowed and top not in sys.stdlib_module_names:
            raise ImportError(f"{name} was imported")


sys.meta_path.insert(0, Refuse())
from xmc_jax import losses

scores = jax.numpy.array([[1.0, 0.0]])
print(float(losses.supcon_loss(scores, scores)))
ours = {name for name in sys.modules if name.startswith("xmc_jax")}
print(*sorted(name for name in ours if not name.startswith("xmc_jax.losses")))
for name in ("flax", "optax", "scipy"):
    try:
        __import__(name)
    except ImportError:
        print("refused", name)
"""


def test_losses_need_jax_alone():
    run = subprocess.run([sys.executable, "-c", ONLY_JAX], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    value, ours, *refused = run.stdout.splitlines()
    assert abs(float(value) - 0.3132617) < 1e-5  # log(1 + 1/e)
    assert ours == "xmc_jax"
    assert refused == ["refused flax", "refused optax", "refused scipy"]  # the hook does its work


@pytest.mark.parametrize("name", ["softmax", "sigmoid", "margin", "pick_some_labels"])
def test_examples_run(name):
    result = doctest.testmod(import_module(f"xmc_jax.losses.{name}"))
    assert result.attempted > 0
    assert result.failed == 0
