"""The built-in models send what their layouts call for on every mesh, and nothing else."""

import dataclasses
import functools
from typing import Any

import jax
import pytest

import meshwright as mw
from meshwright.audits import Audit, audit
from meshwright.audits.step import expected_of_step
from meshwright.models.decoder import DecoderConfig
from meshwright.training.abstract_step import abstract_step
from meshwright.training.config import ComputeConfig, TrainConfig
from meshwright.training.optimizer import OptimizerConfig

LLAMA = DecoderConfig(vocab=128, layers=2, embed=64, heads=16, kv_heads=8, head_dim=8, mlp=128)
MODELS = {
    "llama": LLAMA,
    "qwen2.5": dataclasses.replace(LLAMA, qkv_bias=True),
    "qwen3": dataclasses.replace(LLAMA, qk_norm=True),
    "mistral": dataclasses.replace(LLAMA, sliding_window=6),
    "tied": dataclasses.replace(LLAMA, tied_embeddings=True),
    "experts": dataclasses.replace(LLAMA, mlp=64, experts=8, experts_per_token=2),
}
QUICKLY = {"xla_backend_optimization_level": 0}  # of the machine code: collectives are the same
SMALL = 1024  # bytes: less than any matrix or activation of a device here


@functools.cache
def found_in(name: str, mesh: str, options: str = "", rules: str = "standard") -> Audit:
    """An audit of the step; `options` as in "remat=full accumulation=2"."""
    said: dict[str, Any] = dict(word.split("=") for word in options.split())
    compute = ComputeConfig(
        remat=said.get("remat", "none"),
        layers="unroll" if said.get("scan") == "no" else "scan",
        sequence_parallel="sequence_parallel" in said,
        mlp_chunk=int(said.get("mlp_chunk", 0)),
        experts=said.get("experts", "auto"),
    )
    config = TrainConfig(
        "tiny", mesh=mesh, batch=16, seq=32, accumulation=int(said.get("accumulation", 1)), rules=rules,
        context_parallel=said.get("strategy", "auto"), compute=compute,
        objective=said.get("objective", "auto"),
        optimizer=OptimizerConfig(said.get("optimizer", "adamw")),
    )  # fmt: skip
    spec = mw.MeshSpec.parse(mesh).with_standard_axes()
    placed = mw.mesh(spec, devices=jax.devices()[:8], axis_types="explicit")
    step = abstract_step(config, placed, MODELS[name])
    compiled = step.lower().compile(compiler_options=QUICKLY)
    return audit(compiled, expected=expected_of_step(step), bookkeeping=SMALL)


FAST = [
    ("qwen3", "dp=2,fsdp=2,tp=2", ""),
    ("tied", "dp=2,fsdp=4", "accumulation=2"),
    ("experts", "fsdp=2,ep=4", "experts=ring"),
]
SLOW = [
    ("experts", "fsdp=2,ep=4", "experts=all-to-all remat=full"),
    ("experts", "dp=2,fsdp=2,tp=2", "sequence_parallel=yes"),
    ("experts", "dp=2,tp=2,ep=2", "experts=ring sequence_parallel=yes"),
    ("experts", "fsdp=2,sp=2,ep=2", "experts=all-to-all strategy=ring optimizer=muon"),
    ("llama", "fsdp=2,tp=2,sp=2", "objective=dpo strategy=ring"),
    ("tied", "dp=2,fsdp=2,tp=2", "objective=dpo remat=full accumulation=2"),
    ("llama", "dp=2,fsdp=2,tp=2", ""),
    ("llama", "fsdp=4,tp=2", "sequence_parallel=yes"),
    ("qwen2.5", "fsdp=8", "remat=full"),
    ("qwen3", "fsdp=2,tp=4", ""),
    ("mistral", "fsdp=4,tp=2", ""),
    ("llama", "fsdp=8", ""),
    ("llama", "dp=8", ""),
    ("llama", "tp=8", ""),
    ("llama", "fsdp=4,sp=2", "strategy=allgather"),
    ("llama", "fsdp=2,sp=4", "strategy=ulysses"),
    ("llama", "dp=2,tp=2,sp=2", "strategy=ring"),
    ("llama", "fsdp=4,tp=2", "scan=no"),
    ("llama", "fsdp=8", "optimizer=muon"),
    ("llama", "fsdp=4,tp=2", "optimizer=adafactor"),
    ("llama", "dp=2,fsdp=4", "optimizer=lion remat=elementwise"),
    ("llama", "fsdp=2,tp=4", "sequence_parallel=yes mlp_chunk=8"),
    ("qwen2.5", "fsdp=2,tp=2,sp=2", "strategy=ring remat=full"),
    ("qwen2.5", "dp=4,tp=2", "remat=mlp"),
    ("qwen3", "dp=2,fsdp=4", "accumulation=2"),
    ("qwen3", "fsdp=4,sp=2", "strategy=ring"),
    ("mistral", "fsdp=2,sp=4", "strategy=ring"),
    ("tied", "fsdp=4,tp=2", "sequence_parallel=yes"),
    ("tied", "fsdp=2,sp=4", "strategy=ring"),
]


@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_nothing_is_sent_that_the_layout_does_not_call_for(
    name: str, mesh: str, options: str
) -> None:
    found = found_in(name, mesh, options)
    assert not found.surprises, str(found)
    assert not any(row.unsure for row in found.rows)
    # most of what is sent is said in words, not called small
    named = sum(row.wire_bytes * row.times for row in found.rows if row.why != "bookkeeping")
    assert named > 0.95 * sum(row.wire_bytes * row.times for row in found.rows)


def test_rules_that_keep_weights_whole_are_found_out(tmp_path: Any) -> None:
    """Each device would have all weights and add up all gradients: twice the bytes."""
    rules = tmp_path / "bad.rules"
    rules.write_text(
        "batch? -> dp+fsdp\nvocab -> tp\nheads -> tp\nkv_heads -> tp\nmlp -> tp\nlength? -> sp\n"
        "embed -> none\nhead_dim -> none\nlayers -> none\nnorm -> none\n"
    )
    found = found_in("llama", "fsdp=4,tp=2", rules=str(rules))
    assert {(row.operation, row.axes) for row in found.surprises} == {("all-reduce", ("fsdp",))}
    wrong = found.surprises[0]
    assert "models/blocks.py:" in wrong.source
    assert wrong.why == "an all-reduce where a reduce-scatter over fsdp does: twice the bytes"
    assert [str(one) for one in found.missing] == [
        "all-gather over fsdp",
        "reduce-scatter over fsdp",
    ]
    place = wrong.source.rpartition("/models/")[2]
    assert f"at meshwright/models/{place} (" in str(found)  # not from the root of this machine
