"""The one table of data-set facts: names, sizes, propensity constants, text recipe, source.

Sizes come from table 2.1 of the thesis and from the public files; what could not be checked against
files says so. The propensity constants are those of the public leaderboards' own evaluation code:
Amazon 0.6 / 2.6, Wikipedia and WikiTitles 0.5 / 0.4, everything else (WikiSeeAlso too) 0.55 / 1.5.
Published PSP numbers differ where code took others, so ours are printed beside every PSP.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from typing import Any

Facts = dict[str, Any]  # what several entries have in common
DEFAULT_A, DEFAULT_B = 0.55, 1.5

_REPOSITORY = (
    "The Extreme Classification Repository, http://manikvarma.org/downloads/XC/XMLRepository.html"
)


@dataclasses.dataclass(frozen=True)
class Entry:
    """Facts about one data set.

    Attributes:
      name: the public name, also the name of its folder.
      aliases: short names for the command line.
      num_train: training rows, or None where unknown.
      num_test: test rows, or None where unknown.
      num_labels: labels, or None where unknown.
      a: propensity constant A.
      b: propensity constant B.
      max_length: tokens a text, special tokens included; None = not chosen yet.
      text: "title" or "title+content": what a row's text is made of.
      source: for people: which page offers the files.
    """

    name: str
    aliases: tuple[str, ...]
    num_train: int | None
    num_test: int | None
    num_labels: int | None
    a: float
    b: float
    max_length: int | None
    text: str
    source: str


_AMAZON_131K: Facts = dict(num_train=294_805, num_test=134_835, num_labels=131_073, a=0.6, b=2.6)
# num_test of the next three is second-hand: not checked against the files.
_AMAZON_1_3M: Facts = dict(
    num_train=2_248_619, num_test=970_237, num_labels=1_305_265, a=0.6, b=2.6
)
_SEE_ALSO_320K: Facts = dict(num_train=693_082, num_test=177_515, num_labels=312_330, a=0.55, b=1.5)
_WIKI_500K: Facts = dict(num_train=1_813_391, num_test=783_743, num_labels=501_070, a=0.5, b=0.4)

_TITLES: Facts = dict(max_length=32, text="title")
_TITLES_ARCHIVE = " (the raw archive of the full-text data set; only its titles are read)"

ENTRIES: tuple[Entry, ...] = (
    Entry(
        name="LF-AmazonTitles-131K",
        aliases=("amazontitles131k",),
        source=_REPOSITORY + _TITLES_ARCHIVE,
        **_AMAZON_131K,
        **_TITLES,
    ),
    Entry(
        name="LF-Amazon-131K",
        aliases=("amazon131k",),
        max_length=128,
        text="title+content",
        source=_REPOSITORY,
        **_AMAZON_131K,
    ),
    Entry(
        name="LF-AmazonTitles-1.3M",
        aliases=("amazontitles1.3m",),
        source=_REPOSITORY,
        **_AMAZON_1_3M,
        **_TITLES,
    ),
    Entry(
        name="LF-WikiSeeAlsoTitles-320K",
        aliases=("wikiseealsotitles320k",),
        source=_REPOSITORY + _TITLES_ARCHIVE,
        **_SEE_ALSO_320K,
        **_TITLES,
    ),
    Entry(
        name="LF-WikiSeeAlso-320K",
        aliases=("wikiseealso320k",),
        max_length=128,
        text="title+content",
        source=_REPOSITORY,
        **_SEE_ALSO_320K,
    ),
    Entry(
        name="LF-WikiTitles-500K",
        aliases=("wikititles500k",),
        source=_REPOSITORY + _TITLES_ARCHIVE,
        **_WIKI_500K,
        **_TITLES,
    ),
    Entry(
        name="LF-Wikipedia-500K",
        aliases=("wikipedia500k",),
        max_length=256,
        text="title+content",
        source=_REPOSITORY,
        **_WIKI_500K,
    ),
    Entry(
        name="LF-WordNetTitles-Mini",
        aliases=("wordnet-mini", "wordnettitles-mini"),
        num_train=1_850,
        num_test=750,
        num_labels=1_858,
        a=DEFAULT_A,
        b=DEFAULT_B,
        source="Ships inside the package (made from WordNet 3.0)",
        **_TITLES,
    ),
    Entry(
        name="LF-WordNetTitles",
        aliases=("wordnettitles",),
        num_train=75_021,
        num_test=31_385,
        num_labels=73_868,
        a=DEFAULT_A,
        b=DEFAULT_B,
        source="Made from WordNet 3.0; on no public page, so pass its folder",
        **_TITLES,
    ),
    Entry(
        name="LF-MobyTitles",
        aliases=("mobytitles",),
        num_train=21_182,
        num_test=9_076,
        num_labels=96_995,
        a=DEFAULT_A,
        b=DEFAULT_B,
        source="Made from Moby Thesaurus II (public domain); on no public page, so pass its folder",
        **_TITLES,
    ),
)


def _plain(name: str) -> str:
    return re.sub(r"[-_ ]", "", name).lower()


_BY_NAME = {_plain(name): entry for entry in ENTRIES for name in (entry.name, *entry.aliases)}


def find(name: str) -> Entry | None:
    """Returns the entry with this name or alias, or None. Case, dashes and underscores are free."""
    return _BY_NAME.get(_plain(name))


def get(name: str) -> Entry:
    """Returns the entry with this name or alias.

    Raises:
      ValueError: no such data set; lists those known and the nearest name.

    Example:
      >>> get("amazontitles1.3m").num_labels
      1305265
    """
    entry = find(name)
    if entry is not None:
        return entry
    known = ", ".join(f"{e.name} ({e.aliases[0]})" for e in ENTRIES)
    near = difflib.get_close_matches(_plain(name), _BY_NAME, n=1)
    hint = f" Did you mean {_BY_NAME[near[0]].name}?" if near else ""
    raise ValueError(
        f"unknown data set {name!r}, expected one of: {known}, or a folder with your own "
        f"data.{hint}"
    )


def with_propensity(entry: Entry, constants: str) -> Entry:
    """Returns the entry with other propensity constants.

    Args:
      entry: of a data set.
      constants: ``A,B``; "" = the entry's own.

    Raises:
      ValueError: no such two numbers.
    """
    if not constants:
        return entry
    try:
        a, b = (float(number) for number in constants.split(","))
    except ValueError:
        a = b = float("nan")
    if not (0 <= a < float("inf") and 0 < b < float("inf")):
        raise ValueError(
            f"--propensity={constants}: expected two numbers A,B, A at least 0 and B above 0, as "
            f"{DEFAULT_A},{DEFAULT_B}."
        )
    return dataclasses.replace(entry, a=a, b=b)


def default_entry(
    name: str,
    num_train: int | None,
    num_test: int | None,
    num_labels: int | None,
    max_length: int | None,
) -> Entry:
    """Returns an entry for people's own data: A = 0.55, B = 1.5, texts as they are in the files."""
    return Entry(
        name=name,
        aliases=(),
        num_train=num_train,
        num_test=num_test,
        num_labels=num_labels,
        a=DEFAULT_A,
        b=DEFAULT_B,
        max_length=max_length,
        text="title",
        source="Own data",
    )
