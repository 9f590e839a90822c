"""The rule for own data on sets that it was not made for, against label trees (omikuji, Bonsai).

A case is a set, or a cut of one, under a name that nobody knows: `train` treats it as a stranger's
folder, without any override but the minutes. Labels that a cut does not use are left out of it.

python -m experiments.table_own_data --data=ROOT [--only=8000] [--minutes=8] [--trees]
"""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix, vstack

from experiments import ledger
from xmc_jax import catalog, metrics
from xmc_jax.data.dataset import Dataset, Split, make_dataset
from xmc_jax.data.readers import formats
from xmc_jax.data.summaries import baselines
from xmc_jax.metrics.propensity import inverse_propensity

TITLE = "People's own data: the rule without overrides, and label trees; test rows, filtered"
COLUMNS = ledger.COLUMNS
SEED = 0
TEST_SHARE = 0.4  # test rows of a cut, as a share of its training rows
JOINED = 3  # points of a long text


def cut(dataset: Dataset, rows: int) -> Dataset:
    """Some rows, drawn at random."""
    rng = np.random.default_rng(SEED)
    draw = lambda split, n: split.take(np.sort(rng.choice(len(split), n, replace=False)))
    return _fitted(
        dataset.name,
        draw(dataset.train, rows),
        draw(dataset.test, int(TEST_SHARE * rows)),
        dataset.label_texts,
    )


