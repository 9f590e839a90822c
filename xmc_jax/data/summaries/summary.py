"""What a data set is made of, what looks wrong in it, and the numbers a model has to beat."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from absl import logging

from xmc_jax import catalog, metrics
from xmc_jax.data import splits
from xmc_jax.data import texts as texts_lib
from xmc_jax.data.dataset import Dataset, Split, filter_matrix
from xmc_jax.data.graph import gandalf
from xmc_jax.data.readers import canonical, formats, layouts
from xmc_jax.data.readers.reading import AS_FOUND, Reading
from xmc_jax.data.summaries import baselines
from xmc_jax.data.tokens import token_stores
from xmc_jax.data.tokens import tokenizer as tokenizers
from xmc_jax.metrics import propensity

TAIL_POINTS = 5
VOCABULARY = 30_000  # pieces, as in training
VOCABULARY_TEXTS, VOCABULARY_LENGTH = 50_000, 256  # of which unknown tokens are counted
SHOWN_ROWS, SHOWN_LABELS = 3, 10
SHORT_WORDS = 2.0  # a text, below which words are seldom shared
MANY_LABEL_TEXTS = 0.1  # share of test texts that are label texts, from which it is pointed out
FEW_PAIRS, PEERS, PARENTS = 100, 0.5, 0.1  # of pairs that could be listed the other way round
SAMPLE_ROWS = 5_000
SAMPLE_SEED = 0
POSTULATE_ROWS = 1_000
_FULL_PAIRS = 4_000_000_000  # test rows times labels up to which all test rows are scored
_MAX_DEPTH = 200
_KS = (1, 3, 5)


def prepare(
    source: str,
    output: str | None = None,
    *,
    text: str | None = None,
    reading: Reading = AS_FOUND,
    propensity: str = "",
) -> Iterator[str]:
    """Checks a data set, writes its canonical form, and yields the report line by line.

    Args:
      source: a folder, one file of people's own data, or a catalog name.
      output: folder for the canonical form; None or "" = only check.
      text: "title" or "title+content"; None or "" = what the catalog says, else "title".
      reading: what is set of how people's own files are read.
      propensity: ``A,B`` for PSP@k; "" = the catalog's, or the usual ones.

    Raises:
      ValueError: a propensity that is no two numbers.
      DataError: whatever is wrong, with file and line; nothing is written then.
    """
    catalog.with_propensity(catalog.ENTRIES[0], propensity)  # before anything is read
    folder = formats.find_folder(source)
    layout = layouts.detect(folder)
    entry = catalog.find(source) or catalog.find(layout.name)
    text = text or (entry.text if entry else "title")
    reading = formats.reading_for(folder, reading)
    if not output:
        dataset = formats.load(folder, text=text, reading=reading)
    elif (Path(output) / canonical.DESCRIPTION).is_file():
        dataset = formats.load(folder, text=text, reading=reading)
        canonical.save(dataset, output, recipe=text, reading=reading)
    else:
        canonical.check_free(Path(output))
        dataset = formats.write_canonical(folder, Path(output), text=text, reading=reading)
    entry = entry or catalog.find(dataset.name)  # a canonical form keeps the name
    known = entry is not None
    entry = entry or catalog.default_entry(dataset.name, None, None, None, 32)
    entry = catalog.with_propensity(entry, propensity)
    yield f"{dataset.name}: layout {layout.kind!r} in {layout.root}, texts {text!r}"
    yield from summarise(dataset)
    if output:
        yield f"  canonical form: {output} (digest {dataset.digest})"
    yield from unknown_tokens(dataset, strip_accents=known)
    logging.info("scoring the baselines")
    yield from baseline_table(dataset, entry)


def summarise(dataset: Dataset) -> list[str]:
    """Returns the lines of the summary: sizes, lengths, overlaps, and what looks wrong."""
    train, test, label_texts = dataset.train, dataset.test, dataset.label_texts
    frequency = np.diff(train.labels.tocsc().indptr)
    num_labels = len(label_texts)
    report = [
        f"  training rows {len(train):,}   test rows {len(test):,}   labels {num_labels:,}",
        f"  labels a point: {_labels_a_point(train)} (training), {_labels_a_point(test)} (test)",
        f"  points a label: {frequency.mean():.2f} (training); "
        f"tail labels ({TAIL_POINTS} points or fewer): {_percent(frequency <= TAIL_POINTS)}, "
        f"without any: {_percent(frequency == 0)}",
        f"  words a text: {_words(train.texts):.2f} (training), {_words(test.texts):.2f} (test), "
        f"{_words(label_texts):.2f} (labels)",
        _filter_line("training", train),
        _filter_line("test", test),
        *_overlap_lines(train, test, label_texts),
        *_example_lines(train, label_texts),
        _frequent_line(frequency, label_texts),
    ]
    warnings = [*formats.check_sizes(dataset), *dataset.notes]
    report += [f"  note: {warning}" for warning in warnings] or ["  nothing to repair"]
    return report


def unknown_tokens(dataset: Dataset, *, strip_accents: bool) -> Iterator[str]:
    """Yields what a vocabulary of the data does not know, made as training's is; of a sample."""
    texts = {"training": dataset.train.texts, "label": dataset.label_texts}
    if len(dataset.test):
        texts["test"] = dataset.test.texts
    some = {
        name: texts_lib.take(all_, np.arange(0, len(all_), len(all_) // VOCABULARY_TEXTS + 1))
        for name, all_ in texts.items()
    }
    logging.info("making a vocabulary")
    with tempfile.TemporaryDirectory() as folder:
        try:
            tokenizer = tokenizers.train_wordpiece(
                texts_lib.JoinedTexts(some["training"], some["label"]),
                vocab_size=VOCABULARY,
                folder=folder,
                special_tokens=False,
                strip_accents=strip_accents,
            )
        except ValueError as error:  # there is no character
            yield f"  note: {error}"
            return
    shares = {}
    for name, sampled in some.items():
        ids = token_stores.encode(sampled, tokenizer, max_length=VOCABULARY_LENGTH).ids
        counts = np.bincount(ids, minlength=tokenizer.get_vocab_size())
        shares[name] = tokenizers.unknown_share(tokenizer, counts)
    yield from (f"  {line}" for line in tokenizers.unknown_lines(shares))


def _example_lines(train: Split, label_texts: Sequence[str]) -> list[str]:
    """The first rows as they were understood."""
    lines = ["  the first rows as understood, text -> labels:"]
    for row in range(min(SHOWN_ROWS, len(train))):
        labels = [_shown(label_texts[i]) for i in train.labels[row].indices[: SHOWN_LABELS + 1]]
        labels[SHOWN_LABELS:] = ["..."] * (len(labels) > SHOWN_LABELS)
        lines.append(f"    {_shown(train.texts[row])} -> {', '.join(labels) or 'none'}")
    return lines


def _frequent_line(frequency: np.ndarray, label_texts: Sequence[str]) -> str:
    most = np.argsort(-frequency, kind="stable")[:SHOWN_LABELS]
    shown = ", ".join(f"{_shown(label_texts[i])} {int(frequency[i]):,}" for i in most)
    return f"  most frequent labels (training points): {shown}"


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _labels_a_point(split: Split) -> str:
    counts = np.diff(split.labels.indptr)
    if not len(counts):
        return "none"
    return f"{counts.mean():.2f}, at most {counts.max()}, none in {int((counts == 0).sum()):,} rows"


def _percent(flags: np.ndarray) -> str:
    return f"{100 * flags.mean() if len(flags) else 0:.1f} %"


def _share_in(codes: np.ndarray, others: np.ndarray) -> str:
    return _percent(np.isin(codes, others))


def _words(texts: Sequence[str]) -> float:
    return sum(len(text.split()) for text in texts) / max(len(texts), 1)


def _filter_line(name: str, split: Split) -> str:
    hits = filter_matrix(split.filter_pairs, split.labels.shape).multiply(split.labels).nnz
    return f"  filter pairs, {name}: {len(split.filter_pairs):,}, of which positives: {hits:,}"


def _overlap_lines(train: Split, test: Split, label_texts: Sequence[str]) -> list[str]:
    codes = splits.text_codes(train.texts, test.texts, label_texts)
    train_codes, test_codes, label_codes = codes
    _, reversed_ = splits.reverse_pairs_by_code(train.labels, test.labels, *codes)
    share = 100 * len(reversed_) / max(test.labels.nnz, 1)
    lines = [
        f"  labels whose text is a training text: {_share_in(label_codes, train_codes)}, "
        f"a test text: {_share_in(label_codes, test_codes)}",
        f"  training rows whose text is a label text: {_share_in(train_codes, label_codes)}",
        f"  test rows whose text is a training text: {_share_in(test_codes, train_codes)}",
        f"  test answers that training lists the other way round: {share:.2f} % "
        f"({len(reversed_):,} of {test.labels.nnz:,})",
    ]
    lines += _hints(train, test, label_texts, codes)
    lines += _postulate_lines(train, train_codes, label_codes)
    repeated = len(label_codes) - len(np.unique(label_codes))
    if repeated:
        lines.append(f"  labels that share their text with another one: {repeated:,}")
    same = np.isin(train_codes, label_codes).mean() if len(train_codes) else 0
    if same > 0.1 and len(train.filter_pairs) == 0:
        lines.append(
            "  note: many texts are labels themselves and there are no filter pairs: if a text's "
            "own label is no answer, list such pairs in filter_labels_train.txt and _test.txt"
        )
    return lines


def _hints(
    train: Split, test: Split, label_texts: Sequence[str], codes: Sequence[np.ndarray]
) -> list[str]:
    """What follows for a run from the kind of texts and labels, with the switch."""
    train_codes, test_codes, label_codes = codes
    hints = []
    if max(_words(train.texts), _words(label_texts)) < SHORT_WORDS:
        hints.append(
            "texts of a word or two seldom share one: set encoder.embeddings=FILE to start from "
            "word vectors"
        )
    of_labels = np.isin(test_codes, label_codes).mean() if len(test) else 0
    if of_labels > MANY_LABEL_TEXTS:
        hints.append(
            f"{100 * of_labels:.0f} % of the test texts are label texts: what their label occurs "
            "with answers them. Retrieval looks it up, --config.gandalf.enabled=True trains on it"
        )
    possible, both = splits.returned(train.labels, train_codes, label_codes)
    if possible >= FEW_PAIRS and both >= PEERS * possible:
        hints.append(
            f"texts and labels are peers: {100 * both / possible:.0f} % of the pairs that could be "
            "are there both ways. One encoder for both sides suits that, encoder.towers=1"
        )
    elif possible >= FEW_PAIRS and both <= PARENTS * possible:
        hints.append(
            f"labels are like parents: {100 * both / possible:.0f} % of the pairs that could be "
            "are there both ways. An encoder for each side may suit that, encoder.towers=2"
        )
    return [f"  note: {hint}" for hint in hints]


def _postulate_lines(train: Split, train_codes: np.ndarray, label_codes: np.ndarray) -> list[str]:
    """Whether label texts are worth posing as points (Gandalf), as far as it can be seen."""
    known, first = np.unique(label_codes, return_index=True)
    rows = np.flatnonzero(np.isin(train_codes, known) & (np.diff(train.labels.indptr) > 0))
    if not len(rows):
        return []
    rng = np.random.default_rng(SAMPLE_SEED)
    rows = np.sort(rng.choice(rows, min(len(rows), POSTULATE_ROWS), replace=False))
    label_ids = first[np.searchsorted(known, train_codes[rows])]
    held, promised = gandalf.neighbours_held(train.labels, rows, label_ids)
    real = promised > 0
    seen = np.flatnonzero(real[:, 0])
    if not len(seen):
        return []
    share, says = 100 * held[real].mean(), 100 * promised[real].mean()
    lines = [
        f"  Gandalf's postulate, {len(seen):,} training points that bear a label's text: "
        "the label's strongest neighbour is theirs",
        f"    in {100 * held[seen, 0].mean():.1f} % (expected {100 * promised[seen, 0].mean():.1f} "
        f"%), its five strongest in {share:.1f} % ({says:.1f} %)",
    ]
    if share < 0.75 * says:
        lines.append(
            "  note: training points contradict Gandalf's targets: if you train with "
            "config.gandalf.enabled=True, try gandalf.skip_labels_that_are_points=True"
        )
    return lines


def baseline_scores(
    dataset: Dataset, entry: catalog.Entry
) -> tuple[dict[str, dict[str, float]], int, str]:
    """Scores what needs no model on test rows, filtered.

    Returns:
      metrics by method, the number of test rows scored (a seeded sample where the data are large),
      and the analyzer of the TF-IDF vectors.
    """
    test = sample(dataset.test, len(dataset.label_texts))
    weights = propensity.inverse_propensity(dataset.train.labels, a=entry.a, b=entry.b)
    longest = int(np.bincount(test.filter_pairs[:, 0]).max(initial=0))
    depth = min(max(_KS) + min(longest, _MAX_DEPTH), len(dataset.label_texts))
    # Labels of one or two words share whole words too seldom.
    analyzer = "word+char" if _words(dataset.label_texts) < 2 else "word"
    predictions = {
        "popularity": baselines.popularity(dataset.train.labels, len(test), depth),
        "TF-IDF nearest label": baselines.tfidf_nearest_label(
            test.texts,
            dataset.label_texts,
            depth,
            training_texts=dataset.train.texts,
            analyzer=analyzer,
        )[0],
        "label of the same text": baselines.label_of_the_same_text(
            test.texts, dataset.label_texts, dataset.train.labels, depth
        ),
    }
    scores = {
        name: metrics.evaluate(
            ranked, test.labels, inverse_propensity=weights, filter_pairs=test.filter_pairs, ks=_KS
        )
        for name, ranked in predictions.items()
    }
    return scores, len(test), analyzer


def sample(test: Split, num_labels: int) -> Split:
    """Returns the test rows, or a seeded sample of 5,000 where rows times labels are many."""
    if len(test) <= SAMPLE_ROWS or len(test) * num_labels <= _FULL_PAIRS:
        return test
    rng = np.random.default_rng(SAMPLE_SEED)
    return test.take(np.sort(rng.choice(len(test), SAMPLE_ROWS, replace=False)))


def baseline_table(dataset: Dataset, entry: catalog.Entry) -> list[str]:
    """Returns the lines of the table of numbers to beat."""
    if len(dataset.test) == 0 or dataset.test.labels.nnz == 0:
        return ["  no test row with labels, so no numbers to beat"]
    scores, num_rows, analyzer = baseline_scores(dataset, entry)
    rows = f"{num_rows:,} test rows"
    if num_rows < len(dataset.test):
        rows = f"a sample of {num_rows:,} test rows (seed {SAMPLE_SEED})"
    columns = [f"{metric}@{k}" for metric in ("P", "PSP") for k in _KS]
    lines = [
        f"  numbers to beat: {rows}, filtered, percent; PSP with A = {entry.a}, B = {entry.b}; "
        f"TF-IDF of {analyzer}",
        " " * 26 + "".join(f"{column:>8}" for column in columns),
    ]
    for name, values in scores.items():
        lines.append(f"    {name:<22}" + "".join(f"{values[column]:8.2f}" for column in columns))
    return lines
