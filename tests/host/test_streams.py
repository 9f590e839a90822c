"""Standard streams that are closed, full, not read to their end, not UTF-8: a word and a code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

PRINTS = """
from xmc_jax.host import console
def main(argv):
    console.setup(output_needed={needed})
    for number in range(20_000):
        print("line", number)
    open({done!r}, "w").close()
console.run(main)
"""


def shell(command: str, *, stdin: str = "", **environment: str):
    """Runs a line of bash, in which ``python`` is ours."""
    return subprocess.run(
        ["bash", "-c", f'python() {{ "{sys.executable}" "$@"; }}; {command}'],
        input=stdin,
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=tiny.ROOT,
        env={**os.environ, "PYTHONPATH": str(tiny.ROOT), **environment},
        timeout=300,
    )


def without_reader(module: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs a binary whose standard output is a pipe that was closed at its other end."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", f"xmc_jax.{module}", *map(str, arguments)]
    try:
        return subprocess.run(
            command, stdout=write, stderr=subprocess.PIPE, text=True, cwd=tiny.ROOT, timeout=300
        )
    finally:
        os.close(write)


LOST = [  # standard output, exit code, message
    ("| head -1", 141, "standard output was closed before its end."),
    (">{devices}/full", 1, "standard output cannot be used: No space left on device."),
    (">&-", 1, "standard output is closed."),
    ("2>&-", 0, ""),
    (">{devices}/null 2>{devices}/full", 0, ""),
]


@pytest.mark.parametrize("needed", [True, False])
@pytest.mark.parametrize(("where", "code", "said"), LOST)
def test_lost_output_is_told_in_a_word(tmp_path, devices, needed, where, code, said):
    """The program ends if it is needed; else it goes on, and one closed from the start is right."""
    done, status, program = (tmp_path / name for name in ("done", "status", "program.py"))
    program.write_text(PRINTS.format(done=str(done), needed=needed))
    where = where.format(devices=devices)
    piped = where.startswith("|")
    command = f"python {program} {'' if piped else where}; echo $? > {status}"
    found = shell(f"{{ {command}; }} {where if piped else ''}")
    if where == ">&-" and not needed:
        code, said = 0, ""
    assert int(status.read_text()) == code, found.stderr
    goes_on = "" if needed else " The run goes on without it."
    assert found.stderr.splitlines() == ([said + goes_on] if said else [])
    assert done.exists() == (not needed or code == 0)


@pytest.mark.parametrize(
    ("streams", "said"),
    [
        (">&-", "standard output is closed. Give a file: --output=FILE."),
        (">{devices}/full", "standard output cannot be used: No space left on device. Give a file"),
        ("<&-", "standard input is closed. Give a file: --input=FILE."),
    ],
)
def test_predict_says_so_before_it_loads(devices, streams, said):
    streams = streams.format(devices=devices)
    found = shell(f"python -m xmc_jax.predict --workdir=nowhere {streams}")
    assert found.returncode == 1 and said in found.stderr
    assert found.stderr.count("\n") == 1 and not found.stdout


def test_closed_streams_do_not_matter_where_files_are_given(trained, tmp_path):
    (tmp_path / "in").write_text("red apple\n")
    files = f"--input={tmp_path}/in --output={tmp_path}/out"
    found = shell(f"python -m xmc_jax.predict --workdir={trained} {files} <&- >&- 2>&-")
    assert found.returncode == 0
    assert json.loads((tmp_path / "out").read_text())["text"] == "red apple"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-16"])
def test_json_lines_are_utf_8_whatever_the_locale(trained, encoding):
    texts = ["日本 apple", "bán castle"]
    found = shell(
        f"python -m xmc_jax.predict --workdir={trained} --k=1",
        stdin="\n".join(texts),
        PYTHONIOENCODING=encoding,
    )
    assert found.returncode == 0, found.stderr
    assert [json.loads(line)["text"] for line in found.stdout.splitlines()] == texts


def test_reports_write_what_a_terminal_lacks_as_escapes(tmp_path):
    (tmp_path / "points.tsv").write_text("日本\tសួស្តី\n" * 3 + "b\tc\n" * 20, encoding="utf-8")
    command = f"python -m xmc_jax.prepare --input={tmp_path}/points.tsv"
    found = shell(command, LC_ALL="C", PYTHONIOENCODING="ascii")
    assert found.returncode == 0, found.stderr
    assert "training rows" in found.stdout


def test_training_without_standard_error(own_data, tmp_path):
    """No file of the run gets the number 2, and with it what libraries print."""
    arguments = [f"--config=configs/unidec.py:{own_data}", *tiny.flags(epochs=1)]
    command = " ".join(["python -m xmc_jax.train", *arguments, f"--workdir={tmp_path}/run"])
    found = shell(f"{command} 2>&-")
    assert found.returncode == 0 and "work directory:" in found.stdout
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert all("step" in json.loads(line) for line in lines)


def test_nobody_reads_what_training_and_evaluation_print(own_data, tmp_path):
    """Training goes on to its end; its result stands in the work directory."""
    flags = [*tiny.flags(epochs=1), f"--workdir={tmp_path}/run"]
    found = without_reader("train", f"--config=configs/unidec.py:{own_data}", *flags)
    assert found.returncode == 141 and "Traceback" not in found.stderr, found.stderr
    assert found.stderr.count("standard output was closed before its end.") == 1
    assert list(Path(tmp_path / "run").glob("eval-test-*.json"))
    found = without_reader("evaluate", f"--workdir={tmp_path}/run")
    assert found.returncode == 141 and "Traceback" not in found.stderr, found.stderr
