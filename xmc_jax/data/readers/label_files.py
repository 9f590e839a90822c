"""Readers for sparse label matrices and filter pairs; arrays throughout, no list of lists."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

import numpy as np
from scipy import sparse
from scipy.sparse import csr_matrix

from xmc_jax.data.readers.raw_files import line_blocks, listed, problem

_NEWLINE, _SPACE, _COLON = 10, 32, 58
_BLOCK_ROWS = 1 << 16
_WHOLE = re.compile(rb"[+-]?\d{1,18}")  # int() would also take 0_1, and thousands of digits


@dataclasses.dataclass
class RawLabels:
    """Label ids of the rows of one file, as they stand there: unsorted, repeated, unchecked.

    Attributes:
      path: the file.
      indices: int32 or int64 ``[nnz]``.
      indptr: int64 ``[n + 1]``.
      num_labels: what the file itself says L is, or None.
      line_of: the line a row stands on (1-based), or None for binary files.
      dropped: entries with a value of 0 or less, which are left out.
      weighted: entries with another value above 0 than 1, which count as 1.
      any_order: True where a file's order means nothing, so that it is not reported.
    """

    path: Path
    indices: np.ndarray
    indptr: np.ndarray
    num_labels: int | None
    line_of: Callable[[int], int] | None
    dropped: int = 0
    weighted: int = 0
    any_order: bool = False


def build_matrix(raw: RawLabels, num_labels: int) -> tuple[csr_matrix, list[str]]:
    """Returns the ``[n, L]`` matrix of 1.0, ids sorted and merged, and notes on what was met.

    Raises:
      DataError: an id outside ``[0, L)``, or a file that states another number of labels.
    """
    if raw.num_labels is not None and raw.num_labels != num_labels:
        raise problem(
            raw.path,
            1 if raw.line_of else None,
            f"{raw.num_labels} labels",
            f"{num_labels}, the number of label texts",
            "The label file and the matrix belong to different data sets or versions.",
        )
    _check_range(raw, num_labels)
    num_rows = len(raw.indptr) - 1
    data = np.ones(len(raw.indices), dtype=np.float32)
    indices = raw.indices.astype(np.int32, copy=False)
    matrix = csr_matrix((data, indices, raw.indptr), shape=(num_rows, num_labels))
    notes = _sort_and_merge(matrix, raw)
    empty = np.flatnonzero(np.diff(matrix.indptr) == 0)
    if len(empty):
        where = _where(raw, empty)
        notes.append(f"{raw.path.name}: {len(empty)} rows without labels, kept empty ({where})")
    if raw.dropped:
        notes.append(f"{raw.path.name}: {raw.dropped} entries of value 0 or less left out")
    if raw.weighted:
        notes.append(f"{raw.path.name}: {raw.weighted} entries of other values than 1 count as 1")
    return matrix, notes


def _where(raw: RawLabels, rows: np.ndarray) -> str:
    if raw.line_of is None:
        return f"rows {listed(rows[:6].tolist())}"
    return f"lines {listed([raw.line_of(int(row)) for row in rows[:6]])}"


def _check_range(raw: RawLabels, num_labels: int) -> None:
    if not len(raw.indices):
        return
    if raw.indices.min() >= 0 and raw.indices.max() < num_labels:
        return
    wrong = np.flatnonzero((raw.indices < 0) | (raw.indices >= num_labels))[0]
    row = int(np.searchsorted(raw.indptr, wrong, side="right")) - 1
    raise problem(
        raw.path,
        raw.line_of(row) if raw.line_of else None,
        f"label id {raw.indices[wrong]} in row {row}",
        f"ids from 0 to {num_labels - 1} (there are {num_labels} label texts, counted from 0)",
        "Correct the row, or use the label file that belongs to it.",
    )


def _sort_and_merge(matrix: csr_matrix, raw: RawLabels) -> list[str]:
    """Sorts ids within rows and merges repeated ones, in place; blocks keep the memory flat."""
    unsorted_blocks, repeated_blocks = [], []
    for start in range(0, matrix.shape[0], _BLOCK_ROWS):
        stop = min(start + _BLOCK_ROWS, matrix.shape[0])
        bounds = np.asarray(matrix.indptr[start : stop + 1], dtype=np.int64)
        ids = matrix.indices[bounds[0] : bounds[-1]].astype(np.int64)
        rows = np.repeat(np.arange(stop - start), np.diff(bounds))
        same_row = rows[1:] == rows[:-1]
        unsorted_blocks.append(np.unique(rows[1:][same_row & (ids[1:] < ids[:-1])]) + start)
        keys = np.sort(rows * matrix.shape[1] + ids)
        repeated_blocks.append(keys[1:][keys[1:] == keys[:-1]] // max(matrix.shape[1], 1) + start)
    notes = []
    unsorted, repeated = (
        np.concatenate([*blocks, []]).astype(int) for blocks in (unsorted_blocks, repeated_blocks)
    )
    matrix.has_sorted_indices = len(unsorted) == 0
    matrix.has_canonical_format = len(unsorted) + len(repeated) == 0
    if len(unsorted) and not raw.any_order:
        where = _where(raw, unsorted)
        notes.append(f"{raw.path.name}: {len(unsorted)} rows with unsorted label ids ({where})")
    if len(repeated):
        where = _where(raw, np.unique(repeated))
        notes.append(f"{raw.path.name}: {len(repeated)} repeated label ids merged ({where})")
    matrix.sum_duplicates()
    matrix.data[:] = 1.0
    return notes


def read_label_matrix(path: Path) -> RawLabels:
    """Reads ``trn_X_Y.txt`` (header ``rows labels``, then ``id:value ...``) or a SciPy ``.npz``.

    A blank line is a row without labels; what follows ``#`` is dropped; ``:value`` may be missing.

    Raises:
      DataError: a bad header or token, more or fewer rows than the header says, a broken file.
    """
    return _read_npz(path) if path.suffix == ".npz" else _read_text_matrix(path)


def _read_npz(path: Path) -> RawLabels:
    try:
        _check_arrays(path)
        matrix = sparse.load_npz(path)
        if matrix.ndim != 2:
            raise ValueError(f"shape {matrix.shape}")
        if matrix.format in ("csc", "bsr"):  # ids of a csr are checked later, with their row
            matrix.check_format(full_check=True)
        matrix = matrix.tocsr()
        if matrix.indptr[0] != 0 or (np.diff(matrix.indptr) < 0).any():
            raise ValueError("indptr goes down")
        if matrix.nnz and np.isnan(matrix.data.min()):
            raise ValueError("values of NaN")
    except Exception as error:  # NumPy, SciPy and zipfile have many
        raise problem(
            path,
            None,
            f"a file SciPy cannot read ({error})",
            "a sparse matrix [rows, labels] written by scipy.sparse.save_npz",
            "Download it again, or write it again.",
        ) from error
    dropped, weighted = 0, int(np.count_nonzero((matrix.data > 0) & (matrix.data != 1)))
    if matrix.nnz and matrix.data.min() <= 0:
        matrix.data = (matrix.data > 0).astype(np.float32)
        dropped = int(matrix.nnz - matrix.data.sum())
        matrix.eliminate_zeros()
    indptr = matrix.indptr.astype(np.int64)
    return RawLabels(path, matrix.indices, indptr, matrix.shape[1], None, dropped, weighted)


def _check_arrays(path: Path) -> None:
    """Looks at types and sizes, from which SciPy would make ids of 0.9 zeros, before it reads.

    Raises:
      ValueError: other than numbers, ids that are not whole, or more entries than cells.
    """
    with zipfile.ZipFile(path) as archive, np.load(path, allow_pickle=False) as arrays:
        for name in archive.namelist():
            with archive.open(name) as file:
                size, dtype = _array_header(file)
            kinds = {"data": "biuf", "format": "SU", "_is_array": "b"}.get(name[:-4], "iu")
            if dtype.kind not in kinds:
                raise ValueError(f"{name} of {dtype}")
            if name == "data.npy" and arrays["format"].item() not in (b"dia", "dia"):
                rows, columns = arrays["shape"].tolist()
                if size > rows * columns:
                    raise ValueError(f"{size} entries for {rows} x {columns} cells")


def _array_header(file: IO[bytes]) -> tuple[int, np.dtype]:
    """Returns how many values a .npy file holds, and of what type."""
    old = np.lib.format.read_magic(file) == (1, 0)
    read = np.lib.format.read_array_header_1_0 if old else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    return math.prod(shape), dtype


def _read_text_matrix(path: Path) -> RawLabels:
    blocks = line_blocks(path)
    _, first = next(blocks, (1, b""))
    header, _, rows = first.partition(b"\n")
    num_rows, num_labels = _sizes(path, header.removesuffix(b"\r"))
    ids, counts_of_blocks, odd = [], [], np.zeros(2, np.int64)
    for number, block in itertools.chain([(2, rows)], blocks):
        parsed = _parse_block(block)
        if parsed is None:
            parsed = _parse_lines(path, number, block)
        block_ids, block_counts, *block_odd = parsed
        ids.append(block_ids)
        counts_of_blocks.append(block_counts)
        odd += block_odd
    counts = np.concatenate([*counts_of_blocks, np.zeros(0, np.int64)]).astype(np.int64)
    filled = np.flatnonzero(counts)
    last = int(filled[-1]) + 1 if len(filled) else 0
    if len(counts) > num_rows >= last:  # blank lines after the last row mean nothing
        counts = counts[:num_rows]
    if len(counts) != num_rows:
        raise problem(
            path,
            len(counts) + 1,
            f"{len(counts)} rows",
            f"{num_rows}, as its header says",
            "The file is cut short or has lost its header: download it again.",
        )
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    indices = np.concatenate([*ids, np.zeros(0, np.int32)])
    dropped, weighted = odd.tolist()
    return RawLabels(path, indices, indptr, num_labels, lambda row: row + 2, dropped, weighted)


def _sizes(path: Path, header: bytes) -> tuple[int, int]:
    fields = header.split()
    if len(fields) != 2 or not all(re.fullmatch(rb"\d{1,18}", field) for field in fields):
        raise problem(
            path,
            1,
            repr(header[:60].decode("latin-1")),
            "a header with two numbers, 'rows labels'",
            "Put it there; rows follow one a line as 'id:1 id:1'.",
        )
    return int(fields[0]), int(fields[1])


def _numbers(block: bytes) -> np.ndarray | None:
    """Returns the numbers of a block, or None where something else stands in it."""
    if not block.strip():  # NumPy finds a number in blanks
        return np.zeros(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            return np.fromstring(block, dtype=np.float64, sep=" ")
        except (DeprecationWarning, ValueError):
            return None


def _token_starts(block: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Returns (offset of each token, offset of each line end) of a block."""
    bytes_ = np.frombuffer(block, dtype=np.uint8)
    filled = bytes_ > _SPACE  # blanks, tabs and line ends are the bytes up to 32
    starts = filled.copy()
    starts[1:] &= ~filled[:-1]
    return np.flatnonzero(starts), np.flatnonzero(bytes_ == _NEWLINE)


