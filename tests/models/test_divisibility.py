"""One check of sizes against a mesh, and proposals that pass it."""

import dataclasses
import math
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from meshwright import MeshwrightError
from meshwright.layouts import Rules
from meshwright.meshes import MeshSpec
from meshwright.models import decoder_rules, indivisible, preset, what_fits
from meshwright.training import TrainConfig, accepted_meshes, check_sizes, choose_rules
from meshwright.training.config import ComputeConfig

MODEL = preset("llama-3.1-8b")  # embed 4096, 32 heads, 8 kv_heads, mlp 14336
ONE = {"dp": 1, "fsdp": 1, "tp": 1, "sp": 1}


@pytest.mark.parametrize(
    ("mesh", "accumulation", "says"),
    [
        ({"tp": 8, "fsdp": 4}, 1, None),
        ({"tp": 16}, 1, "kv_heads=8 cannot be split in tp=16, but in 2, 4 or 8"),
        ({"fsdp": 48}, 1, "embed=4096 cannot be split in fsdp·sp=48, but in 32, 64 or 128"),
        ({"fsdp": 24, "sp": 2}, 1, "embed=4096 cannot be split in fsdp·sp=48"),
        ({"dp": 3}, 1, "batch=64 is not divisible by dp·fsdp=3"),
        ({"dp": 4}, 5, "batch=64 is not divisible by dp·fsdp·accumulation=20"),
        ({"dp": 128}, 1, "batch=64 is not divisible by dp·fsdp=128"),
        ({"sp": 16}, 1, "seq=1000 is not divisible by sp=16"),
    ],
)  # fmt: skip
def test_a_size_that_the_mesh_does_not_divide_is_named(
    mesh: dict[str, int], accumulation: int, says: str | None
) -> None:
    found = indivisible(MODEL, decoder_rules(sp=True), ONE | mesh, 64, 1000, accumulation)
    assert found == says


def test_sequence_parallelism_splits_the_length_between_blocks_over_tp_too() -> None:
    rules = decoder_rules(sp=True, sequence_parallel=True)
    shape = ONE | {"sp": 2, "tp": 8}
    assert indivisible(MODEL, rules, shape, 64, 1000) == ("seq=1000 is not divisible by sp·tp=16")
    assert indivisible(MODEL, rules, shape, 64, 1008) is None


def test_axes_are_those_of_the_rules_and_of_the_mesh() -> None:
    text = "batch? -> data; length? -> none; heads -> model; kv_heads -> model; mlp -> model"
    rules = Rules.parse(f"{text}; embed -> absent; head_dim -> none")
    assert indivisible(MODEL, rules, {"data": 2, "model": 16}, 64, 1000) == (
        "kv_heads=8 cannot be split in model=16, but in 2, 4 or 8"
    )
    assert indivisible(MODEL, rules, {"data": 2, "model": 8}, 64, 999) is None


@pytest.mark.parametrize(
    ("mesh", "accumulation", "says"),
    [
        ({"tp": 16}, 1, "mesh 'dp=1,fsdp=2,tp=8,sp=1' would fit"),
        ({"dp": 3}, 1, "batch=63 or 66 would fit"),
        ({"dp": 4}, 5, "batch=60 or 80 would fit"),
        ({"dp": 128}, 1, "batch=128 would fit"),
        ({"sp": 16}, 1, "seq=992 or 1008 would fit"),
        ({"fsdp": 97}, 1, "mesh 'dp=97,fsdp=1,tp=1,sp=1' with batch=194 would fit"),
    ],
)
def test_the_nearest_that_would_fit_is_proposed(
    mesh: dict[str, int], accumulation: int, says: str
) -> None:
    def refuses(mesh_shape: object, batch: int, seq: int) -> bool:
        found = indivisible(MODEL, rules, mesh_shape, batch, seq, accumulation)  # type: ignore[arg-type]
        return found is not None

    rules = decoder_rules(sp=True)
    assert what_fits(ONE | mesh, 64, 1000, refuses, accumulation) == says


def test_accumulations_that_divide_the_batch_are_proposed() -> None:
    def refused(config: TrainConfig) -> str:
        with pytest.raises(MeshwrightError) as error:
            check_sizes(config, TINY, choose_rules(config, TINY), ONE | {"fsdp": 4})
        return str(error.value).rpartition("; ")[2]

    config = TrainConfig("tiny", batch=16, seq=32, accumulation=3)
    assert refused(config) == "accumulation=1, 2 or 4 would fit, or batch=12 or 24"
    config = dataclasses.replace(config, accumulation=2**31 - 1)
    assert refused(config) == "accumulation=1, 2 or 4 would fit"


TINY = preset("tiny")
sizes = st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12])
configs = st.builds(
    lambda shape, **settings: TrainConfig(
        "tiny", mesh=",".join(f"{axis}={n}" for axis, n in zip(ONE, shape, strict=True)), **settings
    ),
    st.tuples(sizes, sizes, sizes, sizes).filter(lambda shape: math.prod(shape) <= 144),
    batch=st.integers(1, 100),
    seq=st.integers(1, 400),
    accumulation=st.sampled_from([1, 2, 3]),
    context_parallel=st.sampled_from(["auto", "ring", "ulysses"]),
    compute=st.builds(ComputeConfig, sequence_parallel=st.booleans()),
)
models = st.builds(
    lambda groups, kv_heads, **dims: dataclasses.replace(
        TINY, heads=groups * kv_heads, kv_heads=kv_heads, **dims
    ),
    groups=st.integers(1, 4),
    kv_heads=st.integers(1, 12),
    mlp=st.integers(1, 40).map(lambda n: 2 * n),
    embed=st.integers(1, 40).map(lambda n: 6 * n),
)


@given(config=configs, model=models)
def test_whatever_is_proposed_is_accepted_by_the_check_that_refused(
    config: TrainConfig, model: object
) -> None:
    rules = choose_rules(config, model)
    shape = dict(MeshSpec.parse(config.mesh).axes)
    try:
        check_sizes(config, model, rules, shape)
    except MeshwrightError as refused:
        proposal = str(refused).rpartition("; ")[2]
    else:
        return
    if proposal.startswith("no mesh"):
        return
    assert " would fit" in proposal
    if found := re.match(r"accumulation=(.*?) would fit(, or )?", proposal):
        for number in re.findall(r"\d+", found[1]):
            check_sizes(dataclasses.replace(config, accumulation=int(number)), model, rules, shape)
        proposal = proposal[found.end() :]
        if not proposal:
            return
    if found := re.search("mesh '(.*?)'", proposal):
        shape = dict(MeshSpec.parse(found[1]).axes)
        proposal = proposal.replace(found[0], "")
    changes = re.findall(r"(batch|seq)=(\d+(?: or \d+)*)", proposal)
    assert found or changes
    for name, numbers in changes:
        for number in numbers.split(" or "):
            config = dataclasses.replace(config, **{name: int(number)})
    check_sizes(config, model, rules, shape)


@given(config=configs, model=models, devices=st.integers(1, 64))
def test_a_mesh_proposed_for_the_devices_splits_the_model_too(
    config: TrainConfig, model: object, devices: int
) -> None:
    accepts = accepted_meshes(config, model)
    spec = MeshSpec.parse(config.mesh)
    assume(math.prod(spec.sizes) != devices)
    with pytest.raises(MeshwrightError, match=r"needs \d+ device") as refused:
        spec.resolve(devices, accepts=accepts)
    proposed = str(refused.value).partition("; ")[2]
    for text in re.findall("'(.*?)'", proposed):
        assert accepts(dict(MeshSpec.parse(text).resolve(devices).axes))
