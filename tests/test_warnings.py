"""A warning that our own code raises is an error in the suite; those of packages are not."""

import warnings

import pytest


@pytest.mark.parametrize("module", ["xmc_jax", "xmc_jax.losses.margin", "configs.unidec"])
def test_ours_are_errors(module):
    with pytest.raises(UserWarning, match="of ours"):
        warnings.warn_explicit("of ours", UserWarning, f"{module}.py", 1, module=module)


def test_of_packages_are_not():
    with warnings.catch_warnings(record=True):
        warnings.warn_explicit("not ours", UserWarning, "numpy.py", 1, module="xmc_jaxlike")