def _parse_block(block: bytes) -> tuple[np.ndarray, np.ndarray, int, int] | None:
    """Parses lines of plain ``id:value`` tokens at once; None where anything else stands there.

    Returns:
      ids, their number a line, and how many entries were dropped, and how many weighted.
    """
    starts, ends = _token_starts(block)
    colons = np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == _COLON)
    # Exactly one colon after each token's start and before the next one's.
    if len(colons) != len(starts) or not np.array_equal(
        np.searchsorted(colons, starts), np.arange(len(starts))
    ):
        return None
    numbers = _numbers(block.replace(b":", b" "))
    if numbers is None or len(numbers) != 2 * len(colons):
        return None
    ids, values = numbers[::2], numbers[1::2]
    with np.errstate(invalid="ignore"):
        whole = ids.astype(np.int32)
    if not np.array_equal(whole, ids):
        return None
    counts = np.diff(np.searchsorted(starts, ends), prepend=0)
    if np.isnan(values).any():
        return None
    positive = values > 0
    weighted = int(np.count_nonzero(positive & (values != 1)))
    if positive.all():
        return whole, counts, 0, weighted
    row = np.repeat(np.arange(len(counts)), counts)[positive]
    counts = np.bincount(row, minlength=len(counts))
    return whole[positive], counts, int(len(values) - len(row)), weighted


