"""``--config=file.py:text``: finds the file, and parses the text: a few options and commas."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any

import ml_collections

_BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
# Of a clone, or of an installation.
_FOLDERS = [Path(__file__).parents[1] / name for name in ("xmc_jax_configs", "configs")]


def find_file(name: str) -> str:
    """The path of a configuration: a file as it is, or one that comes with the package.

    Raises:
      ValueError: neither a file (a name that ends in .py is one) nor a configuration's name.
    """
    if name.endswith(".py") or Path(name).is_file():
        return name
    files = {path.stem: str(path) for folder in _FOLDERS for path in sorted(folder.glob("*.py"))}
    if name in files:
        return files[name]
    near = difflib.get_close_matches(name, files, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"no configuration {name!r}: expected a file (.py) or one of {', '.join(files)}.{hint}"
    )


def not_python(path: str, error: SyntaxError) -> str:
    """What is said of a configuration file that Python cannot read."""
    return (
        f"{path}, line {error.lineno}: found {(error.text or '').strip()[:60]!r}, which is no "
        f"Python ({error.msg}); expected a configuration. Data go behind the colon of one: "
        f"--config=NAME:{path}"
    )


def parse(arg: str | None, **defaults: Any) -> ml_collections.ConfigDict:
    """Returns the defaults, overridden by what the text says.

    ``name=value`` sets an option, cast to the type of its default (str where that is None). The
    first part may be a bare value of the first default. The bare name of a bool option turns it on.
    A text may have commas, ``=`` and blanks at its ends where it is the path of what is there.

    Args:
      arg: such as ``"wordnet-mini,loss=supcon,debug"``; None or "" changes nothing.
      **defaults: the options, in order; each a str, bool, int, float or None.

    Raises:
      ValueError: unknown or repeated option, a bare value that is not the first part, or a value
        that cannot be cast. Lists the options and the nearest name.

    Example:
      >>> args = parse("wordnet-mini,debug", data="", loss="psl", debug=False)
      >>> args.data, args.loss, args.debug
      ('wordnet-mini', 'psl', True)
    """
    for name, default in defaults.items():
        if not isinstance(default, (str, bool, int, float, type(None))):
            raise TypeError(f"default of {name}: found {type(default).__name__}, expected a scalar")
    values: dict[str, Any] = {}
    parts = (arg or "").split(",")
    place = 0
    while place < len(parts):
        name, value, taken = _path_option(parts[place:], place, defaults)
        if not taken and parts[place].strip():
            name, value = _split(parts[place].strip(), place, arg, defaults)
        place += max(taken, 1)
        if not name:
            continue
        if name in values:
            raise ValueError(f"option {name!r} is given twice in {arg!r}; give it once")
        values[name] = _cast(name, value, defaults[name])
    return ml_collections.ConfigDict({**defaults, **values})


def _path_option(parts: list[str], place: int, defaults: dict[str, Any]) -> tuple[str, str, int]:
    """An option that is the path of something there: name, path, and how many parts make it up."""
    name, mark, begin = parts[0].partition("=")
    name = name.strip()
    if not (mark and name in defaults):
        name, begin = next(iter(defaults), ""), parts[0]
        if place or begin.strip() in defaults:
            return "", "", 0
    if isinstance(defaults.get(name, 0), (str, type(None))):
        for taken in range(len(parts), 0, -1):
            text = ",".join([begin, *parts[1:taken]])
            for path in (text, text.strip()):
                if path and os.path.lexists(os.path.expanduser(path)):
                    return name, path, taken
    return "", "", 0


def _split(part: str, place: int, arg: str | None, defaults: dict[str, Any]) -> tuple[str, str]:
    if "=" in part:
        name, value = (side.strip() for side in part.split("=", 1))
        if name not in defaults:
            raise ValueError(_unknown(name, arg, defaults))
        return name, value
    if isinstance(defaults.get(part), bool):
        return part, "true"
    if place == 0 and defaults:
        return next(iter(defaults)), part
    raise ValueError(_unknown(part, arg, defaults))


def _unknown(name: str, arg: str | None, defaults: dict[str, Any]) -> str:
    if name in defaults:
        return f"option {name!r} in {arg!r} has no value; write {name}=VALUE"
    near = difflib.get_close_matches(name, defaults, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    options = ", ".join(f"{key}={value}" for key, value in defaults.items())
    return f"unknown option {name!r} in {arg!r}, expected some of: {options}.{hint}"


def _cast(name: str, value: str, default: Any) -> Any:
    if default is None or isinstance(default, str):
        return value
    try:
        return _BOOLS[value.lower()] if isinstance(default, bool) else type(default)(value)
    except (KeyError, ValueError):
        kind = type(default).__name__
        raise ValueError(
            f"option {name!r}: found {value!r}, expected {kind} such as {name}={default}"
        ) from None
