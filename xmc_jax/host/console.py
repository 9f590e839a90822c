"""What the binaries share: how flags are read, how errors end them, and what they show."""

from __future__ import annotations

import logging as standard
import sys
from collections.abc import Callable
from pathlib import Path

from absl import app, flags, logging

from xmc_jax.host import allocator

HERE = str(Path(__file__).parents[1])


def run(main: Callable[[list[str]], None]) -> None:
    """Parse flags and call ``main``; a wrong flag is one message and exit code 1."""
    allocator.keep_freed_memory()  # a configuration loads JAX, which starts threads
    app.run(main, flags_parser=parse_flags)


def parse_flags(argv: list[str]) -> list[str]:
    """``flags.FLAGS(argv)``; what a configuration file raises is told without its traceback."""
    if "--help" in argv:
        app.usage(shorthelp=True, writeto_stdout=True)
        sys.exit(0)
    try:
        left = flags.FLAGS(argv)
    except (flags.Error, AttributeError, KeyError) as error:
        sys.exit(f"{_cause(error, argv)}\nSee --help.")
    if len(left) > 1:
        sys.exit(f"unexpected arguments: {left[1:]}; flags begin with --. See --help.")
    return left


def _cause(error: Exception, argv: list[str]) -> str:
    """The message behind an error of the flags' parser."""
    if "has no attribute 'get_config'" in str(error):
        return "the file of --config has no get_config: expected a configuration, as in configs/"
    if isinstance(error, (AttributeError, KeyError)):  # it names no flag
        given = [arg for arg in argv if arg.startswith("--config.")]
        reason = error.args[0]
        while isinstance(reason, Exception):
            reason = reason.args[0]
        return f"unknown field among {' '.join(given)}: {reason}"
    if "Traceback" not in str(error):
        return str(error)
    cause: BaseException = error
    while cause.__context__ is not None:
        cause = cause.__context__
    return str(cause)


def setup() -> None:
    """Show info messages of this package and warnings of all others; keep freed memory."""
    allocator.keep_freed_memory()
    logging.use_absl_handler()
    logging.set_verbosity(logging.INFO)
    handler = logging.get_absl_handler()
    handler.setFormatter(standard.Formatter("%(message)s"))
    handler.addFilter(
        lambda record: record.levelno >= standard.WARNING or record.pathname.startswith(HERE)
    )


def fail(error: Exception) -> None:
    """End with one message and exit code 1."""
    logging.error("%s", error)
    sys.exit(1)