def long_texts(dataset: Dataset, rows: int) -> Dataset:
    """Each text is three points' joined, each point's labels are theirs."""
    some = cut(dataset, JOINED * rows)
    join = lambda split: _joined(split, len(split) // JOINED)
    return _fitted(dataset.name, join(some.train), join(some.test), some.label_texts)


def one_label(dataset: Dataset, rows: int) -> Dataset:
    """Each point keeps one label, drawn at random; the others are left out of test rows' truth."""
    some = cut(dataset, rows)
    rng = np.random.default_rng(SEED)
    return _fitted(
        dataset.name, _one_each(some.train, rng), _one_each(some.test, rng), some.label_texts
    )


CASES: dict[str, tuple[str, Callable[[Dataset], Dataset]]] = {
    "Mini": ("LF-WordNetTitles-Mini", lambda d: d),
    **{
        f"{name[3:]}, {rows:,} rows": (name, lambda d, rows=rows: cut(d, rows))
        for name in ("LF-WordNetTitles", "LF-MobyTitles")
        for rows in (2_000, 8_000)
    },
    "WordNetTitles, long texts": ("LF-WordNetTitles", lambda d: long_texts(d, 6_000)),
    "WordNetTitles, one label a point": ("LF-WordNetTitles", lambda d: one_label(d, 8_000)),
    "WordNetTitles": ("LF-WordNetTitles", lambda d: d),
    "MobyTitles": ("LF-MobyTitles", lambda d: d),
}


def _joined(split: Split, rows: int) -> Split:
    order = np.arange(JOINED * rows)
    group = np.repeat(np.arange(rows), JOINED)
    add = csr_matrix((np.ones(len(order)), (group, order)), (rows, len(split)))
    labels = csr_matrix((add @ split.labels) > 0, dtype=np.float32)
    texts = [". ".join(split.texts[JOINED * row + i] for i in range(JOINED)) for row in range(rows)]
    pairs = split.filter_pairs[split.filter_pairs[:, 0] < len(order)]
    return Split(texts, labels, np.unique(np.c_[group[pairs[:, 0]], pairs[:, 1]], axis=0))


def _one_each(split: Split, rng: np.random.Generator) -> Split:
    """Labels that are not drawn become filter pairs of test rows by nobody's doing: left out."""
    counts = np.diff(split.labels.indptr)
    place = split.labels.indptr[:-1] + (rng.random(len(counts)) * counts).astype(np.int64)
    some = counts > 0
    indptr = np.concatenate([[0], np.cumsum(some)])
    indices = split.labels.indices[place[some]]
    labels = csr_matrix((np.ones(len(indices), np.float32), indices, indptr), split.labels.shape)
    return Split(split.texts, labels, split.filter_pairs)


def _fitted(name: str, train: Split, test: Split, label_texts: Any) -> Dataset:
    """Without the labels that no point has, numbered anew."""
    used = np.flatnonzero(np.diff(vstack([train.labels, test.labels]).tocsc().indptr))
    place = np.full(train.labels.shape[1], -1)
    place[used] = np.arange(len(used))
    fit = lambda split: Split(
        split.texts,
        csr_matrix(split.labels[:, used]),
        np.c_[split.filter_pairs[:, 0], place[split.filter_pairs[:, 1]]][
            place[split.filter_pairs[:, 1]] >= 0
        ],
    )
    return make_dataset(name, fit(train), fit(test), [label_texts[i] for i in used.tolist()])


def write(dataset: Dataset, folder: Path) -> None:
    """In the layout of the extreme classification repository."""
    folder.mkdir(parents=True)
    for name, split in (("trn", dataset.train), ("tst", dataset.test)):
        with gzip.open(folder / f"{name}.json.gz", "wt", encoding="utf-8") as file:
            for row, text in enumerate(split.texts):
                ids = split.labels[row].indices.tolist()
                line = {"uid": f"{name}{row}", "title": text, "content": "", "target_ind": ids}
                file.write(json.dumps({**line, "target_rel": [1.0] * len(ids)}) + "\n")
    with gzip.open(folder / "lbl.json.gz", "wt", encoding="utf-8") as file:
        for number, text in enumerate(dataset.label_texts):
            file.write(json.dumps({"uid": f"l{number}", "title": text, "content": ""}) + "\n")
    for name, split in (("train", dataset.train), ("test", dataset.test)):
        lines = (f"{row} {label}\n" for row, label in split.filter_pairs.tolist())
        (folder / f"filter_labels_{name}.txt").write_text("".join(lines))


def rule(folder: Path, workdir: Path, config: str, options: list[str]) -> dict[str, Any]:
    """Metrics of a run of the rule, by head, and its minutes."""
    command = [sys.executable, "-m", "xmc_jax.train", f"--config={config}:{folder}"]
    started = time.monotonic()
    with (workdir.parent / f"{workdir.name}.log").open("w") as log:
        subprocess.run(
            [*command, f"--workdir={workdir}", *options],
            cwd=ledger.ROOT,
            stdout=log,
            stderr=log,
            check=True,
        )
    (path,) = workdir.glob("eval-test-*.json")
    heads = json.loads(path.read_text())["heads"]
    found = {head: values["filtered"] for head, values in heads.items()}
    return {"heads": found, "minutes": (time.monotonic() - started) / 60}


def trees(dataset: Dataset) -> dict[str, float]:
    """Metrics of omikuji in the style of Bonsai: shallow trees of 100 children; TF-IDF of words.

    Of characters too where texts are of one or two words, as the look-up of `prepare` has them.
    """
    import omikuji

    train, test = dataset.train, dataset.test
    words = sum(len(text.split()) for text in dataset.label_texts) / len(dataset.label_texts)
    analyzer = "word+char" if words < 2 else "word"
    vocabulary, idf = baselines._count(dataset.label_texts, train.texts, analyzer)
    vectors = [
        baselines._vectors(texts, vocabulary, idf, analyzer) for texts in (train.texts, test.texts)
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.txt"
        with path.open("w") as file:
            print(*vectors[0].shape, len(dataset.label_texts), file=file)
            for row in range(len(train)):
                labels = ",".join(map(str, train.labels[row].indices.tolist()))
                some = vectors[0][row]
                pairs = (f"{i}:{v:.5g}" for i, v in zip(some.indices.tolist(), some.data.tolist()))
                file.write(f"{labels} {' '.join(pairs)}\n")
        settings = omikuji.Model.default_hyper_param()
        settings.cluster_balanced, settings.cluster_k, settings.max_depth = False, 100, 3
        model = omikuji.Model.train_on_data(str(path), settings, 2)
    longest = int(np.bincount(test.filter_pairs[:, 0], minlength=1).max(initial=0))
    depth = 5 + min(longest, 200)
    ids = np.full((len(test), depth), -1, np.int32)
    for row in range(len(test)):
        some = vectors[1][row]
        pairs = list(zip(some.indices.tolist(), some.data.tolist()))
        found = model.predict(pairs, beam_size=10, top_k=depth)
        ids[row, : len(found)] = [label for label, _ in found]
    weights = inverse_propensity(train.labels, a=catalog.DEFAULT_A, b=catalog.DEFAULT_B)
    return metrics.evaluate(
        ids, test.labels, filter_pairs=test.filter_pairs, inverse_propensity=weights
    )


def main() -> None:
    """Makes the cases and runs them, one after the other."""
    parser = ledger.arguments(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="root of the data sets' folders")
    parser.add_argument("--only", default="", help="only cases whose name holds this")
    parser.add_argument("--config", default="configs/unidec.py", help="of the family")
    parser.add_argument("--minutes", type=float, help="config.max_minutes; default the rule's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trees", action="store_true", help="omikuji instead of the rule")
    parser.add_argument("--keep", type=Path, help="folder in which data and runs are kept")
    options = parser.parse_args()
    parent = options.keep or Path(tempfile.mkdtemp(prefix="xmc_jax-"))
    for name, (source, change) in CASES.items():
        if options.only not in name:
            continue
        print(name, flush=True)
        if options.list:
            continue
        dataset = change(formats.load(options.data / source))
        kind = "trees" if options.trees else Path(options.config).stem
        row = {
            **{"kind": "figure", "topic": "own_data", "table": TITLE, "seed": options.seed},
            "command": f"python -m experiments.table_own_data --data=ROOT --only={name!r}"
            + (" --trees" if options.trees else f" --config={options.config}")
            + (f" --minutes={options.minutes:g}" if options.minutes else ""),
        }
        clean = "".join(c if c.isalnum() else "-" for c in name).lower()
        if options.trees:
            found = {"omikuji, Bonsai style": trees(dataset)}
        else:
            folder = parent / f"data-{clean}"
            if not folder.exists():
                write(dataset, folder)
            flags = [f"--config.seed={options.seed}"]
            if options.minutes:
                flags.append(f"--config.max_minutes={options.minutes:g}")
            workdir = parent / f"{kind}-{clean}-{options.seed}"
            result = rule(folder, workdir, options.config, flags)
            row["note"] = f"{result['minutes']:.1f} minutes"
            found = {f"{kind}, {head}": values for head, values in result["heads"].items()}
        for method, values in found.items():
            shown = {column: f"{values[column]:.2f}" for column in COLUMNS}
            print(f"  {method:<28}", *shown.values(), flush=True)
            ledger.append({**row, "name": f"{name}: {method}", "columns": shown}, options.ledger)
    if not options.keep:
        shutil.rmtree(parent)


if __name__ == "__main__":
    main()
