"""explain: the table says what is really placed, and what is wrong."""

import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright import ArraySpec, MeshwrightError, PathRules, Rules
from meshwright.models import PRESETS, abstract_arrays, decoder_rules, family_of, preset

TREE = {
    "embedding": ArraySpec((1024, 64), "vocab embed", jnp.bfloat16),
    "layers": [{"w": ArraySpec((64, 256), "embed mlp"), "norm": ArraySpec((64,), "norm")}] * 3,
    "step": ArraySpec((), (), jnp.int32),
}
RULES = Rules([("vocab", "tp"), ("mlp", "tp"), ("embed", "tp"), ("embed", "fsdp"), ("norm", None)])


def test_bytes_and_copies_are_what_the_devices_really_hold(eight: list[jax.Device]) -> None:
    mesh = mw.mesh("dp=2,fsdp=2,tp=2", devices=eight)
    table = mw.explain(TREE, RULES, mesh)
    arrays = jax.tree.map(
        lambda spec: jnp.zeros(spec.shape, spec.dtype),
        TREE,
        is_leaf=lambda x: isinstance(x, ArraySpec),
    )
    dims = jax.tree.map(lambda s: s.dims, TREE, is_leaf=lambda x: isinstance(x, ArraySpec))
    placed = jax.tree.leaves(mw.shard(arrays, RULES, mesh=mesh, dims=dims))
    for row, array in zip(table.rows, placed, strict=True):
        shards = array.addressable_shards
        assert row.bytes_per_device == shards[0].data.nbytes
        distinct = {tuple((s.start, s.stop) for s in shard.index) for shard in shards}
        assert row.copies == len(shards) // len(distinct)
        assert row.layout.spec == array.sharding.spec
    assert table.bytes_per_device == sum(a.addressable_shards[0].data.nbytes for a in placed)


def test_a_row_says_who_decided_and_who_lost_and_why() -> None:
    row = next(
        r for r in mw.explain(TREE, RULES, "dp=1,fsdp=2,tp=4").rows if r.path == "layers/0/w"
    )
    assert row.rule == "mlp -> tp, embed -> fsdp"
    assert row.lost == ("embed -> tp (tp already splits mlp)",)


def test_layers_alike_are_told_once() -> None:
    table = mw.explain(TREE, RULES, "fsdp=2,tp=4")
    assert len(table.rows) == 8
    collapsed = table.collapsed()
    assert {(r.path, r.count) for r in collapsed.rows} == {
        ("embedding", 1), ("layers/*/w", 3), ("layers/*/norm", 3), ("step", 1)
    }  # fmt: skip
    assert collapsed.bytes_total == table.bytes_total
    assert collapsed.bytes_per_device == table.bytes_per_device


def test_as_data_it_goes_through_json() -> None:
    data = json.loads(json.dumps(mw.explain(TREE, RULES, "fsdp=2,tp=4").data()))
    assert data["mesh"] == {"fsdp": 2, "tp": 4}
    first = data["arrays"][0]
    assert first["path"] == "embedding"
    assert first["dims"] == ["vocab", "embed"]
    assert first["axes"] == [["tp"], ["fsdp"]]
    assert first["layout"] == "vocab embed -> vocab@tp embed@fsdp"


def test_as_markdown_every_row_has_every_column() -> None:
    lines = mw.explain(TREE, RULES, "fsdp=2,tp=4").markdown().splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 + 4
    assert {line.count("|") for line in table} == {9}


def test_as_text_it_holds_the_table_and_the_sum() -> None:
    text = str(mw.explain(TREE, RULES, "fsdp=2,tp=4"))
    for part in ("layers/*/w ×3", "vocab@tp embed@fsdp", "64×256", "bfloat16", "8 arrays"):
        assert part in text
    assert "on 8 devices (fsdp=2,tp=4)" in text


def test_as_path_rules_it_is_the_same_placement(eight: list[jax.Device]) -> None:
    mesh = mw.mesh("fsdp=2,tp=4", devices=eight)
    rules = mw.explain(TREE, RULES, mesh).path_rules()
    again = PathRules.parse(str(rules))
    assert mw.shardings(TREE, again, mesh=mesh) == mw.shardings(TREE, RULES, mesh=mesh)


