"""What the binaries share: how flags are read, how errors end them, and what they show."""

from __future__ import annotations

import contextlib
import logging as standard
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import app, flags, logging

from xmc_jax.host import allocator, streams

HERE = str(Path(__file__).parents[1])


def run(main: Callable[[list[str]], None]) -> None:
    """Parse flags and call ``main``; a wrong flag is one message and exit code 1."""
    streams.prepare()
    allocator.keep_freed_memory()  # a configuration loads JAX, which starts threads
    logging.get_absl_handler().python_handler.setStream(sys.stderr)
    code: Any = 0
    try:
        app.run(main, flags_parser=parse_flags)
    except SystemExit as error:
        code = error.code
    except KeyboardInterrupt as error:
        print("interrupted", file=sys.stderr)
        code = 128 + (error.args or (signal.SIGINT,))[0]
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    with contextlib.suppress(SystemExit):  # the last of the output may be lost
        sys.stdout.flush()
    sys.stderr.flush()
    if code := code or streams.code():
        os._exit(code)  # threads of libraries would wait for minutes for what failed


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


def define_reading(*, labels: bool = True) -> None:
    """Define the flags that say how your own files are read.

    Args:
      labels: also those that are about labels.
    """
    column = "a name in the first row, a key of JSON Lines, or a number from 1."
    flags.DEFINE_string("text_column", None, f"Where texts are: {column}")
    flags.DEFINE_string(
        "encoding",
        None,
        "Of the files, as cp1252 or gb18030; default UTF-8.",
    )
    if labels:
        flags.DEFINE_string("label_column", None, f"Where labels are: {column}")
        flags.DEFINE_string(
            "separator",
            None,
            "Stands between labels, as ',' or ' / '; default | (lists and <tags> are seen).",
        )
        flags.DEFINE_bool(
            "merge_labels", None, "Join labels that differ by blanks, composition or case alone."
        )


def define_propensity() -> flags.FlagHolder[str]:
    """Define the flag for the constants behind PSP@k."""
    return flags.DEFINE_string(
        "propensity",
        "",
        "A,B of the labels' propensities, for PSP@k; default the catalog's, 0.55,1.5 for own data.",
    )


def reading() -> dict[str, Any]:
    """What the flags of `define_reading` say; those that were not given are left out."""
    names = ("separator", "text_column", "label_column", "encoding", "merge_labels")
    values = flags.FLAGS.flag_values_dict()
    return {name: values[name] for name in names if values.get(name) not in (None, "")}


def setup(*, output_needed: bool = True) -> None:
    """Show info messages of this package and warnings of others; keep freed memory.

    What Orbax's threads tell of a failed save is left out: it comes as an exception, too.

    Args:
      output_needed: whether the program ends when its standard output is lost; else it goes on, and
        the exit code tells of it.
    """
    if not output_needed:
        streams.spare_output()
    allocator.keep_freed_memory()
    logging.use_absl_handler()
    logging.set_verbosity(logging.INFO)
    handler = logging.get_absl_handler()
    handler.setFormatter(standard.Formatter("%(message)s"))
    handler.addFilter(
        lambda record: (
            record.pathname.startswith(HERE)
            or (record.levelno >= standard.WARNING and "orbax" not in record.pathname)
        )
    )
    threading.excepthook, sys.unraisablehook = _tell_of_thread, _tell_of_callback


def _tell_of_thread(error: threading.ExceptHookArgs) -> None:
    """As Python does, but for threads of Orbax."""
    trace = error.exc_traceback
    while trace is not None:
        if "orbax" in trace.tb_frame.f_code.co_filename:
            return
        trace = trace.tb_next
    threading.__excepthook__(error)


def _tell_of_callback(error: Any) -> None:
    """As Python does, but for TensorStore's, which come after Orbax gave up."""
    if str(error.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(error)


def fail(error: Exception) -> None:
    """End with one message and exit code 1."""
    logging.error("%s", error)
    sys.exit(1)
