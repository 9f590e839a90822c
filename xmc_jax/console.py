"""What the binaries show: this package's messages, plain; other packages' warnings only."""

from __future__ import annotations

import logging as standard
from pathlib import Path

from absl import logging

HERE = str(Path(__file__).parent)


def setup() -> None:
    """Show info messages of this package and warnings of all others, on standard error."""
    logging.use_absl_handler()
    logging.set_verbosity(logging.INFO)
    handler = logging.get_absl_handler()
    handler.setFormatter(standard.Formatter("%(message)s"))
    handler.addFilter(
        lambda record: record.levelno >= standard.WARNING or record.pathname.startswith(HERE)
    )
