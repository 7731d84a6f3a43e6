"""Twenty steps on any mesh are the twenty steps of one device: losses, norms and parameters.

In float32, 1e-5 relative. The toy has packed documents, two micro-batches, z-loss and rows whose
tokens count unequally, so every part of the step takes part.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from tests.training.toy import CONFIG, ONE, Setting, train

from meshwright.models.decoder import decoder_rules, t5x_rules

slow = pytest.mark.slow
ALL_AXES = dataclasses.replace(CONFIG, vocab=128, embed=128, mlp=256)
SEQUENCE_PARALLEL = decoder_rules(sp=True, sequence_parallel=True)


@functools.cache
def on_one_device(optimizer: str, config: Any, first_batch: int) -> tuple[np.ndarray, Any]:
    return train(Setting(ONE, optimizer, config=config, first_batch=first_batch))


def agrees(setting: Setting, within: float = 1e-5) -> None:
    expected, expected_params = on_one_device(
        setting.optimizer, setting.config, setting.first_batch
    )
    found, params = train(setting)
    assert expected[-1, 0] < 0.97 * expected[0, 0]  # it does learn
    np.testing.assert_allclose(found, expected, rtol=within)

    def distance(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.linalg.norm(a - b) / np.linalg.norm(b))

    distances = jax.tree.map(distance, params, expected_params)
    assert max(jax.tree.leaves(distances)) < within, distances


MESHES = [
    pytest.param(Setting("dp=8,fsdp=1,tp=1,sp=1", remat="full"), marks=slow),
    pytest.param(Setting("dp=1,fsdp=8,tp=1,sp=1", scan=False), marks=slow),
    pytest.param(Setting("dp=1,fsdp=1,tp=8,sp=1", remat="mlp"), marks=slow),
    pytest.param(Setting("dp=1,fsdp=1,tp=1,sp=8", remat="elementwise"), marks=slow),
    pytest.param(Setting("dp=2,fsdp=4,tp=1,sp=1", remat="full"), marks=slow),
    pytest.param(Setting("dp=4,fsdp=2,tp=1,sp=1", remat="full", scan=False), marks=slow),
    pytest.param(Setting("dp=2,fsdp=1,tp=4,sp=1", rules=SEQUENCE_PARALLEL), marks=slow),
    pytest.param(Setting("dp=1,fsdp=4,tp=2,sp=1"), marks=slow),
    pytest.param(Setting("dp=1,fsdp=2,tp=4,sp=1", remat="mlp", scan=False), marks=slow),
    pytest.param(Setting("dp=1,fsdp=2,tp=1,sp=4", remat="mlp"), marks=slow),
    pytest.param(Setting("dp=2,fsdp=1,tp=2,sp=2", remat="elementwise"), marks=slow),
    pytest.param(Setting("dp=2,fsdp=2,tp=1,sp=2", remat="full"), marks=slow),
    pytest.param(Setting("dp=2,fsdp=2,tp=2,sp=1", remat="elementwise", scan=False), marks=slow),
    pytest.param(Setting("dp=1,fsdp=1,tp=4,sp=2", rules=SEQUENCE_PARALLEL, remat="full"), marks=slow),
    Setting("dp=1,fsdp=2,tp=2,sp=2", rules=SEQUENCE_PARALLEL, remat="mlp"),
    pytest.param(Setting("dp=1,fsdp=2,tp=2,sp=2", scan=False), marks=slow),
]  # fmt: skip


@pytest.mark.parametrize(
    "setting", MESHES, ids=lambda s: f"{s.mesh} {s.remat} {'scan' if s.scan else 'unrolled'}"
)
def test_training_on_a_mesh_is_training_on_one_device(setting: Setting) -> None:
    agrees(setting)


@pytest.mark.parametrize(
    ("sequence", "mesh", "more"),
    [
        pytest.param("ring", "dp=1,fsdp=1,tp=1,sp=2", {"scan": False}, marks=slow),
        pytest.param("ring", "dp=2,fsdp=1,tp=1,sp=4", {}, marks=slow),
        pytest.param("ring", "dp=1,fsdp=2,tp=2,sp=2", {"remat": "mlp"}, marks=slow),
        pytest.param("ring", "dp=1,fsdp=2,tp=2,sp=2", {"rules": SEQUENCE_PARALLEL}, marks=slow),
        pytest.param(
            "ring",
            "dp=1,fsdp=2,tp=2,sp=2",
            {"rules": SEQUENCE_PARALLEL, "mlp_chunk": 2},
            marks=slow,
        ),
        pytest.param(
            "ring", "dp=1,fsdp=1,tp=1,sp=8", {"remat": "full", "mlp_chunk": 1}, marks=slow
        ),
        ("ring", "dp=2,fsdp=2,tp=1,sp=2", {"remat": "full", "mlp_chunk": 4}),
        pytest.param("allgather", "dp=1,fsdp=2,tp=1,sp=4", {"mlp_chunk": 2}, marks=slow),
        pytest.param("allgather", "dp=1,fsdp=1,tp=1,sp=8", {}, marks=slow),
        pytest.param("ulysses", "dp=1,fsdp=2,tp=2,sp=2", {"mlp_chunk": 4}, marks=slow),
        ("ulysses", "dp=1,fsdp=2,tp=1,sp=4", {"remat": "elementwise"}),
        pytest.param("ulysses", "dp=1,fsdp=1,tp=1,sp=8", {}, marks=slow),
    ],
)
def test_every_strategy_over_split_sequences_trains_the_same(
    sequence: str, mesh: str, more: dict[str, Any]
) -> None:
    agrees(Setting(mesh, context_parallel=sequence, **more))


@slow
@pytest.mark.parametrize("parameter_dims", [1, 2])
@pytest.mark.parametrize("activation_dims", [1, 2])
def test_t5xs_standard_rules_train_the_same(activation_dims: int, parameter_dims: int) -> None:
    rules = t5x_rules(activation_dims, parameter_dims)
    agrees(Setting("dp=2,fsdp=2,tp=2,sp=1", rules=rules))


@pytest.mark.parametrize(
    ("optimizer", "mesh"),
    [
        pytest.param("lion", "dp=2,fsdp=2,tp=2,sp=1"),
        pytest.param("lion", "dp=1,fsdp=4,tp=1,sp=2", marks=slow),
        pytest.param("adafactor", "dp=2,fsdp=2,tp=2,sp=1", marks=slow),
        pytest.param("adafactor", "dp=1,fsdp=8,tp=1,sp=1", marks=slow),
        pytest.param("adafactor", "dp=1,fsdp=2,tp=4,sp=1", marks=slow),
        pytest.param("muon", "dp=2,fsdp=2,tp=2,sp=1", marks=slow),
        pytest.param("muon", "dp=1,fsdp=8,tp=1,sp=1", marks=slow),
        pytest.param("muon", "dp=1,fsdp=4,tp=2,sp=1", marks=slow),
        pytest.param("muon", "dp=1,fsdp=2,tp=2,sp=2", marks=slow),
    ],
)
def test_every_optimizer_trains_the_same_on_a_mesh(optimizer: str, mesh: str) -> None:
    # adafactor factors the moments of matrices from 128 on
    config = ALL_AXES if optimizer == "adafactor" else CONFIG
    # lion takes the sign of a gradient, and so does adafactor in its first step of what it does not
    # factor. With the batches from 0 on the sign of one number, of wo or down, is rounding
    first_batch = 0 if optimizer == "muon" else 100
    agrees(Setting(mesh, optimizer, config=config, first_batch=first_batch))


@slow
@pytest.mark.parametrize("mesh", ["dp=1,fsdp=8,tp=1,sp=1", "dp=2,fsdp=2,tp=2,sp=1"])
def test_muon_trains_the_same_where_its_layers_do_not_divide(mesh: str) -> None:
    agrees(Setting(mesh, "muon", config=dataclasses.replace(CONFIG, layers=9)))


@slow
@pytest.mark.parametrize(
    "change", [{"tied_embeddings": True}, {"qk_norm": True}, {"sliding_window": 5}], ids=str
)
def test_other_models_train_the_same_on_a_mesh(change: dict[str, Any]) -> None:
    config = dataclasses.replace(CONFIG, **change)
    agrees(Setting("dp=1,fsdp=2,tp=2,sp=2", config=config))
