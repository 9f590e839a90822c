"""How people's own files are read: what their flags say, kept with what was made of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

# Of the rules by which files are read. 1 = commit 6654296: labels are cut at | alone, columns are
# text and labels or none is named, nothing is checked, and one odd byte makes a file latin-1.
VERSION = 2


@dataclasses.dataclass(frozen=True)
class Reading:
    r"""What cannot be seen in a file, or not surely; "" = it is looked for.

    Attributes:
      separator: stands between the labels of a cell; ``\t`` and ``\n`` are a tab and a line break.
        "" = |, and lists and tags are read as such.
      text_column, label_column: a name in the first row (a key in JSON Lines), or a number from 1.
      encoding: of all files without a byte order mark; "" = UTF-8.
      merge_labels: labels are one that differ by blanks, invisible characters, composition or case.
      version: of the rules; 1 is for runs that were begun by them.

    Raises:
      ValueError: an encoding that does not exist.
    """

    separator: str = ""
    text_column: str = ""
    label_column: str = ""
    encoding: str = ""
    merge_labels: bool = False
    version: int = VERSION

    def __post_init__(self) -> None:
        """Check the encoding."""
        try:
            "".encode(self.encoding or "utf-8")
        except (LookupError, UnicodeError, ValueError) as error:
            raise ValueError(
                f"--encoding={self.encoding}: found no encoding of that name; expected one such as "
                "utf-8, cp1252, gb18030, shift_jis, cp1251, utf-16-le."
            ) from error

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Reading:
        """From flags or from what was kept; None = the default."""
        return cls(**{name: value for name, value in values.items() if value is not None})

    @property
    def between_labels(self) -> str:
        """The separator as it stands in the file."""
        return self.separator.replace("\\t", "\t").replace("\\n", "\n")

    @property
    def given(self) -> list[str]:
        """The flags that say something else than a default, as they are typed."""
        defaults = Reading(version=self.version)
        return [
            f"--{name}={value}" if value is not True else f"--{name}"
            for name, value in dataclasses.asdict(self).items()
            if value != getattr(defaults, name)
        ]


AS_FOUND = Reading()
