"""README and guide: their snippets run, their links and paths lead somewhere, they keep their size.

A fenced block is ``bash`` or ``python``, which are run here, or ``text``. Comments right above it
say more: ``<!-- needs: ... -->``, ``<!-- needs data: ... -->`` and ``<!-- run by: ... -->`` why it
is not run; ``<!-- given: ... -->`` is a line of Python to be run before it. Guide pages go on from
what the README's blocks leave in their folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
GUIDE = ROOT / "xmc_jax" / "guide"
PAGES = [README, *sorted(GUIDE.glob("*.md"))]
KINDS = ("bash", "python", "text")
NOT_RUN = ("needs", "needs data", "run by")
COMMENT = re.compile(r"<!-- ([a-z ]+): (.+) -->")
LINK = re.compile(r"\]\(([^)\s]+)\)")
PATH = re.compile(r"`((?:xmc_jax|configs|experiments|tests|third_party)/[\w./-]*)")
# Appended to what a page says: enough to see that its command works.
SMALL = "--config.epochs=1 --config.eval_epochs=1 --config.max_minutes=0"


class Block(NamedTuple):
    """A fenced block: its page and line, its info string, its text, the comments above it."""

    page: str
    line: int
    kind: str
    source: str
    comments: tuple[tuple[str, str], ...] = ()

    @property
    def is_run(self) -> bool:
        return self.kind != "text" and not any(name in NOT_RUN for name, _ in self.comments)


def blocks(page: str, text: str) -> list[Block]:
    """The fenced blocks of a page.

    Raises:
      ValueError: a block that is not closed.
    """
    found, comments, opened = [], [], None
    for number, line in enumerate(text.splitlines(), 1):
        if opened is not None:
            if line == "```":
                kind, first, comments_above, lines = opened
                found.append(Block(page, first, kind, "\n".join(lines), comments_above))
                opened, comments = None, []
            else:
                opened[-1].append(line)
        elif line.startswith("```"):
            opened = line[3:], number, tuple(comments), []
        elif match := COMMENT.fullmatch(line):
            comments.append(match.groups())
        else:
            comments = []
    if opened is not None:
        raise ValueError(f"{page}, line {opened[1]}: the block is not closed.")
    return found


def prose(text: str) -> list[str]:
    """The lines of a page outside of its blocks and tables."""
    fenced, kept = False, []
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        if not fenced and not line.startswith(("|", "```")):
            kept.append(line)
    return kept


def missing(page: Path, text: str) -> list[str]:
    """The relative links and the paths in backticks that lead nowhere."""
    links = [link.partition("#")[0] for link in LINK.findall(text) if "://" not in link]
    places = [page.parent / link for link in links if link]
    places += [ROOT / path for path in PATH.findall(text)]
    return [str(place) for place in places if not place.exists()]


ALL = [block for page in PAGES for block in blocks(page.name, page.read_text())]
FIRST = [
    block for block in ALL if block.is_run and (block.page, block.kind) == ("README.md", "bash")
]
THEN = [block for block in ALL if block.is_run and block not in FIRST]


def run(block: Block, folder: Path) -> None:
    """Runs a block in a folder, as a reader would."""
    if block.kind == "python":
        given = [line for name, line in block.comments if name == "given"]
        code = compile("\n".join([*given, block.source]), f"{block.page}:{block.line}", "exec")
        with contextlib.chdir(folder):
            exec(code, {"__name__": "page"})
        return
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", block.source],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, f"{block.page}, line {block.line}:\n{done.stdout}{done.stderr}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where a reader of the README is after its commands; ``python -m xmc_jax.train`` is short."""
    made = tmp_path_factory.mktemp("pages")
    (made / "configs").symlink_to(ROOT / "configs")
    python = made / "bin" / "python"
    python.parent.mkdir()
    short = f'[ "$2" = xmc_jax.train ] && set -- "$@" {SMALL}'
    python.write_text(f'#!/bin/sh\n{short}\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    for block in FIRST:
        run(block, made)
    return made


def test_the_commands_of_the_readme_leave_a_run(folder):
    assert (folder / "prepared" / "dataset.json").exists()
    assert list((folder / "runs" / "unidec-prepared").glob("eval-test-*.json"))


@pytest.mark.parametrize("block", THEN, ids=lambda block: f"{block.page}:{block.line}")
def test_snippet(block, folder):
    run(block, folder)


def test_the_readme_has_the_two_commands():
    train = "pip install . && python -m xmc_jax.train --config=configs/unidec.py:wordnet-mini"
    sources = [block.source for block in ALL if block.page == "README.md"]
    assert train in sources and "pip install '.[test]' && pytest" in sources


def test_the_readme_is_short():
    lines = README.read_text().splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 120] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page(page):
    text = page.read_text()
    assert [line for line in prose(text) if len(line) > 120] == []
    assert missing(page, text) == []
    assert not re.search(r"(?<![\w.~])/(home|mnt|opt|root|tmp|usr|var|work|Users)/", text)
    for block in blocks(page.name, text):
        assert block.kind in KINDS, block
        for name, said in block.comments:
            assert name in ("given", *NOT_RUN), block
            places = re.findall(r"[\w.]+/[\w./]*\w", said) if name == "run by" else []
            assert all((ROOT / place).exists() for place in places), block


def test_every_guide_page_is_linked_in_the_readme_and_ships():
    linked = {(ROOT / link).resolve() for link in LINK.findall(README.read_text())}
    assert {page.resolve() for page in PAGES[1:]} <= linked
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "guide/*.md" in settings["tool"]["setuptools"]["package-data"]["xmc_jax"]


def test_what_this_file_sees():
    text = "a\n<!-- needs: b -->\n```bash\nc\n```\n<!-- given: d -->\n\n```python\ne\n\n```\n"
    assert blocks("p", text) == [
        Block("p", 3, "bash", "c", (("needs", "b"),)),
        Block("p", 8, "python", "e\n", ()),
    ]
    assert [block.is_run for block in blocks("p", text)] == [False, True]
    with pytest.raises(ValueError, match="p, line 1: the block is not closed"):
        blocks("p", "```bash\n")
    nowhere = "[a](none.md#b) [c](README.md) [d](https://e) `xmc_jax/none.py` `configs/unidec.py:f`"
    assert missing(README, nowhere) == [str(ROOT / "none.md"), str(ROOT / "xmc_jax/none.py")]
    assert prose("a\n| b |\n```bash\nc\n```\nd\n") == ["a", "d"]
