"""``--config=file.py:text``: finds the file, and parses the text: a few options and commas."""

from __future__ import annotations

import difflib
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


def parse(arg: str | None, **defaults: Any) -> ml_collections.ConfigDict:
    """Returns the defaults, overridden by what the text says.

    ``name=value`` sets an option, cast to the type of its default (str where that is None). The
    first part may be a bare value of the first default. The bare name of a bool option turns it on.

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
    parts = [part.strip() for part in (arg or "").split(",")]
    for place, part in enumerate(parts):
        if not part:
            continue
        name, value = _split(part, place, arg, defaults)
        if name in values:
            raise ValueError(f"option {name!r} is given twice in {arg!r}; give it once")
        values[name] = _cast(name, value, defaults[name])
    return ml_collections.ConfigDict({**defaults, **values})


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
