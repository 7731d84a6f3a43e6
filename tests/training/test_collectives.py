"""What the compiled step sends, by mesh axis, from its HLO: nothing twice, nothing whole."""

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from tests.training.toy import Parts, Setting, parts

import meshwright as mw
from meshwright.audits import SentCollective, collectives, instructions
from meshwright.models.decoder import DecoderConfig, decoder_rules

# a layer's smallest matrix is larger than all else on a device: activations, the ends, any share
CONFIG = DecoderConfig(vocab=96, layers=4, embed=64, heads=8, kv_heads=8, head_dim=16, mlp=192)
SEQUENCES, LENGTH = 8, 8
WEIGHTS = {  # of a layer: in, then out
    "wq": (64, 8, 16), "wk": (64, 8, 16), "wv": (64, 8, 16), "wo": (8, 16, 64),
    "gate": (64, 192), "up": (64, 192), "down": (192, 64),
}  # fmt: skip
ENDS = {"embedding": (96, 64), "output": (64, 96)}
FSDP, DP_FSDP_TP = "dp=1,fsdp=8,tp=1,sp=1", "dp=2,fsdp=2,tp=2,sp=1"


def is_backward(collective: SentCollective) -> bool:
    return collective.phase == "backward"


def in_layers(collective: SentCollective) -> bool:
    """Whether it belongs to a layer, in a loop or unrolled."""
    return bool(re.search(r"[/(](attention|mlp)[/)]", collective.scope))


@functools.cache
def compiled(setting: Setting, micro_batches: int) -> tuple[Parts, Any]:
    run = parts(setting)
    shape = (micro_batches, SEQUENCES, LENGTH)
    one = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=run.functions.batch_sharding)
    batch = dict.fromkeys(("tokens", "targets", "segments", "positions"), one)
    lowered = run.functions.train.lower(run.target, batch)
    # XLA for CPU alone drops the barriers that keep unrolled layers' second all-gathers apart from
    # their first, and then merges them
    options = {} if setting.scan else {"xla_disable_hlo_passes": "cse_barrier_expander"}
    return run, lowered.compile(compiler_options=options)


def sent(text: str, micro_batches: int = 1, **options: Any) -> list[SentCollective]:
    run, program = compiled(Setting(text, config=CONFIG, **options), micro_batches)
    return collectives(program.as_text(), run.mesh)


def counted(found: Iterable[SentCollective]) -> Counter[tuple[int, ...]]:
    total: Counter[tuple[int, ...]] = Counter()
    for c in found:
        total[c.shape] += c.times
    return total


