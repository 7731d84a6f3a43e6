"""Toy train steps compiled on simulated devices, and what they send, by operation and axes."""

import dataclasses
import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from tests.planner.workloads import workload
from tests.training.toy import Setting, parts

from meshwright.audits import SentCollective, collectives
from meshwright.meshes import MeshSpec
from meshwright.models.decoder import DecoderConfig, decoder_rules
from meshwright.planner.workload import Choice, Workload

_LLAMA = DecoderConfig(vocab=96, layers=3, embed=64, heads=8, kv_heads=8, head_dim=16, mlp=192)
_LATENT = dataclasses.replace(_LLAMA, head_dim=24, rope_dim=8, value_dim=16, kv_rank=32, q_rank=48)
MODELS = {
    "llama": _LLAMA,
    "grouped": dataclasses.replace(_LLAMA, kv_heads=4),
    "qwen2.5": dataclasses.replace(_LLAMA, kv_heads=4, qkv_bias=True),
    "biases": dataclasses.replace(_LLAMA, qkv_bias=True, output_bias=True),
    "qwen3": dataclasses.replace(_LLAMA, kv_heads=4, qk_norm=True),
    "tied": dataclasses.replace(_LLAMA, tied_embeddings=True),
    "window": dataclasses.replace(_LLAMA, sliding_window=6),
    "norms after": dataclasses.replace(_LLAMA, norm_places="both", tied_embeddings=True),
    "experts": dataclasses.replace(_LLAMA, mlp=64, experts=8, experts_per_token=2),
    "shared": dataclasses.replace(
        _LLAMA, mlp=64, experts=16, experts_per_token=4, shared_mlp=128, kv_heads=4
    ),
    "latent": _LATENT,
    "latent keys": dataclasses.replace(_LATENT, q_rank=None),
    "deepseek": dataclasses.replace(
        _LATENT, mlp=32, leading=2, leading_mlp=192, experts=16, experts_per_token=4,
        shared_mlp=64, router_scores="sigmoid", selection_bias=True, expert_groups=4,
        expert_groups_per_token=2,
    ),
}  # fmt: skip
ROWS, SEQ, CHUNK = 8, 32, 24  # a micro-batch's; the chunk is that of tests/training/toy.py


@dataclasses.dataclass(frozen=True)
class Case:
    model: str
    mesh: str
    remat: str = "none"
    accumulation: int = 1
    sequence_parallel: bool = False
    context_parallel: str = "auto"
    mlp_chunk: int = 0
    optimizer: str = "adamw"
    layers: int = 3
    trainable: tuple[str, ...] = ()
    dpo: bool = False
    experts: str = "auto"
    seq: int = SEQ
    capacity: float = 0.0

    def __str__(self) -> str:
        said = [self.model, self.mesh]
        for field in dataclasses.fields(self)[2:]:
            value = getattr(self, field.name)
            if value != field.default:
                said.append(field.name if value is True else f"{field.name}={value}")
        return " ".join(said)

    @property
    def config(self) -> DecoderConfig:
        model = MODELS[self.model]
        leading = self.layers // 2 if model.leading else 0
        return dataclasses.replace(model, layers=self.layers, leading=leading)

    def workload(self, on: str) -> Workload:
        return workload(
            self.config, on, ROWS * self.accumulation, self.seq, dtype="float32",
            loss_chunk=CHUNK, optimizer=self.optimizer, trainable=self.trainable,
            objective="dpo" if self.dpo else "auto", experts=self.experts, capacity=self.capacity,
        )  # fmt: skip

    @property
    def choice(self) -> Choice:
        spec = MeshSpec.parse(self.mesh)
        return Choice.of(
            **dict(zip(spec.names, spec.sizes, strict=True)),
            remat=self.remat, accumulation=self.accumulation, sequence_parallel=self.sequence_parallel,
            context_parallel=self.context_parallel, mlp_chunk=self.mlp_chunk,
        )  # fmt: skip


def compiled(case: Case) -> tuple[Any, Mesh]:
    """The compiled step, and its mesh."""
    has_experts = "ep" in case.choice.sizes
    rules = decoder_rules(True, case.sequence_parallel, ep=has_experts)
    setting = Setting(
        case.choice.mesh, rules=rules, remat=case.remat, config=case.config,
        context_parallel=case.context_parallel, mlp_chunk=case.mlp_chunk, optimizer=case.optimizer,
        trainable=case.trainable, dpo=case.dpo, experts=case.experts, capacity=case.capacity,
    )  # fmt: skip
    run = parts(setting)
    shape = (case.accumulation, ROWS, case.seq)
    one = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=run.functions.batch_sharding)
    batch = dict.fromkeys(("tokens", "targets", "segments", "positions"), one)
    # XLA for CPU alone would drop the barriers that keep what is made again apart
    options = {"xla_disable_hlo_passes": "cse_barrier_expander"}
    options |= {"xla_backend_optimization_level": 0}  # what is sent does not depend on it
    program = run.functions.train.lower(run.target, batch).compile(compiler_options=options)
    return program, run.mesh


@functools.cache
def sent(case: Case) -> list[SentCollective]:
    """Every collective of the compiled step."""
    program, mesh = compiled(case)
    return collectives(program.as_text(), mesh)


def sums(case: Case) -> Counter[tuple[str, tuple[str, ...]]]:
    """Bytes by operation and axes."""
    total: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for one in sent(case):
        total[one.operation, one.axes] += one.bytes * one.times
    return total
