"""Shared fixtures; the suite runs on a CPU, offline."""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

import pytest

if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    # A core each: two processes whose threads wait for each other's cores take longer.
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Most programs here run for a moment: compiling them is most of the suite's time.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
# Data and tokens are cached away from the user's; what one process compiled, others need not.
SCRATCH = Path(tempfile.mkdtemp(prefix="xmc-tests-"))
atexit.register(shutil.rmtree, SCRATCH, ignore_errors=True)
os.environ["XMC_CACHE"] = str(SCRATCH / "cache")
SHARED = Path(os.environ.setdefault("XMC_TESTS_SHARED", str(SCRATCH)))  # of all workers
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(SCRATCH / "compiled"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")


@pytest.fixture
def optimised(monkeypatch) -> None:
    """Steps and embedding compiled as for a user, where a test trains for long."""
    from xmc_jax.host import xla

    monkeypatch.setitem(xla.compiler_options(), "xla_backend_optimization_level", "3")


@pytest.fixture(scope="session")
def golden() -> Path:
    """Folder with the reference values (see its README)."""
    return Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def devices(tmp_path_factory) -> Path:
    """Folder with a ``null`` and a ``full`` of our own: root could replace the machine's."""
    folder = tmp_path_factory.mktemp("devices")
    for name, minor in (("null", 3), ("full", 7)):
        node = folder / name
        try:
            os.mknod(node, 0o666 | stat.S_IFCHR, os.makedev(1, minor))
            node.open("wb").close()
        except PermissionError:  # not root, or no devices here: then the machine's are safe
            node.unlink(missing_ok=True)
            node.symlink_to(f"/dev/{name}")
    return folder


@pytest.fixture(scope="session")
def mini_folder() -> Path:
    """Folder of the bundled LF-WordNetTitles-Mini."""
    import xmc_jax.data

    return Path(xmc_jax.data.__file__).parent / "wordnet_mini"


@pytest.fixture(scope="session")
def own_data(tmp_path_factory) -> Path:
    """A TSV file of 300 points, labels as texts."""
    import tiny

    return tiny.write_tsv(tmp_path_factory.mktemp("own") / "points.tsv")


@pytest.fixture(scope="session")
def trained(own_data, tmp_path_factory) -> Path:
    """Work directory of a finished run on own data; not to be changed."""
    import tiny

    from xmc_jax.runs import launch

    folder = tmp_path_factory.mktemp("trained") / "run"
    launch.start(tiny.config(own_data), folder)
    return folder


MINI = (
    "--config=configs/unidec.py:wordnet-mini,debug",
    "--config.retrieval.enabled=False",
    "--config.batching=clusters",
    "--config.hard_negatives=True",
    "--config.refresh_epochs=1",
    "--config.eval_epochs=1",
    "--config.encoder.dim=32",
    "--config.head_dim=32",
    "--config.encoder.vocab_size=1000",
    "--config.held_out_share=0.05",
    "--config.log_steps=1",
)


@pytest.fixture(scope="session")
def mini_flags() -> tuple[str, ...]:
    """Flags of a debug run on Mini: clusters, hard negatives, held-out rows, two refreshes."""
    return MINI


@pytest.fixture(scope="session")
def mini_run() -> Path:
    """Work directory of that run, trained by the binary without interruption, once for all."""
    import tiny

    folder = SHARED / "mini"
    with (SHARED / "mini.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            done = tiny.run("train", *MINI, f"--workdir={folder}.new")
            assert done.returncode == 0, done.stderr
            Path(f"{folder}.new").rename(folder)
    return folder


class SmallDisk:
    """A file system of 1 MiB that can be made read-only, or larger."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def remount(self, options: str) -> None:
        command = ["mount", "-o", f"remount,{options}", str(self.folder)]
        subprocess.run(command, check=True)


@pytest.fixture
def small_disk(tmp_path):
    """A small file system, where mounting one is permitted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small tmpfs is not permitted here")
    yield SmallDisk(folder)
    subprocess.run(["umount", "-l", str(folder)], check=True)  # lazily: files may be mapped still
