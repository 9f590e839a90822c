"""Every binary starts as a user would start it, and tells a wrong command in one message."""

from __future__ import annotations

import subprocess
import sys

import pytest
import tiny

MODULES = ("train", "evaluate", "predict", "prepare", "inspect_labels")


@pytest.mark.parametrize("module", MODULES)
def test_help(module):
    done = tiny.run(module, "--help")
    assert done.returncode == 0, done.stderr
    assert f"python -m xmc_jax.{module} --" in done.stdout and "\nflags:" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "must have a value other than None"),
        (("--workdri=x",), "Unknown command line flag 'workdri'"),
    ],
)
def test_wrong_flags(module, flags, said):
    done = tiny.run(module, *flags)
    assert done.returncode == 1 and said in done.stderr
    assert len(done.stderr.splitlines()) == 2 and "See --help" in done.stderr


MINI = "--config=configs/unidec.py:wordnet-mini"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((f"{MINI},losss=supcon",), "Did you mean 'loss'?"),
        (("--config=configs/unidec.py:wordnet-mini,paper=iclr",), "expected thesis or preprint"),
        ((MINI, "--config.batch_siz=3"), 'Did you mean "batch_size"'),
        ((MINI, "--config.batch_size=many"), "--config.batch_size=many: invalid literal"),
        ((MINI, "--config.lr.nope=1"), "unknown field among --config.lr.nope=1"),
        (("--config=configs/none.py",), "No such file or directory: 'configs/none.py'"),
        (("--config=none:x",), "no configuration 'none': expected a file (.py) or one of depsl"),
        ((MINI, "surplus"), "unexpected arguments: ['surplus']"),
        ((MINI, "--config.batching=cluster"), "Did you mean 'clusters'?"),
        ((f"{MINI},loss=softmax",), "config.de.loss = 'softmax'"),
        ((MINI, "--config.stages=((1,'heads'),)"), "config.stages holds (1, 'heads'): expected"),
    ],
)
def test_wrong_configurations(flags, said, tmp_path):
    done = tiny.run("train", *flags, f"--workdir={tmp_path}/run")
    assert done.returncode == 1 and said in done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (
            ["--config=configs/unidec.py:wordnet-mini,loss=supcon"],
            "unidec-wordnet-mini-loss=supcon",
        ),
        (["--config", "configs/depsl.py:a/b.tsv"], "depsl-a-b.tsv"),
        (["--config=configs/unidec.py", "--config.seed=1"], "unidec"),
        (["--config=unidec:wordnet-mini"], "unidec-wordnet-mini"),
    ],
)
def test_default_work_directory(arguments, name):
    code = (
        "import sys; from absl import flags; from xmc_jax import train;"
        "flags.FLAGS(sys.argv); print(train._default_workdir())"
    )
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tiny.ROOT, check=False)
    assert done.stdout.strip() == f"runs/{name}", done.stderr
