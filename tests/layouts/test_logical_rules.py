"""Logical rules: T5X's semantics, held against flax's reading of the same rules."""

import flax.linen.spmd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright import MeshwrightError, Rules, standard_rules

DIMS = ["batch", "embed", "mlp", "heads", "kv"]
AXES = st.sampled_from([None, "dp", "tp", "sp", ("dp", "tp"), ("sp", "dp")])
rule_lists = st.lists(st.tuples(st.sampled_from(DIMS), AXES), max_size=10)


@given(rule_lists, st.lists(st.sampled_from([*DIMS, None]), max_size=4).map(tuple))
def test_the_spec_is_the_one_flax_linen_finds(rules: list, dims: tuple[str | None, ...]) -> None:
    named = [dim for dim in dims if dim is not None]
    ours = Rules([*rules, *((dim, None) for dim in DIMS)])
    if len(set(named)) < len(named):
        with pytest.raises(MeshwrightError, match="twice"):
            ours.spec(dims)
        return
    theirs = flax.linen.spmd.logical_to_mesh_axes(dims, rules)
    expected = mw.Layout.of_spec(theirs, ndim=len(dims)).spec
    assert ours.spec(dims) == expected


@pytest.mark.parametrize(
    ("activation_dims", "parameter_dims", "embed_mlp", "batch_length_embed"),
    [
        (1, 1, P(None, "model"), P("data")),
        (2, 1, P(None, "model"), P("data", None, "model")),
        (1, 2, P("data", "model"), P("data")),
        (2, 2, P("data", "model"), P("data", None, "model")),
    ],
)
def test_the_four_standard_sets_place_weights_and_activations_as_t5x_does(
    activation_dims: int, parameter_dims: int, embed_mlp: P, batch_length_embed: P
) -> None:
    rules = standard_rules(activation_dims, parameter_dims)
    assert rules.rules[0].dim == "batch"
    assert rules.spec("embed mlp") == embed_mlp
    assert rules.spec("batch length embed") == batch_length_embed
    assert (
        rules.spec(("joined_kv", "embed"))
        == mw.Layout.of_spec(P("model", "data" if parameter_dims == 2 else None)).spec
    )
    assert rules.spec("vocab heads") == P("model")
    for whole in ("kv", "relpos_buckets", "layers", "stack", "mlp_activations", "length"):
        assert rules.spec((whole,)) == P()


def test_additional_rules_come_last() -> None:
    rules = standard_rules(additional_rules=[("embed", "data"), ("expert", "data")])
    assert rules.spec("expert embed") == P("data")  # embed -> None was first, and is final
    assert rules.rules[-1].dim == "expert"


def test_priority_is_rule_order_never_dim_order() -> None:
    rules = Rules([("mlp", "tp"), ("embed", "tp"), ("embed", "fsdp")])
    assert rules.spec("embed mlp") == P("fsdp", "tp")
    assert rules.spec("mlp embed") == P("tp", "fsdp")
    assert rules.spec("embed") == P("tp")


def test_several_axes_are_all_or_nothing() -> None:
    rules = Rules([("mlp", "tp"), ("embed", ("fsdp", "tp")), ("embed", "sp")])
    assert rules.spec("embed mlp") == P("sp", "tp")
    assert rules.spec("embed") == P(("fsdp", "tp"))


def test_a_dim_that_loses_every_rule_stays_whole_and_is_told_why() -> None:
    outcome = Rules([("mlp", "tp"), ("embed", "tp")]).outcome("embed mlp")
    assert outcome.layout.spec == P(None, "tp")
    assert [(str(rule), why) for rule, why in outcome.lost] == [
        ("embed -> tp", "tp already splits mlp")
    ]


def test_axes_can_be_renamed_to_one_or_several() -> None:
    rules = standard_rules(1, 2).rename_axes(data=("dp", "fsdp"), model="tp")
    assert rules.spec("embed mlp") == P(("dp", "fsdp"), "tp")
    with pytest.raises(MeshwrightError, match="did you mean 'model'"):
        standard_rules().rename_axes(modle="tp")


@given(rule_lists, st.sets(st.sampled_from(DIMS)))
def test_printed_rules_read_back(rules: list, optional: set[str]) -> None:
    made = Rules(rules, optional=[dim for dim in optional if dim in {d for d, _ in rules}])
    assert Rules.parse(str(made)) == made


@given(st.text(max_size=40) | st.text(alphabet="ab->+;?none\n ", max_size=40))
def test_any_text_is_rules_or_a_readable_error(text: str) -> None:
    try:
        rules = Rules.parse(text)
    except MeshwrightError as error:
        assert len(str(error)) > 20
    else:
        assert Rules.parse(str(rules)) == rules


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Rules([("embed", "tp")]).spec("embde"), ["'embde'", "did you mean 'embed'?", "('embde', None)"]),
        (lambda: Rules([("embed", "tp")]).spec("embed embed"), ["'embed' twice"]),
        (lambda: Rules([("embed", "tp")]).spec("embed", shape=(12,), mesh="tp=8"), ["12", "tp=8", "8 or 16"]),
        (lambda: Rules([("embed", "tpp")]).spec("embed", mesh="tp=8"), ["'tpp'", "did you mean 'tp'?"]),
        (lambda: Rules([("embed", "tp")]).spec("embed", shape=(8, 8)), ["has 2 dims"]),
        (lambda: Rules([("embed", "tp")]).spec("embed", mesh="tp=-1"), ["leaves a size open"]),
        (lambda: Rules([("embed", "tp")]).spec("embed", mesh=8), ["mesh=8 is not a mesh"]),
        (lambda: Rules(["embed"]), ["'embed' is not a pair"]),
        (lambda: Rules([("embed", 4)]), ["embed"]),
        (lambda: Rules([("embed", ("tp", "tp"))]), ["twice"]),
        (lambda: Rules([("", "tp")]), ["is not a dim name"]),
        (lambda: Rules([("embed", "t p")]), ["'t p' is not a mesh axis"]),
        (lambda: Rules([("embed", "tp")], optional=("embd",)), ["'embd'", "did you mean 'embed'?"]),
        (lambda: Rules.parse("embed fsdp"), ["'embed fsdp'", "'dim -> axis'"]),
        (lambda: standard_rules(3), ["activation_partitioning_dims=3", "1 or 2"]),
        (lambda: standard_rules(1, 0), ["parameter_partitioning_dims=0"]),
    ],
)  # fmt: skip
def test_mistakes_are_readable(call: object, words: list[str]) -> None:
    with pytest.raises(MeshwrightError) as caught:
        call()  # type: ignore[operator]
    for word in words:
        assert word in str(caught.value)


def test_the_standard_sets_take_t5xs_keywords() -> None:
    assert (
        standard_rules(1, 2, [("expert", "data")]).rules
        == standard_rules(
            activation_partitioning_dims=1,
            parameter_partitioning_dims=2,
            additional_rules=[("expert", "data")],
        ).rules
    )
    assert standard_rules(additional_rules=None).rules == standard_rules().rules
