"""What work directories of earlier versions lack, filled in once when they are opened."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

FORMAT = 5  # of meta.json


def upgrade(meta: Mapping[str, Any]) -> dict[str, Any]:
    """``meta.json`` as this version writes it.

    Format 1 (none is written there) lacks what came later: the family, which was UniDEC's, the tail
    weight, the weight of the clusters in a frugal ranking, which was the papers' product, how texts
    were normalised, and that splits were shares of the texts. Formats 1 and 2 lack the rules by
    which files are read, which were the first. Those before 4 have no retrieval; those before 5
    rank labels without points by their rows of the table.

    Raises:
      ValueError: a later format than this version knows.
    """
    given = meta.get("format", 1)
    if given > FORMAT:
        raise ValueError(
            f"meta.json has format {given}, this version knows {FORMAT}: it was written by a later "
            "version of xmc_jax. Install that one to open it."
        )
    upgraded = copy.deepcopy(dict(meta))
    if given < FORMAT:
        upgraded["format"] = FORMAT
        upgraded["resolved"].setdefault("retrieval", {"enabled": False})
        if upgraded["resolved"].get("family", "unidec") == "unidec":
            upgraded["resolved"].setdefault("unseen_weight", 0.0)
    if given < 3:
        resolved = upgraded["resolved"]
        resolved.setdefault("reading", {"version": 1})
        resolved.setdefault("family", "unidec")
        resolved.setdefault("tail_weight", 0.0)
        if "clusters" in resolved:
            resolved["clusters"].setdefault("weight", 1.0)
        resolved.setdefault("share_of", "texts")
        if "encoder" in resolved:
            resolved["encoder"] = {"lower": True, "strip_accents": True, **resolved["encoder"]}
    return upgraded
