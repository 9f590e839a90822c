"""README.md of the experiments is what the ledger gives; notes stand beside it, nothing is lost."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import pkgutil
import re
import subprocess
import sys

import pytest
from ledger_rows import made
from test_experiments import SCRIPTS

from experiments import ledger, readme
from experiments.ledger import FRUGAL, UNIDEC, Row, Table
from xmc_jax.training.workdir import flatten

FOLDER = readme.README.parent
PAGES = [readme.README, *sorted((FOLDER / "notes").glob("*.md"))]
ROW = Row("masked", {"mask_filter_pairs": True})
TABLE = Table("table_x", "Title", (ROW,), datasets=("wordnet-mini", "wordnettitles"))
FIGURE = {
    **{"kind": "figure", "topic": "speed", "table": "A step", "name": "ours", "seed": 0},
    **{"command": "C", "commit": "c1", "date": "2026-01-01", "device": "D"},
    "columns": {"P@1": 1.5, "ms": 20},
}


def prose(text):
    """Lines that are not of tables, code or headings."""
    text = re.sub(r"(?ms)^```.*?^```$", "", text)
    return [line for line in text.split("\n") if not line.startswith(("|", "#", "    "))]


def nowhere(text):
    """Modules, files and fields of configurations that a page names and that do not exist."""
    text = " ".join(text.split())
    found = [n for n in re.findall(r"python -m ([\w.]+)", text) if not importlib.util.find_spec(n)]
    for name in re.findall(r"`((?:xmc_jax|experiments)\.[\w.]+)`", text):
        try:
            pkgutil.resolve_name(name)
        except (AttributeError, ImportError):
            found.append(name)
    paths = re.findall(r"\b(?:xmc_jax|configs|experiments|tests)/[\w./]*\w", text)
    found += [path for path in paths if not (ledger.ROOT / path).exists()]
    configs = [ledger.CONFIGS[file]() for file in (UNIDEC, FRUGAL)]
    fields = {name for config in configs for name in flatten(config.to_dict())}
    return found + [n for n in re.findall(r"--config\.([\w.]+)=", text) if n not in fields]


def headings(text):
    return [line.lstrip("# ") for line in text.split("\n") if re.match("#+ ", line)]


def test_the_readme_is_what_the_ledger_gives_byte_for_byte():
    text = readme.readme(ledger.read(), FOLDER / "figures")
    same = readme.README.read_bytes() == text.encode()
    assert same, "run python -m experiments.readme"


def test_the_readme_has_a_place_for_every_script():
    text = " ".join(readme.README.read_text().split())
    for script in SCRIPTS:
        assert f"python -m experiments.{script}" in text or f"figures/{script}-" in text


def test_every_measurement_of_the_ledger_is_shown():
    rows, text = ledger.read(), readme.README.read_text()
    figures = [row for row in rows if row["kind"] == "figure"]
    for row in figures:
        assert any(
            line.startswith(f"| {row['name']} | ")
            and all(str(v).rstrip("0").rstrip(".") in line for v in row["columns"].values())
            for line in text.split("\n")
        ), row
        assert row["commit"] in text and row["command"] in " ".join(text.split())
        assert row["date"] and row["device"] and "seed" in row
    assert len(figures) > 50 and "## Our data sets" in text
    # A run is a row of the table whose script made it, unless a later run of that row counts.
    for row in rows:
        if row["kind"] == "train":
            assert re.search(
                rf"^\| {row['dataset']} \| {re.escape(row['name'])} († )?\|", text, re.M
            )


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_pages_have_short_lines_and_links_that_lead_somewhere(page):
    text = page.read_text()
    assert max(map(len, prose(text))) <= 120
    assert "<!--" not in text and text.startswith("# ")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor:
            known = [readme.link(title) for title in headings(file.read_text())]
            assert any(link.endswith(f"(#{anchor})") for link in known), target
    titles = headings(text)
    assert len(set(titles)) == len(titles)  # an anchor would be ambiguous


# Rows of the ledger say what was run at their commit, and stay as they are.
@pytest.mark.parametrize("page", PAGES[1:], ids=lambda path: path.name)
def test_what_notes_name_exists(page):
    assert nowhere(page.read_text()) == []


def test_names_that_lead_nowhere_are_seen():
    text = (
        "Run `python -m\nxmc_jax.plan`, `xmc_jax.losses.hinge`, configs/none.py:x --config.beta=1"
    )
    missing = ["xmc_jax.plan", "xmc_jax.losses.hinge", "configs/none.py", "betas"]
    assert nowhere(f"{text} --config.betas=2, `experiments.benchmarks.ours`") == missing
    assert prose("x" * 121 + "\n| y |\n```\nz\n```\n# a\n    b") == ["x" * 121, ""]


def test_a_page_of_notes_stands_for_every_topic_and_no_other():
    assert {page.stem for page in PAGES[1:]} == readme.TOPICS.keys()
    index = readme.README.read_text().split("\n## ")[0]
    for name, topic in readme.TOPICS.items():
        assert f"(notes/{name}.md)" in index and readme.link(topic.title) in index


def test_what_was_measured_with_earlier_settings_is_shown_until_it_is_measured_again(tmp_path):
    old = {**made(ROW, 0, 40.0, dataset="wordnettitles", beta=17), "table": "table_x"}
    old |= {"name": "masked"}
    now = ledger.configuration("wordnettitles", ROW, 0).beta
    text = readme.runs([old], tmp_path, table=TABLE)
    assert "| wordnettitles | masked † | concat | 40.00 |" in text
    assert f"other settings than today's: on wordnettitles `beta` was `17`, now `{now}`." in text
    assert "| wordnet-mini | masked | | not run |" in text
    again = {**made(ROW, 1, 50.0, dataset="wordnettitles"), "table": "table_x", "name": "masked"}
    text = readme.runs([old, again], tmp_path, table=TABLE)
    assert "| wordnettitles | masked | concat | 50.00 |" in text
    assert "†" not in text and "40.00" not in text
    others = ({"table": "table_y"}, {"name": "open"}, {"dataset": "mobytitles"}, {"seed": 2})
    for other in others:
        row = {**old, **other}
        found = ledger.earlier([row], TABLE, "wordnettitles", ROW, 0)
        assert found is None
    assert ledger.earlier([old, {**old, "seconds": 9}], TABLE, "wordnettitles", ROW, 0) == {
        **old,
        "seconds": 9,
    }


def test_a_data_set_that_was_not_run_is_shown_only_if_it_is_the_first(tmp_path):
    text = readme.runs([], tmp_path, table=TABLE)
    assert "| wordnet-mini | masked | | not run |" in text and "wordnettitles" not in text
    swapped = dataclasses.replace(TABLE, datasets=TABLE.datasets[::-1])
    text = readme.runs([], tmp_path, table=swapped)
    assert "| wordnettitles | masked | | not run |" in text and "wordnet-mini" not in text


def test_figures_say_once_what_they_have_in_common():
    other = {**FIGURE, "name": "theirs", "commit": "c2", "columns": {"P@1": 12.25}, "note": "a|b"}
    assert readme.table_of_figures("A step", [FIGURE, other, {**other, "name": "x"}]) == (
        "### A step\n\n"
        "Seed 0; date 2026-01-01; device D; command `C`.\n\n"
        "| row | P@1 | ms | commit | note |\n"
        "| --- | --- | --- | --- | --- |\n"
        "| ours | 1.50 | 20 | c1 |  |\n"
        "| theirs | 12.25 |  | c2 | a\\|b |\n"
        "| x | 12.25 |  | c2 | a\\|b |"
    )
    longer = [FIGURE, {**FIGURE, "command": "C2"}, {**FIGURE, "command": "C2"}]
    lines = readme.table_of_figures("A step", longer).split("\n")
    assert [line.split(" | ")[-1] for line in lines[-3:]] == ["`C` |", "`C2` |", "as above |"]


def test_a_figure_of_an_unknown_topic_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"topics of figures: \['dance'\]; expected some of"):
        readme.readme([{**FIGURE, "topic": "dance"}], tmp_path)


def test_long_lines_are_broken_but_for_tables_code_and_pictures():
    words = "word " * 60
    kept = [f"| {words}|", f"### {words}", f"    {words}", "![x](" + "y" * 200 + ")"]
    text = readme.wrapped("\n".join([words.strip(), *kept]))
    lines = text.split("\n")
    assert lines[-4:] == kept and len(lines) > 6
    assert all(len(line) <= readme.WIDTH for line in lines[:-4])
    assert " ".join(lines[:-4]) == words.strip()


def test_the_command_writes_the_readme_and_checks_it(tmp_path):
    source, page = tmp_path / "ledger.jsonl", tmp_path / "README.md"
    source.write_text(json.dumps(FIGURE) + "\n")

    def run(*flags):
        command = [sys.executable, "-m", "experiments.readme", *flags]
        command += [f"--ledger={source}", f"--readme={page}"]
        return subprocess.run(command, cwd=ledger.ROOT, capture_output=True, text=True)

    before = run("--check")
    assert before.returncode == 1 and "run python -m experiments.readme" in before.stderr
    assert not page.exists()
    assert run().returncode == 0 and run("--check").returncode == 0
    assert "| ours | 1.5 | 20 |" in page.read_text()
    assert {*tmp_path.iterdir()} == {source, page}
    page.write_text(page.read_text() + "by hand\n")
    assert run("--check").returncode == 1
