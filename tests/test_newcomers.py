"""Files as people bring them: from the file to a good model with at most one corrected command."""

from __future__ import annotations

import itertools
import json
import random
import re
import shlex
from pathlib import Path

import pytest
import tiny

ROWS = 1_000


def questions(rng: random.Random) -> str:
    """A dump of a forum: ``Id,Title,Tags``, tags as ``<a><b>``."""
    languages = ("python", "java", "c++", "c#", "ruby", "haskell", "node.js", "asp.net")
    things = ("list", "string", "regex", "thread", "socket", "decimal", "date", "file")
    acts = ("sort", "copy", "parse", "compare", "print", "close", "test", "debug")
    lines = ["Id,Title,Tags\n"]
    for number in range(ROWS):
        language, thing, act = map(rng.choice, (languages, things, acts))
        title = f'"How do I {act} a {thing} in {language}, safely?"'
        lines.append(f"{number},{title},<{language}><{thing}>\n")
    return "".join(lines)


def products(rng: random.Random) -> str:
    """A catalogue: JSON Lines whose ``category`` is a path."""
    tree = {
        "Home": {"Kitchen": ("Pans", "Knives", "Kettles"), "Garden": ("Hoses", "Spades")},
        "Electronics": {"Phones": ("Cases", "Chargers"), "Audio": ("Headphones", "Speakers")},
        "Sports": {"Cycling": ("Helmets", "Pumps"), "Swimming": ("Goggles", "Fins")},
    }
    leaves = [(a, b, c) for a, below in tree.items() for b, names in below.items() for c in names]
    looks, makers = ("red", "blue", "light", "large", "foldable"), ("Acme", "Globex", "Initech")
    lines = []
    for number in range(ROWS):
        path = rng.choice(leaves)
        title = f"{rng.choice(makers)} {rng.choice(looks)} {path[2].lower()} {rng.randint(1, 99)}"
        product = {"id": number, "title": title, "price": 9.5, "category": " > ".join(path)}
        lines.append(json.dumps(product) + "\n")
    return "".join(lines)


def headlines(rng: random.Random) -> str:
    """News in Chinese, with a header, topics joined by their comma."""
    topics = {
        "足球": ("国足", "球迷", "射门"),
        "股市": ("股票", "大盘", "涨停"),
        "天气": ("暴雨", "台风", "降温"),
        "教育": ("高考", "大学", "教师"),
        "医疗": ("医院", "疫苗", "医生"),
        "旅游": ("景区", "游客", "酒店"),
    }
    pairs = list(itertools.combinations(topics, 2))
    lines = ["标题\t主题\n"]
    for number in range(ROWS):
        one, other = rng.choice(pairs)
        words = rng.choice(topics[one]), rng.choice(topics[other])
        lines.append(f"{words[0]}与{words[1]}的最新消息第{number % 50}期\t{one}、{other}\n")
    return "".join(lines)


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.parametrize(
    ("name", "write", "labels"),
    [
        ("questions.csv", questions, 16),
        ("products.jsonl", products, 13),
        ("headlines.tsv", headlines, 6),
    ],
)
def test_from_a_file_to_a_model(tmp_path: Path, name, write, labels) -> None:
    source, prepared, run = tmp_path / name, tmp_path / "prepared", tmp_path / "run"
    source.write_text(write(random.Random(0)), encoding="utf-8")
    command = ["prepare", f"--input={source}", f"--output={prepared}"]
    done = tiny.run(*command)
    if done.returncode:  # the message says what to add
        assert not prepared.exists() and "Traceback" not in done.stderr
        quoted = re.search(r"--separator=('[^']*'|[^\s;]+)", done.stderr)
        done = tiny.run(*command, *shlex.split(quoted[0]))
    assert done.returncode == 0, done.stderr
    assert f"labels {labels}\n" in done.stdout
    trained = tiny.run("train", f"--config=unidec:{prepared}", f"--workdir={run}")
    assert trained.returncode == 0, trained.stderr
    (evaluation,) = run.glob("eval-test-*.json")
    heads = json.loads(evaluation.read_text(encoding="utf-8"))["heads"]
    assert next(iter(heads.values()))["filtered"]["P@1"] >= 95
