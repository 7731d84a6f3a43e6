"""The examples in docstrings are true."""

import doctest
import importlib
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshwright as mw

MODULES = [
    info.name
    for info in pkgutil.walk_packages(mw.__path__, "meshwright.")
    if not info.name.startswith("meshwright.cli")
]
NAMES = {name: getattr(mw, name) for name in mw.__all__ if name != "mesh"}
NAMES |= {"jax": jax, "jnp": jnp, "np": np, "optax": optax, "mw": mw}


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_the_module_hold(name: str) -> None:
    if name.startswith("meshwright.torch"):
        pytest.importorskip("torch")
    module = importlib.import_module(name)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    runner = doctest.DocTestRunner(optionflags=flags)
    for test in doctest.DocTestFinder(exclude_empty=True).find(module, globs=NAMES | vars(module)):
        assert runner.run(test).failed == 0, test.name
