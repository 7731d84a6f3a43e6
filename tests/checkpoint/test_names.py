"""Names on disk: readable, and without Python's classes."""

import collections

import jax
import jax.numpy as jnp
import optax
import pytest

import meshwright as mw
from meshwright.checkpoint.names import like, named_leaves, nested


def test_an_optimizers_state_is_named_by_fields_and_numbers() -> None:
    params = {"layers": {"attention": {"wq": jnp.ones((2, 2))}}}
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.constant_schedule(1e-3))
    )
    names = list(named_leaves({"params": params, "optimizer": optimizer.init(params)}))
    assert names == [
        "optimizer/1/0/count",
        "optimizer/1/0/mu/layers/attention/wq",
        "optimizer/1/0/nu/layers/attention/wq",
        "optimizer/1/2/count",
        "params/layers/attention/wq",
    ]


def test_only_the_names_of_fields_count() -> None:
    one = collections.namedtuple("One", "count mu")
    other = collections.namedtuple("Other", "count mu")
    names = [
        list(named_leaves({"o": (state,)}))
        for state in (one(1, 2), other(1, 2), {"count": 1, "mu": 2})
    ]
    assert names[0] == names[1] == names[2] == ["o/0/count", "o/0/mu"]


def test_a_tree_is_rebuilt_from_names_in_its_own_classes() -> None:
    state = optax.adam(1e-3).init({"w": jnp.ones(3)})
    leaves = named_leaves({"optimizer": state})
    assert jax.tree.structure(like({"optimizer": state}, leaves)) == jax.tree.structure(
        {"optimizer": state}
    )
    assert nested({"a/b/c": 1, "a/d": 2, "e": 3}) == {"a": {"b": {"c": 1}, "d": 2}, "e": 3}


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        (1, "bare int"),
        ({"a/b": 1}, "'a/b'"),
        ({"": 1}, "''"),
        ({"..": {"b": 1}}, "'..'"),
        ({"a.b": 1, "a": {"b": 2}}, "'a/b' and 'a.b'|'a.b' and 'a/b'"),
    ],
)
def test_names_that_cannot_be_told_apart_on_disk_are_refused(tree: object, said: str) -> None:
    with pytest.raises(mw.MeshwrightError, match=said):
        named_leaves(tree)