def split(shapes: dict[str, tuple[int, ...]], tp: int = 1, fsdp: int = 1) -> list[tuple[int, ...]]:
    """The shapes on a device: heads, mlp and vocab (not embed) over tp, embed over fsdp."""

    def one(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        embed = len(shape) - 1 if name in ("wo", "down", "embedding") else 0
        over_tp = 1 if embed == 0 else 0
        sizes = list(shape)
        sizes[embed] //= fsdp
        sizes[over_tp] //= tp
        return tuple(sizes)

    return [one(name, shape) for name, shape in shapes.items()]


def each(shapes: Iterable[tuple[int, ...]], times: int = 1) -> Counter[tuple[int, ...]]:
    total: Counter[tuple[int, ...]] = Counter()
    for shape in shapes:
        total[shape] += times
    return total


def matrices(found: Iterable[SentCollective]) -> list[SentCollective]:
    """Without scalars and what is as small as a norm."""
    return [c for c in found if math.prod(c.shape) > CONFIG.layers * CONFIG.embed]


# ---- fsdp


@pytest.mark.parametrize(
    "scan", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["scan", "unrolled"]
)
def test_fsdp_all_gathers_each_weight_once_forward_and_once_backward(scan: bool) -> None:
    found = [c for c in sent(FSDP, scan=scan) if c.operation == "all-gather"]
    assert {c.axes for c in found} == {("fsdp",)}
    layers = each(WEIGHTS.values(), CONFIG.layers)
    assert counted(c for c in found if in_layers(c) and not is_backward(c)) == layers
    assert counted(c for c in found if in_layers(c) and is_backward(c)) == layers
    # the head's gradient is made while its logits are: neither is all-gathered again
    assert counted(c for c in found if not in_layers(c)) == each(ENDS.values())


@pytest.mark.parametrize(
    "scan", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["scan", "unrolled"]
)
def test_fsdp_scatters_each_gradient_once_and_reduces_no_matrix(scan: bool) -> None:
    found = sent(FSDP, scan=scan)
    scattered = [c for c in found if c.operation == "reduce-scatter"]
    assert {(c.axes, is_backward(c)) for c in scattered} == {(("fsdp",), True)}
    layers = each(split(WEIGHTS, fsdp=8), CONFIG.layers)
    assert counted(scattered) == layers + each(split(ENDS, fsdp=8))
    assert {c.operation for c in found} == {"all-gather", "reduce-scatter", "all-reduce"}
    assert matrices(c for c in found if c.operation == "all-reduce") == []


@pytest.mark.parametrize("text", [FSDP, DP_FSDP_TP])
def test_gradients_of_norms_are_added_once_after_all_layers(text: str) -> None:
    reduced = [c for c in sent(text) if c.operation == "all-reduce" and is_backward(c)]
    norms = [c for c in reduced if c.shape in ((4, 64), (64,))]
    assert counted(norms) == {(4, 64): 2, (64,): 1}
    tokens_over = ("fsdp",) if text == FSDP else ("dp", "fsdp")
    assert {(c.axes, c.loops) for c in norms} == {(tokens_over, ())}


def test_the_bytes_of_fsdp_are_those_of_the_formula() -> None:
    found = sent(FSDP)
    layers = 4 * CONFIG.layers * sum(map(math.prod, WEIGHTS.values()))
    ends = 4 * sum(map(math.prod, ENDS.values()))
    norms = 4 * (2 * CONFIG.layers + 1) * CONFIG.embed
    all_gathered = [c for c in found if c.operation == "all-gather"]
    assert sum(c.bytes * c.times for c in all_gathered if not is_backward(c)) == layers + ends
    assert sum(c.bytes * c.times for c in all_gathered if is_backward(c)) == layers
    scattered = sum(c.bytes * c.times for c in found if c.operation == "reduce-scatter")
    assert scattered == layers + ends
    # besides: norms, and scalars for the loss, the count and the gradient's norm
    rest = sum(c.bytes * c.times for c in found if c.operation == "all-reduce")
    assert norms <= rest <= norms + 200


def test_full_remat_keeps_to_one_gather_each_way() -> None:
    """The forward again in the backward pass needs the weights that pass has anyway."""
    found = [c for c in sent(FSDP, remat="full") if c.operation == "all-gather" and in_layers(c)]
    layers = each(WEIGHTS.values(), CONFIG.layers)
    assert counted(c for c in found if not is_backward(c)) == layers
    assert counted(c for c in found if is_backward(c)) == layers


@pytest.mark.slow
def test_weights_over_fsdp_and_sp_are_all_gathered_over_both_at_once() -> None:
    found = sent("dp=1,fsdp=4,tp=1,sp=2")
    all_gathered = [c for c in found if c.operation == "all-gather" and c.axes == ("fsdp", "sp")]
    forward = [c for c in all_gathered if not is_backward(c)]
    assert counted(forward) == each(WEIGHTS.values(), CONFIG.layers) + each(ENDS.values())
    scattered = [c for c in found if c.operation == "reduce-scatter" and c.axes == ("fsdp", "sp")]
    layers = each(split(WEIGHTS, fsdp=8), CONFIG.layers)
    assert counted(scattered) == layers + each(split(ENDS, fsdp=8))
    assert matrices(c for c in found if c.operation == "all-reduce") == []
    # sp sends keys and values, of all positions, and scatters their gradients
    over_sp = [c for c in found if c.axes == ("sp",) and c.dtype == "f32" and in_layers(c)]
    keys = (2, 2, 2, 4, 8, 16)  # devices, keys and values, sequences, a device's length, heads
    all_gathered = [c for c in over_sp if c.operation == "all-gather"]
    assert counted(c for c in all_gathered if not is_backward(c)) == {keys: CONFIG.layers}
    scattered = counted(c for c in over_sp if c.operation == "reduce-scatter")
    assert scattered == {(1, *keys[1:]): CONFIG.layers}


# ---- dp beside it


def test_dp_adds_the_gradients_that_fsdp_has_already_scattered() -> None:
    found = sent(DP_FSDP_TP)
    over_dp = [c for c in found if "dp" in c.axes and c in matrices(found)]
    assert {(c.operation, c.axes, is_backward(c)) for c in over_dp} == {
        ("all-reduce", ("dp",), True)
    }
    layers = each(split(WEIGHTS, tp=2, fsdp=2), CONFIG.layers)
    assert counted(over_dp) == layers + each(split(ENDS, tp=2, fsdp=2))
    over_fsdp = [c for c in found if c.axes == ("fsdp",)]
    forward = [c for c in over_fsdp if c.operation == "all-gather" and not is_backward(c)]
    whole = each(split(WEIGHTS, tp=2), CONFIG.layers) + each(split(ENDS, tp=2))
    assert counted(forward) == whole
    scattered = [c for c in over_fsdp if c.operation == "reduce-scatter"]
    assert counted(scattered) == layers + each(split(ENDS, tp=2, fsdp=2))


@pytest.mark.slow
def test_plain_data_parallel_reduces_each_gradient_once_and_all_gathers_nothing() -> None:
    found = sent("dp=8,fsdp=1,tp=1,sp=1")
    assert {c.operation for c in found} == {"all-reduce"}
    whole = each(WEIGHTS.values(), CONFIG.layers) + each(ENDS.values())
    assert counted(matrices(found)) == whole


@pytest.mark.slow
def test_micro_batches_repeat_what_a_batch_sends_and_nothing_else() -> None:
    one, two = (matrices(sent(DP_FSDP_TP, micro_batches=n)) for n in (1, 2))
    ends = {(c.shape, c.operation) for c in one if not in_layers(c) and c.operation == "all-gather"}
    assert {shape for shape, _ in ends} == set(split(ENDS, tp=2))
    # embedding and LM head are the same for every micro-batch: all-gathered once
    repeated = [[c for c in found if (c.shape, c.operation) not in ends] for found in (one, two)]
    assert counted(repeated[1]) == counted([*repeated[0], *repeated[0]])
    assert {c.loops[0] for c in repeated[1]} == {2}


# ---- tp


def test_tp_has_two_all_reduces_of_a_layer_forward_and_two_backward() -> None:
    over_tp = [c for c in sent(DP_FSDP_TP) if "tp" in c.axes]
    assert {(c.operation, c.axes) for c in over_tp} == {("all-reduce", ("tp",))}
    tokens = (2, 8, 64)  # sequences over dp and fsdp
    for backward in (False, True):
        here = [c for c in over_tp if is_backward(c) == backward]
        of_layers = [c for c in here if in_layers(c)]
        assert counted(of_layers) == {tokens: 2 * CONFIG.layers}
        assert sorted(_block(c) for c in of_layers) == ["attention", "mlp"]
        # the embedding forward, the head backward
        assert counted(c for c in here if c.shape == tokens and not in_layers(c)) == {tokens: 1}
    # all else is as long as a chunk of tokens (the softmax over a split vocabulary) or a scalar
    assert all(math.prod(c.shape) <= 16 for c in over_tp if c.shape != tokens)


def _block(c: SentCollective) -> str:
    return "attention" if "/attention/" in c.scope else "mlp"


def test_tp_along_the_sequence_has_gather_and_scatter_pairs_instead() -> None:
    rules = decoder_rules(sequence_parallel=True)
    over_tp = [c for c in sent("dp=1,fsdp=4,tp=2,sp=1", rules=rules) if "tp" in c.axes]
    layer = [c for c in over_tp if in_layers(c)]
    assert {(c.operation, c.axes) for c in layer} == {
        ("all-gather", ("tp",)),
        ("reduce-scatter", ("tp",)),
    }
    whole, part, times = (2, 8, 64), (2, 4, 64), 2 * CONFIG.layers

    def found(operation: str, backward: bool) -> Counter[tuple[int, ...]]:
        return counted(c for c in layer if (c.operation, is_backward(c)) == (operation, backward))

    assert found("all-gather", False) == {whole: times}
    assert found("reduce-scatter", False) == {part: times}
    assert found("reduce-scatter", True) == {part: times}
    # all-gathering the gradient, and the input of each block again: kept in parts, as is the point
    assert found("all-gather", True) == {whole: 2 * times}
    assert matrices(c for c in over_tp if c.operation == "all-reduce") == []


# ---- memory


@pytest.mark.parametrize(
    "optimizer",
    [
        "adamw",
        pytest.param("lion", marks=pytest.mark.slow),
        pytest.param("adafactor", marks=pytest.mark.slow),
        "muon",
    ],
)
def test_no_whole_gradient_or_optimizer_array_exists_on_a_device(optimizer: str) -> None:
    _, program = compiled(Setting(FSDP, config=CONFIG, optimizer=optimizer), 1)
    layer = min(math.prod(shape) for shape in WEIGHTS.values())
    assert layer > max(map(math.prod, ENDS.values()))
    sizes = [
        (math.prod(shape), shape, len(one.loops), one.name, one.scope)
        for one in instructions(program.as_text())
        for _, shape in one.arrays
    ]
    # one weight of all layers: nowhere
    assert [x for x in sizes if x[0] >= CONFIG.layers * layer] == []
    # one weight of one layer: in the loops over layers, where it is all-gathered, and only there
    outside = [x for x in sizes if x[0] >= layer and x[2] == 0]
    if optimizer == "muon":  # and where it is made orthogonal, of which more below
        outside = [x for x in outside if "/newton_schulz/" not in x[4]]
    assert outside == []
    assert [x for x in sizes if x[0] >= layer and x[2] == 1]


# ---- muon: its matrices are whole while they are made orthogonal


MUON = [
    (FSDP, 4),  # one round, in which four devices have no layer
    pytest.param(FSDP, 9, marks=pytest.mark.slow),
    pytest.param(DP_FSDP_TP, 9, marks=pytest.mark.slow),
]


def muon(text: str, layers: int) -> tuple[Parts, str, int]:
    """Also the most layers a device takes."""
    config = dataclasses.replace(CONFIG, layers=layers)
    run, program = compiled(Setting(text, config=config, optimizer="muon"), 1)
    return run, program.as_text(), math.ceil(layers / (8 if text == FSDP else 4))


@pytest.mark.parametrize(("text", "layers"), MUON)
def test_muon_has_no_more_than_a_devices_own_layers_of_a_weight(text: str, layers: int) -> None:
    _, program, rounds = muon(text, layers)
    smallest, largest = (pick(map(math.prod, WEIGHTS.values())) for pick in (min, max))
    found = [
        (math.prod(shape), one)
        for one in instructions(program)
        if "/newton_schulz/" in one.scope or one.loops == (rounds,)
        for _, shape in one.arrays
    ]
    # a part of all layers, filled up to whole rounds, is as large as the layers it stands for
    assert rounds < layers
    assert max(size for size, _ in found) == rounds * largest
    # and the products are of one layer at a time
    steps = [one for size, one in found if size >= smallest and "dot_general" in one.scope]
    assert {shape for one in steps for _, shape in one.arrays} == {(64, 128), (64, 192)}
    assert {one.loops for one in steps} == {(rounds,) if rounds > 1 else ()}


@pytest.mark.parametrize(("text", "layers"), MUON)
def test_muon_exchanges_layers_once_each_way_and_sends_nothing_else(text: str, layers: int) -> None:
    run, program, rounds = muon(text, layers)
    found = [c for c in collectives(program, run.mesh) if "/optimizer/" in c.scope]
    axes = ("fsdp",) if text == FSDP else ("fsdp", "tp")
    assert {(c.operation, c.axes) for c in found} == {("all-to-all", axes)}
    assert sum(c.bytes * c.times for c in found) == 2 * rounds * 4 * sum(
        map(math.prod, WEIGHTS.values())
    )


def test_muon_changes_nothing_that_is_sent_before_it() -> None:
    run, program, _ = muon(FSDP, 4)
    others = [c for c in collectives(program, run.mesh) if "/optimizer/" not in c.scope]
    assert counted(others) == counted(sent(FSDP))


# ---- memory of the state


@pytest.mark.parametrize("text", [FSDP, DP_FSDP_TP])
def test_arguments_on_a_device_are_its_share_of_the_state(text: str) -> None:
    _, program = compiled(Setting(text, config=CONFIG), 1)
    ways = 8 if text == FSDP else 4  # dp keeps copies
    matrices = CONFIG.layers * sum(map(math.prod, WEIGHTS.values()))
    matrices += sum(map(math.prod, ENDS.values()))
    norms = (2 * CONFIG.layers + 1) * CONFIG.embed
    state = 3 * 4 * (matrices // ways + norms)  # float32 weights and two moments
    counters = 5 * 4  # steps, skipped twice, and optax's two
    batch = 4 * 4 * SEQUENCES * LENGTH // ways
    assert program.memory_analysis().argument_size_in_bytes == state + counters + batch


# ---- that it can fail


def automatic_step(mesh: jax.sharding.Mesh, layers: int) -> str:
    """FSDP as automatic partitioning makes it of a plain program."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        def loss(w: jax.Array) -> jax.Array:
            out, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)
            return jnp.mean(out**2)

        return w - jax.grad(loss)(w)

    w_sharding, x_sharding = (
        jax.NamedSharding(mesh, spec) for spec in (P(None, "fsdp", None), P("fsdp", None))
    )
    w = jax.ShapeDtypeStruct((layers, 64, 64), jnp.float32, sharding=w_sharding)
    x = jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=x_sharding)
    return jax.jit(step, out_shardings=w_sharding).lower(w, x).compile().as_text()


def test_what_is_asserted_above_fails_for_automatic_partitioning() -> None:
    mesh = mw.mesh("fsdp=8", devices=jax.devices()[:8])
    found = collectives(automatic_step(mesh, 3), mesh)
    reduced = [c for c in found if c.operation == "all-reduce" and math.prod(c.shape) >= 64 * 64]
    assert reduced  # whole gradients, twice the bytes of a scatter
    assert {c.axes for c in reduced} == {("fsdp",)}
    assert all(is_backward(c) for c in reduced)
    assert not [c for c in found if c.operation == "reduce-scatter"]
