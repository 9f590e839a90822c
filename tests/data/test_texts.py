"""Texts one a line: mapped, written, cleaned."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xmc_jax.data.texts import LineTexts, LineWriter, clean, encoded_blocks, take, write_lines

TEXTS = ["first", "", "zweite Zeile äöü", "第三", "last one"]


def test_write_and_read(tmp_path):
    texts = write_lines(tmp_path / "x.txt", TEXTS)
    assert list(texts) == TEXTS and texts == TEXTS and len(texts) == 5
    assert (tmp_path / "x.txt").read_bytes() == ("\n".join(TEXTS) + "\n").encode()
    assert [p.name for p in tmp_path.iterdir()] == ["x.txt"]  # no temporary file left
    again = LineTexts(tmp_path / "x.txt")
    assert [again[i] for i in range(5)] == TEXTS
    assert again[-1] == "last one" and again[np.int64(2)] == TEXTS[2]
    with pytest.raises(IndexError):
        again[5]


def test_slices_are_lists(tmp_path):
    texts = write_lines(tmp_path / "x.txt", TEXTS)
    for cut in (slice(1, 4), slice(None), slice(3, 1), slice(4, 99), slice(None, None, -2)):
        assert texts[cut] == TEXTS[cut]


def test_last_line_without_end_and_empty_file(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"a\n\nb")
    texts = LineTexts(tmp_path / "x.txt")
    assert list(texts) == ["a", "", "b"]
    assert b"".join(encoded_blocks(texts)) == b"a\n\nb\n"
    (tmp_path / "empty.txt").write_bytes(b"")
    assert list(LineTexts(tmp_path / "empty.txt")) == []
    assert len(write_lines(tmp_path / "none.txt", [])) == 0


def test_only_newline_ends_a_line(tmp_path):
    (tmp_path / "x.txt").write_bytes("a\u2028b\x85c\x0bd\re\nf\n".encode())
    assert len(LineTexts(tmp_path / "x.txt")) == 2


@pytest.mark.parametrize("separator", ["\n", "\r", "\r\n", "\u2028", "\u2029", "\x85", "\x0b\x0c"])
def test_separators_inside_become_one_space(tmp_path, separator):
    assert clean(f"a{separator}b") == "a b"
    assert list(write_lines(tmp_path / "x.txt", [f"a{separator}b", "c"])) == ["a b", "c"]


def test_lone_surrogate_is_replaced(tmp_path):
    assert write_lines(tmp_path / "x.txt", ["a\ud800b"])[0] == "a?b"


def test_take_is_a_view_and_can_be_written(tmp_path):
    texts = write_lines(tmp_path / "x.txt", TEXTS)
    some = texts.take([4, 2, 2])
    assert list(some) == ["last one", TEXTS[2], TEXTS[2]] and some[0:2] == ["last one", TEXTS[2]]
    assert list(some.take([2, 0])) == [TEXTS[2], "last one"]
    written = write_lines(tmp_path / "y.txt", some)
    assert list(written) == list(some) == list(LineTexts(tmp_path / "y.txt"))
    assert take(TEXTS, np.array([4, 0])) == ["last one", "first"]


def test_is_whole(tmp_path):
    texts = write_lines(tmp_path / "x.txt", TEXTS)
    assert texts.is_whole(tmp_path / "x.txt") and not texts.is_whole(tmp_path / "y.txt")
    assert not texts.take([0, 1]).is_whole(tmp_path / "x.txt")
    assert not texts.take([0, 1, 2, 4, 3]).is_whole(tmp_path / "x.txt")


def test_pickle(tmp_path):
    texts = write_lines(tmp_path / "x.txt", TEXTS)
    assert list(pickle.loads(pickle.dumps(texts.take([3, 0])))) == [TEXTS[3], "first"]
    memory = LineTexts.from_bytes(b"a\nb\n")
    assert list(pickle.loads(pickle.dumps(memory))) == ["a", "b"]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    write_lines(tmp_path / "x.txt", ["old"])

    def broken():
        yield "new"
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        write_lines(tmp_path / "x.txt", broken())
    assert list(LineTexts(tmp_path / "x.txt")) == ["old"]
    assert [p.name for p in tmp_path.iterdir()] == ["x.txt"]


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.lists(st.text(max_size=20), max_size=30), st.data())
def test_any_text_survives(texts, data):
    writer = LineWriter()
    for text in texts:
        writer.append(text)
    mapped = writer.close()
    expected = [clean(text).encode("utf-8", "replace").decode() for text in texts]
    assert list(mapped) == expected
    rows = data.draw(st.lists(st.integers(0, max(len(texts) - 1, 0)), max_size=5 * bool(texts)))
    assert list(mapped.take(rows)) == [expected[row] for row in rows]
    assert b"".join(encoded_blocks(mapped)) == b"".join(encoded_blocks(texts))


def test_many_blocks(tmp_path):
    texts = [f"text {i} " + "x" * (i % 7) for i in range(40_000)]
    mapped = write_lines(tmp_path / "x.txt", iter(texts))
    assert list(mapped) == texts
    assert b"".join(encoded_blocks(mapped)) == b"".join(encoded_blocks(texts))
    np.testing.assert_array_equal(mapped.offsets(), LineTexts(tmp_path / "x.txt").offsets())
