"""Shared fixtures; the suite runs on a CPU, offline."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def golden() -> Path:
    """Folder with the reference values (see its README)."""
    return Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def mini_folder() -> Path:
    """Folder of the bundled LF-WordNetTitles-Mini."""
    import xmc_jax.data

    return Path(xmc_jax.data.__file__).parent / "wordnet_mini"
