"""Path rules: the first regex found decides; nothing is matched or dropped in silence."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright import Layout, MeshwrightError, PathRules
from meshwright.layouts.expression import Expression

# EasyLM's Llama table, its mesh axes (dp, fsdp, mp)
LLAMA = PathRules(
    [
        ("transformer/wte/embedding", P("mp", "fsdp")),
        ("attention/(wq|wk|wv)/kernel", P("fsdp", "mp")),
        ("attention/wo/kernel", P("mp", "fsdp")),
        ("feed_forward/w1/kernel", P("fsdp", "mp")),
        ("feed_forward/w2/kernel", P("mp", "fsdp")),
        ("feed_forward/w3/kernel", P("fsdp", "mp")),
        ("attention_norm/kernel", P(None)),
        ("ffn_norm/kernel", P(None)),
        ("transformer/ln_f/kernel", P(None)),
        ("lm_head/kernel", P("fsdp", "mp")),
        (".*", P(None)),
    ]
)


def llama() -> dict:
    def array(*shape: int) -> dict:
        return {"kernel": jax.ShapeDtypeStruct(shape, jnp.float32)}

    layer = {
        "attention": {"wq": array(64, 64), "wk": array(64, 64), "wv": array(64, 64), "wo": array(64, 64)},
        "feed_forward": {"w1": array(64, 128), "w2": array(128, 64), "w3": array(64, 128)},
        "attention_norm": array(64),
        "ffn_norm": array(64),
    }  # fmt: skip
    return {
        "params": {
            "transformer": {
                "wte": {"embedding": jax.ShapeDtypeStruct((256, 64), jnp.float32)},
                "h": {"0": layer, "1": layer},
                "ln_f": array(64),
            },
            "lm_head": array(64, 256),
        }
    }


def test_easylm_rules_place_llama_as_easylm_does(eight: list[jax.Device]) -> None:
    mesh = mw.mesh("dp:1,fsdp:-1,mp:2", devices=eight)
    specs = jax.tree.map(lambda s: s.spec, mw.shardings(llama(), LLAMA, mesh=mesh))["params"]
    assert specs["transformer"]["wte"]["embedding"] == P("mp", "fsdp")
    layer = specs["transformer"]["h"]["1"]
    assert layer["attention"]["wk"]["kernel"] == P("fsdp", "mp")
    assert layer["attention"]["wo"]["kernel"] == P("mp", "fsdp")
    assert layer["feed_forward"]["w2"]["kernel"] == P("mp", "fsdp")
    assert layer["ffn_norm"]["kernel"] == P()
    assert specs["lm_head"]["kernel"] == P("fsdp", "mp")


def test_the_first_regex_found_anywhere_in_the_path_wins() -> None:
    rules = PathRules([("b/c", ("x",)), ("c", ("y",)), ("^a$", ("z",))])
    assert rules.match("a/b/c/d").pattern == "b/c"
    assert rules.match("a/c").pattern == "c"
    assert rules.match("a").pattern == "^a$"


def test_scalars_and_one_element_arrays_stay_whole(eight: list[jax.Device]) -> None:
    tree = {"w": jnp.ones((8, 8)), "step": jnp.ones(()), "scale": jnp.ones((1, 1))}
    placed = mw.shard(tree, PathRules([(".*", ("dp",))]), mesh=mw.mesh("dp=8", devices=eight))
    assert placed["w"].sharding.spec == P("dp")
    assert placed["step"].sharding.is_fully_replicated
    assert placed["scale"].sharding.is_fully_replicated


def test_layouts_can_be_written_in_every_notation() -> None:
    same = [
        "x y -> x@fsdp y@tp",
        Layout.parse("x y -> x@fsdp y@tp"),
        Expression.parse("x y -> x@fsdp y@tp"),
    ]
    for layout in same:
        assert str(PathRules([("w", layout)]).match("w").layout) == "x y -> x@fsdp y@tp"
    for short in [P("fsdp"), ("fsdp",), ["fsdp"]]:
        assert str(PathRules([("w", short)]).match("w").layout) == "a ... -> a@fsdp ..."
    assert str(PathRules([("w", None)]).match("w").layout) == "... -> ..."


def test_numbers_work_in_path_rules_too(eight: list[jax.Device]) -> None:
    placed = mw.shard({"w": jnp.ones((8, 8))}, PathRules([("w", "x y -> x2 y4")]), devices=eight)
    assert placed["w"].sharding.shard_shape((8, 8)) == (4, 2)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["w[qkv]", "a/b$", "^x", ".*", r"layer\d+", "a=>b"]),
            st.sampled_from(["x y -> x@fsdp y@tp", "... -> * ...", "a -> a4", ("tp", None), None]),
        ),
        max_size=5,
        unique_by=lambda pair: pair[0],
    ),
    st.booleans(),
)
def test_printed_rules_read_back(pairs: list, optional: bool) -> None:
    rules = PathRules(pairs, optional=[p for p, _ in pairs] if optional else [])
    assert PathRules.parse(str(rules)) == rules


@given(st.text(max_size=40) | st.text(alphabet="a(b[)]*=> -@\n?", max_size=40))
def test_any_text_is_rules_or_a_readable_error(text: str) -> None:
    try:
        rules = PathRules.parse(text)
    except MeshwrightError as error:
        assert len(str(error)) > 20
    else:
        assert PathRules.parse(str(rules)) == rules


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ([("w1", ("dp",))], ["no path rule matches 'w2'", "('.*', ())"]),
        ([("w", ("dp",)), ("w2", ("dp",))], ["'w2' never decides", "'w', which comes first, takes 'w2'"]),
        ([("w", ("dp",)), ("norm", ())], ["'norm' matches no array", "optional="]),
        ([("w", ("tp",))], ["'tp'", "dp=8"]),
        ([("w", (None, None, "dp"))], ["'w1'", "names 3 dims", "the array has 2"]),
        ([("w1", ("dp",)), ("w2", (None, "dp"))], ["'w2'", "size 12", "in 8"]),
    ],
)  # fmt: skip
def test_nothing_is_placed_by_accident(
    rules: list, words: list[str], eight: list[jax.Device]
) -> None:
    tree = {"w1": jnp.ones((8, 8)), "w2": jnp.ones((8, 12))}
    with pytest.raises(MeshwrightError) as caught:
        mw.shard(tree, PathRules(rules), mesh=mw.mesh("dp=8", devices=eight))
    for word in words:
        assert word in str(caught.value)


def test_a_last_catch_all_and_optional_rules_may_stand_unused(eight: list[jax.Device]) -> None:
    rules = PathRules([("w", ("dp",)), ("lm_head", ()), (".*", ())], optional=["lm_head"])
    mw.shard({"w": jnp.ones((8, 8))}, rules, mesh=mw.mesh("dp=8", devices=eight))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: PathRules([("w(", ())]), ["'w('", "not a regex"]),
        (lambda: PathRules(["w"]), ["'w' is not a pair"]),
        (lambda: PathRules([(3, ())]), ["3 is not a regex"]),
        (lambda: PathRules([("w", 3)]), ["3 is not a layout"]),
        (lambda: PathRules([("w", "x -> y")]), ["'x -> y'"]),
        (lambda: PathRules([(" w", ())]), ["white space"]),
        (lambda: PathRules([("w", ())], optional=["v"]), ["'v' is not a pattern"]),
        (lambda: PathRules.parse("w x -> x"), ["'regex => layout'"]),
    ],
)
def test_bad_rules_are_refused_when_made(make: object, words: list[str]) -> None:
    with pytest.raises(MeshwrightError) as caught:
        make()  # type: ignore[operator]
    for word in words:
        assert word in str(caught.value)
