"""Families of systems; a new one is a folder here and a line in the dict."""

from typing import Any

from xmc_jax.contracts import Family
from xmc_jax.systems.frugal.family import FrugalFamily
from xmc_jax.systems.unidec.family import UniDECFamily

FAMILIES: dict[str, Family[Any]] = {"unidec": UniDECFamily(), "frugal": FrugalFamily()}
