"""The catalog's facts, names and errors."""

from __future__ import annotations

import gzip

import numpy as np
import pytest

from xmc_jax import catalog


def test_names_are_unique_and_findable() -> None:
    for entry in catalog.ENTRIES:
        for name in (entry.name, *entry.aliases, entry.name.lower(), entry.name.replace("-", "_")):
            assert catalog.get(name) is entry
            assert catalog.find(name) is entry
    names = [name for entry in catalog.ENTRIES for name in (entry.name, *entry.aliases)]
    assert len({name.lower() for name in names}) == len(names)


def test_every_data_set_of_the_papers_is_here() -> None:
    aliases = (
        "amazontitles131k amazon131k amazontitles1.3m wikiseealsotitles320k wikiseealso320k "
        "wikititles500k wikipedia500k wordnet-mini wordnettitles mobytitles"
    )
    assert {catalog.get(alias).name for alias in aliases.split()} == {
        entry.name for entry in catalog.ENTRIES
    }


@pytest.mark.parametrize("entry", catalog.ENTRIES, ids=lambda entry: entry.name)
def test_rules(entry: catalog.Entry) -> None:
    if "Amazon" in entry.name:
        assert (entry.a, entry.b) == (0.6, 2.6)
    elif "WikiTitles" in entry.name or "Wikipedia" in entry.name:
        assert (entry.a, entry.b) == (0.5, 0.4)
    else:
        assert (entry.a, entry.b) == (0.55, 1.5)
    titles = "Titles" in entry.name
    assert entry.text == ("title" if titles else "title+content")
    expected = 32 if titles else 256 if "Wikipedia" in entry.name else 128
    assert entry.max_length == expected
    assert entry.source


def test_sizes_of_the_thesis_table() -> None:
    sizes = [
        (entry.num_train, entry.num_labels)
        for entry in map(catalog.get, ("amazontitles131k", "amazontitles1.3m", "wikiseealso320k"))
    ]
    assert sizes == [(294_805, 131_073), (2_248_619, 1_305_265), (693_082, 312_330)]


def test_sizes_of_the_bundled_files(mini_folder) -> None:
    def lines(name: str) -> int:
        with gzip.open(mini_folder / name, "rt", encoding="utf-8") as file:
            return sum(1 for _ in file)

    entry = catalog.get("wordnet-mini")
    found = np.array([lines("trn.json.gz"), lines("tst.json.gz"), lines("lbl.json.gz")])
    np.testing.assert_array_equal(found, [entry.num_train, entry.num_test, entry.num_labels])


def test_unknown_name() -> None:
    assert catalog.find("amazontitles131") is None
    with pytest.raises(ValueError, match=r"amazontitles131k.*Did you mean LF-AmazonTitles-131K"):
        catalog.get("amazontitles131")


def test_default_entry() -> None:
    entry = catalog.default_entry("mine", 10, None, 4, 16)
    assert (entry.a, entry.b, entry.num_test, entry.max_length) == (0.55, 1.5, None, 16)
    assert hash(entry) == hash(catalog.default_entry("mine", 10, None, 4, 16))
