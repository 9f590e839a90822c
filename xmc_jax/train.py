"""Train a model, or continue training it.

python -m xmc_jax.train --config=configs/unidec.py:wordnet-mini

Where there is no clone: --config=unidec:wordnet-mini.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_flags

from xmc_jax import config_args
from xmc_jax.host import console


class _Named(flags.ArgumentParser):
    """Takes names of the package's own configurations, and leaves files to another parser."""

    def __init__(self, of_files: flags.ArgumentParser) -> None:
        """Remember the other parser."""
        self._of_files = of_files

    def parse(self, argument: str) -> Any:
        """The configuration of ``FILE.py:OPTIONS`` or ``NAME:OPTIONS``."""
        name, colon, options = argument.partition(":")
        path = config_args.find_file(name)
        try:
            return self._of_files.parse(path + colon + options)
        except SyntaxError as error:
            raise ValueError(config_args.not_python(path, error)) from error


_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Configuration, as FILE.py:OPTIONS, or NAME:OPTIONS of one that is installed."
)
flags.FLAGS["config"].parser = _Named(flags.FLAGS["config"].parser)
_WORKDIR = flags.DEFINE_string("workdir", "", "Work directory; default runs/<config>-<options>.")
_DATA = flags.DEFINE_string("data", "", "Folder of the data set, or a root that holds it.")
_PROPENSITY = console.define_propensity()
console.define_reading()


def main(argv: list[str]) -> None:
    """Parse flags, make one call, print the result."""
    from xmc_jax.runs import launch, result_tables
    from xmc_jax.training.loop import TrainingError

    del argv
    console.setup(output_needed=False)
    config = _CONFIG.value
    if _DATA.value:
        config.data = _DATA.value
    folder = Path(_WORKDIR.value or _default_workdir())
    try:
        given = [*config_flags.get_override_values(flags.FLAGS["config"])]
        if _PROPENSITY.value:
            config.propensity = _PROPENSITY.value
            given.append("propensity")
        for name, value in console.reading().items():
            config.reading[name] = value
            given.append(f"reading.{name}")
        result = launch.start(config, folder, overrides=given)
    except (ValueError, OSError, TrainingError) as error:
        console.fail(error)
    except KeyboardInterrupt as error:  # while nothing was being trained, or a second signal
        print("interrupted: run the same command again", file=sys.stderr)
        sys.exit(128 + (error.args or (signal.SIGINT,))[0])
    if result:
        print(result_tables.table(result))
    print(f"work directory: {folder}")


def _default_workdir() -> str:
    """``runs/unidec-wordnet-mini`` for ``--config=configs/unidec.py:wordnet-mini``."""
    path, _, options = config_flags.get_config_filename(flags.FLAGS["config"]).partition(":")
    clean = "".join(c if c.isalnum() or c in ".=-_" else "-" for c in options.strip())
    return str(Path("runs") / "-".join(filter(None, [Path(path).stem, clean])))


if __name__ == "__main__":
    flags.mark_flag_as_required("config")
    console.run(main)
