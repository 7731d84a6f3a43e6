"""A small model, packed batches and one way to run them, for the tests of training."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import meshwright as mw
from meshwright.layouts import select_trainable
from meshwright.models import Compute, LossConfig, padded_vocab
from meshwright.models.decoder import DecoderConfig, abstract_arrays, decoder_rules
from meshwright.training.dpo import DpoConfig, copied_arrays
from meshwright.training.optimizer import OptimizerConfig, make_optimizer
from meshwright.training.state import TrainState, abstract_state, new_state
from meshwright.training.step import StepFunctions, step_functions

ONE = "dp=1,fsdp=1,tp=1,sp=1"
# no biases: the gradient of a key bias is zero but for rounding, which Adam would blow up
CONFIG = DecoderConfig(vocab=64, layers=2, embed=64, heads=16, kv_heads=8, head_dim=8, mlp=128)
MICRO_BATCHES, SEQUENCES, LENGTH = 2, 8, 16


@dataclasses.dataclass(frozen=True)
class Setting:
    """All that says how a run is computed; everything but `mesh` has a default."""

    mesh: str = ONE
    optimizer: str = "adamw"
    rules: mw.Rules = dataclasses.field(default_factory=lambda: decoder_rules(sp=True), repr=False)
    remat: str = "none"
    scan: bool = True
    dtype: Any = jnp.float32
    params_dtype: Any = jnp.float32
    config: DecoderConfig = dataclasses.field(default=CONFIG, repr=False)
    steps: int = 20
    z_loss: float = 1e-3
    context_parallel: str = "auto"
    mlp_chunk: int = 0
    matmul: str = "auto"
    fp8_skips: int = 0
    experts: str = "auto"
    capacity: float = 0.0
    balance_bias: float = 0.0
    moments: str = "auto"
    first_batch: int = 0  # of the batches there are
    trainable: tuple[str, ...] = ()
    dpo: bool = False


@dataclasses.dataclass(frozen=True)
class Parts:
    mesh: jax.sharding.Mesh
    functions: StepFunctions
    target: TrainState
    arrays: Any
    optimizer: Any
    config: DecoderConfig
    params_dtype: Any

    def new_state(self) -> TrainState:
        """With initial values made once for all tests: tests/layouts/test_initial.py shows they are
        the same bits on every mesh, and they take longer to compile than twenty steps to run."""
        kept = jax.tree.map(lambda leaf: leaf.sharding, self.target.params)
        made = first_params(self.config, self.params_dtype)
        params = jax.device_put(jax.tree.map(_padded, made, self.target.params), kept)
        return new_state(self.arrays, self.target, self.optimizer, self.mesh, params=params)

    def put(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        return jax.device_put(batch, self.functions.batch_sharding)


def _padded(array: np.ndarray, target: Any) -> np.ndarray:
    missing = [(0, size - have) for size, have in zip(target.shape, array.shape, strict=True)]
    return np.pad(array, missing)


def parts(setting: Setting, optimizer: Any = None, clip_norm: float | None = 1.0) -> Parts:
    count = math.prod(mw.MeshSpec.parse(setting.mesh).sizes)
    mesh = mw.mesh(setting.mesh, devices=jax.devices()[:count], axis_types="explicit")
    vocab = padded_vocab(setting.config, setting.rules, mesh.shape)
    arrays = abstract_arrays(setting.config, setting.params_dtype, vocab)
    arrays = select_trainable(arrays, setting.trainable)
    # Adam's first steps are as large as the learning rate whatever the gradient: at 1e-3 twenty of
    # them move weights of 0.02 by their own size, so errors show, and do not yet feed on themselves.
    # Lion takes signs: one that rounding turns moves its weight by twice the rate, so, as is usual,
    # it gets a tenth, at which none turns here. Adafactor's is relative to the weights.
    learning_rate = {"lion": 1e-4, "adafactor": 2e-2}.get(setting.optimizer, 1e-3)
    config = OptimizerConfig(
        setting.optimizer, learning_rate=learning_rate, warmup_steps=5, moments=setting.moments
    )
    made, rate = make_optimizer(config, setting.steps, arrays)
    optimizer = made if optimizer is None else optimizer
    compute = Compute(
        setting.rules, setting.dtype, setting.remat, setting.scan, context_parallel=setting.context_parallel,
        mlp_chunk=setting.mlp_chunk, matmul=setting.matmul, fp8_skips=setting.fp8_skips,
        experts=setting.experts, capacity=setting.capacity,
    )  # fmt: skip
    # a chunk that does not divide the tokens
    loss = LossConfig(setting.z_loss, chunk=24, balance_bias=setting.balance_bias)
    functions = step_functions(
        setting.config, compute, optimizer, rate, mesh, loss=loss, clip_norm=clip_norm,
        arrays=arrays, dpo=DpoConfig() if setting.dpo else None,
    )  # fmt: skip
    reference = copied_arrays(arrays, setting.dtype) if setting.dpo else None
    target = abstract_state(arrays, setting.rules, optimizer, mesh, reference)
    kinds = setting.config, setting.params_dtype
    return Parts(mesh, functions, target, arrays, optimizer, *kinds)


@functools.cache
def first_params(config: DecoderConfig, dtype: Any) -> Any:
    arrays = abstract_arrays(config, dtype)
    mesh = mw.mesh(ONE, devices=jax.devices()[:1])
    made = mw.create(arrays, mw.shardings(arrays, decoder_rules(), mesh=mesh))
    return jax.tree.map(np.asarray, made)


def packed_batch(seed: int, vocab: int = CONFIG.vocab) -> dict[str, np.ndarray]:
    """Sequences of several documents and padding, each an arithmetic sequence: something to learn.

    Sequences have from 1 to 15 tokens that count, so no two devices weigh the same.
    """
    rng = np.random.default_rng(seed)
    shape = (MICRO_BATCHES, SEQUENCES, LENGTH)
    tokens, segments, positions = (np.zeros(shape, np.int32) for _ in range(3))
    targets = np.full(shape, -1, np.int32)
    for sequence in np.ndindex(shape[:2]):
        place, number = 0, 0
        until = LENGTH if sequence[1] % 3 else int(rng.integers(2, LENGTH))
        while place < until:
            number += 1
            length = min(int(rng.integers(2, 12)), until - place)
            start, stride = rng.integers(0, vocab), rng.integers(1, 4)
            document = (start + stride * np.arange(length)) % vocab
            here = (*sequence, slice(place, place + length))
            tokens[here], segments[here], positions[here] = document, number, np.arange(length)
            targets[(*sequence, slice(place, place + length - 1))] = document[1:]
            place += length
    return {"tokens": tokens, "targets": targets, "segments": segments, "positions": positions}


def train(setting: Setting, optimizer: Any = None) -> tuple[np.ndarray, Any]:
    """Loss and gradient norm of each step, and the parameters at the end."""
    run = parts(setting, optimizer)
    state = run.new_state()
    reports = []
    for step in range(setting.steps):
        state, report = run.functions.train(
            state, run.put(packed_batch(setting.first_batch + step, setting.config.vocab))
        )
        reports.append((report["loss"], report["gradient_norm"]))
    for found, described in zip(jax.tree.leaves(state), jax.tree.leaves(run.target), strict=True):
        assert found.sharding == described.sharding
        assert found.dtype == described.dtype
    return np.array(reports, "f8"), jax.tree.map(np.asarray, state.params)
