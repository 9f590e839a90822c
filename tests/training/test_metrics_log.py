"""The log of a run: what lies behind the checkpoint is dropped; a full disk names the file."""

from __future__ import annotations

import contextlib
import json

import numpy as np
import pytest

from xmc_jax.training.metrics_log import MetricsLog


def test_log_drops_what_lies_behind_the_checkpoint(tmp_path):
    log = MetricsLog(tmp_path, 0)
    for step in (1, 2, 3, 4):
        log.write(step, loss=np.float32(step), pool={"fill": 0.5})
    log.close()
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 5, "lo')  # a kill in the middle of a line
    log = MetricsLog(tmp_path, 2)
    log.write(3, loss=30.0)
    log.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert not (tmp_path / "metrics.tmp").exists()


def test_odd_lines_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    odd = [b"\xff\xfe", b"[1]", b"7", b'{"step": 1e999}', b'{"step": null}', b"[" * 100_000]
    odd += [b'{"step": "x"}', b'{"step": ' + b"1" * 5000 + b"}", b"\0" * 50, b"", b'{"step": 2']
    path.write_bytes(b"\n".join([b'{"step": 1}', *odd]))
    log = MetricsLog(tmp_path, 2)
    log.write(3, loss=1.0)
    log.close()
    assert path.read_text() == '{"step": 1}\n{"step": 3, "loss": 1.0}\n'


def test_full_disk_in_the_log_names_the_file(tmp_path, devices):
    log = MetricsLog(tmp_path, 0)
    log._file.close()
    log._file = open(devices / "full", "w", buffering=1)
    with pytest.raises(OSError, match=r"metrics\.jsonl: step 7 could not be logged \(No space"):
        log.write(7, loss=1.0)


def test_a_log_that_cannot_be_opened_names_the_file(tmp_path, small_disk):
    log = MetricsLog(small_disk.folder, 0)
    log.write(1, loss=1.0)
    log.close()
    (small_disk.folder / "rest").write_bytes(bytes((1 << 20) - 4096 * 2))
    with contextlib.suppress(OSError):
        (small_disk.folder / "last").write_bytes(bytes(1 << 20))
    with pytest.raises(OSError, match=r"metrics\.jsonl: step 1 .*No space left.*Free some space"):
        MetricsLog(small_disk.folder, 1)
    assert (small_disk.folder / "metrics.jsonl").read_text() == '{"step": 1, "loss": 1.0}\n'
    small_disk.remount("ro")
    with pytest.raises(OSError, match=r"metrics\.jsonl: .*Read-only file system.*Make it writable"):
        MetricsLog(small_disk.folder, 1)