def test_placed_by_numbers_alone_it_speaks_in_numbers(eight: list[jax.Device]) -> None:
    tree = {"w": np.ones((8, 8), np.float32), "b": np.ones((8, 8), np.float32)}
    table = mw.explain(tree, {"w": "a b -> a2 b*", "b": "a b -> b* a2"})
    assert {row.path: row.cells()[3] for row in table.rows} == {"w": "a2 b8", "b": "b8 a2"}
    again = mw.shardings(tree, table.path_rules())
    assert again == mw.shardings(tree, {"w": "a b -> a2 b*", "b": "a b -> b* a2"})


def test_sizes_are_as_jax_will_hold_them(eight: list[jax.Device]) -> None:
    table = mw.explain({"w": np.ones((8, 8))}, "a b -> a@dp b", "dp=8")
    placed = mw.shard(np.ones((8, 8)), "a b -> a@dp b", mesh=mw.mesh("dp=8", devices=eight))
    assert table.rows[0].dtype == placed.dtype.name == "float32"
    assert table.bytes_per_device == placed.addressable_shards[0].data.nbytes


def test_a_large_array_left_whole_is_pointed_out() -> None:
    tree = {"big": ArraySpec((4096, 4096), "a b"), "small": ArraySpec((64,), "a")}
    table = mw.explain(tree, Rules([("a", None), ("b", None)]), "dp=8")
    assert table.notes == (
        "the same on every device: big, 64.0 MiB on each; split a dim, or leave it so if that is meant",
    )
    assert mw.explain(tree, Rules([("a", "dp"), ("b", None)]), "dp=8").notes == ()


def test_mistakes_raise_or_are_listed() -> None:
    rules = Rules([("vocab", "tp"), ("mpl", "tp"), ("embed", "fsdp"), ("norm", None)])
    with pytest.raises(
        MeshwrightError, match="no rule says where dim 'mlp' goes; did you mean 'mpl'"
    ):
        mw.explain(TREE, rules, "fsdp=2,tp=4")
    table = mw.explain(TREE, rules, "fsdp=2,tp=4", strict=False)
    assert len(table.problems) == 1
    assert "and 2 more alike" in table.problems[0]
    assert "did you mean 'mpl'" in str(table)
    assert "did you mean 'mpl'" in table.markdown()


def test_a_rule_that_matches_nothing_is_a_mistake_unless_optional() -> None:
    tree = {"w": ArraySpec((8,), "embed")}
    with pytest.raises(
        MeshwrightError, match=r"dim 'batch' match no array.*optional=\('batch',\).*'batch\? -> "
    ):
        mw.explain(tree, Rules([("embed", "dp"), ("batch", "dp")]), "dp=8")
    mw.explain(tree, Rules([("embed", "dp"), ("batch", "dp")], optional=["batch"]), "dp=8")
    mw.explain(tree, mw.standard_rules(), "data=2,model=4")


def test_arrays_without_dim_names_are_told_how_to_get_them() -> None:
    tree = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
    with pytest.raises(MeshwrightError, match=r"'w' has no dim names.*ArraySpec.*dims="):
        mw.explain(tree, RULES, "fsdp=2,tp=4")
    assert mw.explain(tree, Rules([("a", "tp"), ("b", None)]), "tp=4", dims={"w": "a b"}).rows
    with pytest.raises(MeshwrightError, match="structure of the tree"):
        mw.explain(tree, RULES, "fsdp=2,tp=4", dims={"v": "a b"})


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_splits_evenly_under_its_own_rules(name: str) -> None:
    config = preset(name)
    # the smallest have two key heads
    table = mw.explain(abstract_arrays(config), family_of(config).rules(), "dp=1,fsdp=8,tp=2,sp=1")
    # routers, the biases of experts and the first matrices of latent attention are whole along tp
    small = ("router", "gate_bias", "up_bias", "down_bias", "wq_a", "wkv_a")
    named = [part for note in table.notes for part in re.findall(r"layers/\w+/(\w+)", note)]
    assert set(named) <= {*small}
    assert bool(table.notes) == bool(named)
    assert table.bytes_per_device < 1.1 * table.bytes_total / 16
    assert sum(math.prod(r.shape) for r in table.rows) == table.num_elements


