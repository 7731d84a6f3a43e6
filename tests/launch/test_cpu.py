"""Options of the CPU compiler: taken where it knows them, left out elsewhere."""

import jax
import numpy as np
import pytest

from meshwright.launch import quick_compile_options


def test_the_options_compile_and_do_not_change_a_result() -> None:
    options = quick_compile_options("cpu")
    x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
    function = lambda x: jax.nn.softmax(x @ x.T).sum(1)  # noqa: E731
    quick = jax.jit(function).lower(x).compile(options)(x)
    np.testing.assert_allclose(quick, jax.jit(function)(x), rtol=1e-6)


def test_other_compilers_get_none() -> None:
    assert quick_compile_options("tpu") is None
    assert quick_compile_options("gpu") is None


def test_a_compiler_without_the_option_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """jax 0.12 refuses options that it does not know."""
    real = jax.jit

    def newer(function: object, compiler_options: object = None) -> object:
        return real(function, compiler_options={"no_such_option": True})

    monkeypatch.setattr(jax, "jit", newer)
    quick_compile_options.cache_clear()
    assert quick_compile_options("cpu") is None
    monkeypatch.undo()
    quick_compile_options.cache_clear()
