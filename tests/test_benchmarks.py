"""The benchmarks run, and say what they measured; whether they are fast is not asked here."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest
import tiny

from experiments.benchmarks import __main__ as command
from experiments.benchmarks import harness, problem, train_step
from experiments.benchmarks.harness import Contender, ContenderError, Subject
from xmc_jax.models.encoders.transformer import TransformerConfig

LINES = {  # case -> lines of a quick run, by what tells them apart
    "train_step": [("tiny", "titles"), ("tiny", "amazon")],
    "frugal_step": [()],
    "labels_sweep": [()],
    "host": [("batches",), ("keeps up",)],
    "refresh": [
        *[("embed",), ("cluster",), ("search", "exact")],
        *[("search", "ivf", "topics"), ("search", "ivf", "anywhere")],
    ],
    "predict": [()],
    "retrieval": [("exact",), ("ivf",), ("lexical",)],
    "label_graph": [("exact",), ("walk",), ("neighbours",)],
    "metrics": [()],
}


def bench(*flags, **environment):
    """Runs the program as a user would."""
    return subprocess.run(
        [sys.executable, "-m", "experiments.benchmarks", *flags],
        cwd=tiny.ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def sleeper(seconds, value):
    """A contender that sleeps, and remembers its turns."""
    turns = []

    def turn(number):
        turns.append(number)
        time.sleep(seconds)

    return Subject(turn, {"value": value}, lambda: {"turns": turns})


def failing(when):
    """A contender that fails in its set-up or in a turn."""
    if when == "set-up":
        raise ValueError("no such weights")
    return Subject(lambda _: 1 / 0)


def test_contenders_take_turns():
    slow, fast = (Contender(n, sleeper, (s, n)) for n, s in (("slow", 0.06), ("fast", 0.02)))
    seen = {}
    found = harness.alternate([slow, fast], repeats=3, warmup=1, check=seen.update)
    assert {name: facts["value"] for name, facts in seen.items()} == {
        "slow": "slow",
        "fast": "fast",
    }
    for name, seconds in (("slow", 0.06), ("fast", 0.02)):
        result = found[name]
        assert result["turns"] == [0, 1, 2, 3] and len(result["times"]) == 3
        assert result["seconds"]["n"] == 3 and result["seconds"]["min"] >= seconds
        assert result["peak_rss_bytes"] > 1 << 20 and result["idle_cpu"] < 0.5
    assert harness.ratios(found, "fast").keys() == {"slow"}


@pytest.mark.parametrize(("when", "said"), [("set-up", "no such weights"), ("turn", "division")])
def test_a_failing_contender_is_told_with_its_name(when, said):
    with pytest.raises(ContenderError, match=f"(?s)broken.*{said}"):
        harness.alternate([Contender("broken", failing, (when,))], repeats=1)


def test_spread():
    assert harness.spread([3.0, 1.0, 2.0, 5.0, 4.0]) == {
        **{"median": 3.0, "min": 1.0, "q1": 2.0, "q3": 4.0, "max": 5.0},
        "n": 5,
    }


def test_different_losses_are_refused():
    facts = {"a": {"losses": {"loss": 2.0}}, "b": {"losses": {"loss": 2.0001}}, "c": {}}
    train_step.same_losses(facts)
    for value in (2.001, np.nan):
        facts["b"]["losses"]["loss"] = value
        with pytest.raises(ContenderError, match="b: loss is"):
            train_step.same_losses(facts)


def test_useful_flops_are_those_of_a_plain_count():
    config = TransformerConfig.minilm(dim=4, mlp_dim=8, num_layers=3, num_heads=2)
    lengths = np.array([2, 3, 0, 5])  # one query, three labels, one of them an empty slot
    step = type("Step", (), {"targets": np.zeros((1, 3), bool)})
    wanted = 0
    for length in lengths:
        for _ in range(config.num_layers):
            wanted += length * 4 * (2 * 4 * 4) + length * 2 * (2 * 4 * 8)  # q, k, v, out; mlp
            wanted += 2 * (2 * length * length * 4)  # scores, context
    wanted += (4 + 1) * 2 * 4 * 6  # DE of all, CLF of the query
    wanted += 2 * (1 * 3 * 2 * 6)  # scores of both heads
    batch = problem.Batch(step, None, None, lengths)
    assert problem.useful_flops(config, batch, 6, train=False) == wanted
    assert problem.useful_flops(config, batch, 6, train=True) == 3 * wanted


def test_amazon_shaped_data():
    data = problem.amazon_shaped(4000, 3000, 500)
    counts = np.diff(data.labels.indptr)
    assert 18 < counts.mean() < 23 and counts.min() >= 1 and (counts > 100).any()
    lengths = data.train_tokens.lengths()
    words = problem.PIECES_A_WORD * problem.WORDS + 2
    assert 0.93 * words < lengths.mean() < words and lengths.max() == problem.MAX_LENGTH
    assert data.filters.nnz == 2000 and data.label_tokens.ids.max() < 500


def test_help_lists_the_cases():
    done = bench("--help")
    assert done.returncode == 0 and all(f"\n{case}" in done.stdout for case in command.CASES)
    assert LINES.keys() == set(command.CASES)


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch is installed")
def test_a_peer_without_torch_names_what_to_install():
    done = bench("train_step", "--quick", "--peer=torch")
    assert done.returncode == 1 and "pip install '.[bench]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """Lines of a quick run of everything, by case."""
    out = tmp_path_factory.mktemp("bench") / "lines"
    done = bench("--quick", f"--out={out}")
    assert done.returncode == 0, done.stderr
    assert out.read_text() == done.stdout
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {case: [row for row in rows if row["case"] == case] for case in command.CASES}


@pytest.mark.slow
@pytest.mark.parametrize("case", command.CASES)
def test_quick_run_has_every_line(quick, case):
    assert len(quick[case]) == len(LINES[case])
    for row, words in zip(quick[case], LINES[case]):
        assert set(words) <= {str(value) for value in row.values()}
        assert row["device"] and row["threads"] >= 1 and row["versions"]["jax"]
        for found in row["contenders"].values():
            assert 0 < found["seconds"]["min"] <= found["seconds"]["median"]
            assert found["peak_rss_bytes"] > 0


@pytest.mark.slow
def test_what_does_not_depend_on_the_machine(quick):
    for row in quick["train_step"]:
        packed, single = (row["contenders"][name] for name in ("packed", "one text a row"))
        loss = single["facts"]["losses"]["loss"]
        assert packed["facts"]["losses"]["loss"] == pytest.approx(loss, rel=1e-5)
        assert packed["facts"]["packing"] > single["facts"]["packing"]
        assert packed["share_of_peak"] > 0 and packed["xla_temp_bytes"] > 0
    assert abs(quick["labels_sweep"][0]["temporary_bytes_more"]) < 1 << 20
    balanced = quick["refresh"][1]["contenders"]["ours"]
    assert balanced["largest"] - balanced["smallest"] <= 1
    assert quick["refresh"][2]["contenders"]["ours"]["facts"]["recall"] > 0.999
    exact, hnsw = (quick["predict"][0]["contenders"][kind] for kind in ("exact", "hnsw"))
    assert exact["facts"]["recall"] > 0.999 and 0 < hnsw["facts"]["recall"] <= 1
    assert exact["texts 100"]["search_seconds"] > 0