def test_weights_go_over_fsdp_and_sp_jointly_when_asked() -> None:
    arrays = abstract_arrays(preset("tiny"))
    table = mw.explain(arrays, decoder_rules(sp=True), "dp=1,fsdp=2,tp=2,sp=2")
    row = next(row for row in table.rows if row.path == "layers/mlp/gate")
    assert row.layout.spec == P(None, ("fsdp", "sp"), "tp")


def test_keys_and_other_leaves_have_rows() -> None:
    tree = {
        "key": jax.random.key(0),
        "w": jnp.ones((8, 8)),
        "n": 3,
        "np": ArraySpec((np.int64(8),), "a"),
    }
    table = mw.explain(tree, "... -> ...", "dp=8")
    found = {row.path: row.bytes_total for row in table.rows}
    assert found == {"key": 8, "w": 256, "n": 4, "np": 32}
    json.dumps(table.data())
    with_text = mw.explain({"w": jnp.ones(8), "s": "text"}, "... -> ...", "dp=8", strict=False)
    assert "'s' is a str" in with_text.problems[0]


def test_only_layer_numbers_are_collapsed() -> None:
    array = ArraySpec((8,), "a")
    tree = {"h": [{"w1": array, "w3": array}] * 2, "block_0": array, "block_1": array}
    table = mw.explain(tree, Rules([("a", None)]), "dp=8").collapsed()
    assert [(row.path, row.count) for row in table.rows] == [
        ("block_*", 2), ("h/*/w1", 2), ("h/*/w3", 2)
    ]  # fmt: skip


def test_path_rules_that_come_later_are_told_as_losers() -> None:
    rules = PathRules([("w1", ("dp",)), ("w", ()), (".*", ())])
    table = mw.explain({"w1": jnp.ones(8), "w2": jnp.ones(8)}, rules, "dp=8")
    assert table.rows[0].lost == ("'w' (comes later)", "'.*' (comes later)")


def test_a_large_array_whole_along_an_axis_that_splits_others_is_pointed_out() -> None:
    tree = {"big": ArraySpec((4096, 4096), "a b"), "other": ArraySpec((4096, 4096), "c d")}
    rules = Rules([("a", "fsdp"), ("b", None), ("c", "fsdp"), ("d", "tp")])
    (note,) = mw.explain(tree, rules, "dp=2,fsdp=2,tp=4").notes
    assert note.startswith("the same on every device along tp: big, 32.0 MiB on each")


def test_dim_names_the_notation_cannot_hold_still_print_and_read_back() -> None:
    tree = {"w": ArraySpec((8, 8), ("conv1", "kv-heads"))}
    table = mw.explain(tree, Rules([("conv1", "tp"), ("kv-heads", None)]), "tp=4")
    assert "conv1@tp kv-heads" in str(table)
    again = PathRules.parse(str(table.path_rules()))
    assert mw.explain(tree, again, "tp=4").rows[0].layout.spec == P("tp")


def test_collapsed_rows_give_rules_for_all_layers(eight: list[jax.Device]) -> None:
    mesh = mw.mesh("fsdp=2,tp=4", devices=eight)
    rules = mw.explain(TREE, RULES, mesh).collapsed().path_rules()
    assert len(rules.rules) == 4
    assert mw.shardings(TREE, rules, mesh=mesh) == mw.shardings(TREE, RULES, mesh=mesh)


def test_a_repeated_dim_name_is_listed_among_the_problems() -> None:
    tree = {"w": ArraySpec((8, 8), "embed embed")}
    table = mw.explain(tree, Rules([("embed", "tp")]), "tp=4", strict=False)
    assert "'embed' twice" in table.problems[0]
