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
        ((MINI, "--config.seed=-1"), "config.seed = -1: expected 0 to 9223372036854775807"),
        ((MINI, f"--config.seed={10**30}"), f"config.seed = {10**30}: expected 0 to"),
        ((MINI, "--config.temperatures.de=0"), "unknown field among --config.temperatures.de=0"),
        (("--config=README.md:wordnet-mini",), "which is no Python"),
        (("--config=xmc_jax/catalog.py",), "the file of --config has no get_config: expected"),
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


@pytest.mark.parametrize(
    "name", ["a=b.tsv", "a,b.tsv", "a,debug/c=d.tsv", "blank .tsv", "end.tsv "]
)
def test_odd_paths_behind_the_colon(tmp_path, name):
    """The file is found, and what is wrong in it is said."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("one column\n")
    for config in ("unidec", "frugal:astec"):
        config += ":" if config == "unidec" else ","
        flags = (f"--config={config}{path},debug", f"--workdir={tmp_path}/run")
        done = tiny.run("train", *flags)
        said = "found a file that ends in" if name.endswith(" ") else "line 1: found 1 columns"
        assert done.returncode == 1 and f"{path}" in done.stderr and said in done.stderr
    if not name.endswith(" "):
        done = tiny.run("train", f"--config=unidec:{path} ", f"--workdir={tmp_path}/run")
        assert f"{path}, line 1: found 1 columns" in done.stderr
