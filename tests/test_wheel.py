"""The wheel holds what a user needs where there is no clone, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import tiny


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of this tree, built without a network."""
    source, target = (tmp_path_factory.mktemp(name) for name in ("source", "wheel"))
    for name in ("xmc_jax", "configs", "tests", "experiments"):
        shutil.copytree(
            tiny.ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(tiny.ROOT / name, source)
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, f"--wheel-dir={target}", str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = target.glob("*.whl")
    return built


def test_it_holds_the_package_its_pages_and_data_and_the_configurations(wheel):
    """A package that is missing here is missing in `packages` of pyproject.toml."""
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    package = tiny.ROOT / "xmc_jax"
    files = [
        *package.rglob("*.py"),
        *package.glob("guide/*.md"),
        *(package / "data" / "wordnet_mini").iterdir(),
    ]
    expected = {str(path.relative_to(tiny.ROOT)) for path in files}
    configs = [path.name for path in (tiny.ROOT / "configs").glob("*.py")]
    assert found == expected | {f"xmc_jax_configs/{name}" for name in configs}
    assert {"unidec.py", "depsl.py", "frugal.py"} <= set(configs)


@pytest.mark.parametrize("config", ["unidec:wordnet-mini", "frugal:astec,wordnet-mini"])
def test_a_configuration_and_its_data_are_found_from_another_folder(config, wheel, tmp_path):
    """A pool that is too small is refused once the data have been read."""
    installed, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    env = {**os.environ, "PYTHONPATH": str(installed), "XMC_CACHE": str(tmp_path / "cache")}
    run = lambda *command: subprocess.run(
        [sys.executable, *command],
        cwd=elsewhere,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    where = run("-c", "import xmc_jax; print(xmc_jax.__file__)")
    assert where.stdout.startswith(str(installed)), where
    done = run("-m", "xmc_jax.train", f"--config={config}", "--config.pool_size=2")
    assert done.returncode == 1 and "config.pool_size = 2 is smaller" in done.stderr, done