def _parse_lines(path: Path, number: int, block: bytes) -> tuple[np.ndarray, np.ndarray, int, int]:
    """The same, line by line: comments, tokens without a value, and the error's line number."""
    ids, counts, dropped, weighted = [], [], 0, 0
    for line in block.split(b"\n")[:-1]:
        kept = []
        for token in line.partition(b"#")[0].split():
            first, colon, second = token.partition(b":")
            try:
                if not _WHOLE.fullmatch(first) or b"_" in second:
                    raise ValueError
                label, value = int(first), float(second) if colon else 1.0
                if math.isnan(value):
                    raise ValueError
            except ValueError:
                raise problem(
                    path,
                    number,
                    repr(token[:60].decode("latin-1")),
                    "'id:value' with a whole number before the colon, a number behind it",
                    "Correct the line.",
                ) from None
            if value > 0:
                kept.append(label)
                weighted += value != 1
            else:
                dropped += 1
        ids.extend(kept)
        counts.append(len(kept))
        number += 1
    return np.array(ids, dtype=np.int64), np.array(counts, dtype=np.int64), dropped, weighted


def read_filter_pairs(
    path: Path | None, num_rows: int, num_labels: int
) -> tuple[np.ndarray, list[str]]:
    """Reads ``row label`` lines (0-based): sorted, unique int64 ``[F, 2]``, and notes.

    No file, or an empty one, gives no pairs.

    Raises:
      DataError: a line without exactly two whole numbers, or a number out of range.
    """
    if path is None:
        return np.zeros((0, 2), dtype=np.int64), []
    blocks = []
    for number, block in line_blocks(path):
        starts, ends = _token_starts(block)
        counts = np.diff(np.searchsorted(starts, ends), prepend=0)
        numbers = _numbers(block) if np.isin(counts, (0, 2)).all() else None
        with np.errstate(invalid="ignore"):
            whole = numbers is not None and (np.abs(numbers) < 1e18) & (numbers % 1 == 0)
        if numbers is None or len(numbers) != len(starts) or not np.all(whole):
            raise _bad_pair(path, number, block)
        pairs = numbers.astype(np.int64).reshape(-1, 2)
        wrong = (pairs < 0).any(1) | (pairs[:, 0] >= num_rows) | (pairs[:, 1] >= num_labels)
        if wrong.any():
            first = int(np.argmax(wrong))
            raise problem(
                path,
                number + int(np.flatnonzero(counts)[first]),
                f"pair {tuple(pairs[first].tolist())}",
                f"a row below {num_rows} and a label below {num_labels}, both from 0",
                "Use the filter file that belongs to this split.",
            )
        blocks.append(pairs)
    pairs = np.concatenate([*blocks, np.zeros((0, 2), np.int64)])
    keys = np.unique(pairs[:, 0] * num_labels + pairs[:, 1])
    notes = []
    if len(keys) < len(pairs):
        notes.append(f"{path.name}: {len(pairs) - len(keys)} repeated pairs merged")
    return np.stack([keys // max(num_labels, 1), keys % max(num_labels, 1)], axis=1), notes


def _bad_pair(path: Path, number: int, block: bytes) -> ValueError:
    for offset, line in enumerate(block.split(b"\n")):
        fields = line.split()
        if fields and not (len(fields) == 2 and all(map(_WHOLE.fullmatch, fields))):
            number, shown = number + offset, line[:60].decode("latin-1")
            break
    else:
        shown = "something that is not a number"
    return problem(path, number, repr(shown), "two whole numbers, 'row label'", "Correct the line.")
