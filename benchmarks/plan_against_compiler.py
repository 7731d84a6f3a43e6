"""The plan against the real compilers, for TPUs and GPUs: memory, bytes of each collective, and on
TPUs which mesh is best.

    python benchmarks/plan_against_compiler.py             # compares with compiled.json
    python benchmarks/plan_against_compiler.py --compile   # compiles what is not there yet
    python benchmarks/plan_against_compiler.py --write     # and puts tables into RESULTS.md

Needs libtpu (`pip install -e '.[tpu]'`) or the CUDA plugin (`.[cuda]`) to compile, no
TPU and no GPU; cases whose compiler is not installed are left out. A case takes a minute or two on
a core for TPUs, a quarter of a minute for GPUs, and is written into benchmarks/compiled.json as
soon as it is done: what the compiler said, so that tests can hold the plan to it without compiling
again.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from results import origins, write_section

RECORD = Path(__file__).with_name("compiled.json")
GIB = 2**30


def case(
    model: str, on: str, mesh: str, batch: int, seq: int, remat: str = "full", **more: Any
) -> dict[str, Any]:
    return {
        "model": model,
        "on": on,
        "mesh": mesh,
        "batch": batch,
        "seq": seq,
        "remat": remat,
        **more,
    }


# compiled as they are, and with weights all-gathered while layers compute (--compute.overlap on)
BOTH_WAYS = [
    case("llama-3.2-3b", "v6e:4x4", "dp=1,fsdp=16,tp=1,sp=1", 32, 4096, "mlp"),
    case("llama-3.1-8b", "v5p:4x4x4", "dp=1,fsdp=64,tp=1,sp=1", 64, 4096),
    case("llama-3.1-8b", "v5p:4x4x4", "dp=1,fsdp=32,tp=1,sp=2", 32, 32768, context_parallel="ring"),
    case("llama-3.1-8b", "v5p:2x2x4", "dp=1,fsdp=16,tp=1,sp=1", 32, 4096, "none"),
    case("llama-3.1-8b", "v5p:4x4x4", "dp=1,fsdp=16,tp=4,sp=1", 128, 4096, "elementwise"),
    case("llama-3.1-8b", "v4:4x4x4", "dp=1,fsdp=16,tp=4,sp=1", 64, 4096),
    case("llama-3.1-8b", "v4:4x4x4", "dp=4,fsdp=16,tp=1,sp=1", 64, 4096),
    case("llama-3.1-8b", "v6e:16x16", "dp=1,fsdp=64,tp=4,sp=1", 256, 4096),
    case("qwen2.5-7b", "v6e:8x8", "dp=2,fsdp=32,tp=1,sp=1", 128, 4096, accumulation=2),
    case("llama-2-13b", "v4:4x4x8", "dp=1,fsdp=32,tp=4,sp=1", 64, 4096, "mlp"),
    case("qwen3-14b", "v6e:8x8", "dp=1,fsdp=64,tp=1,sp=1", 64, 8192),
    case("llama-2-70b", "v5p:8x8x8", "dp=1,fsdp=512,tp=1,sp=1", 512, 4096),
    case("llama-3.1-70b", "v5p:4x8x8", "dp=1,fsdp=32,tp=8,sp=1", 128, 4096, sequence_parallel=True),
    case("llama-3.1-8b", "v5p:4x4x4", "dp=1,fsdp=64,tp=1,sp=1", 128, 4096, accumulation=2),
    case("llama-3.2-1b", "v5p:2x2x2", "dp=1,fsdp=8,tp=1,sp=1", 16, 2048, "none"),
    case("llama-3.2-3b", "v6e:4x4", "dp=1,fsdp=16,tp=1,sp=1", 64, 4096, "mlp", accumulation=2),
]  # fmt: skip
# compiled with it too, up to the assignment of buffers
OVERLAPPED = [
    case("llama-3.1-8b", "v5p:4x4x4", "dp=2,fsdp=32,tp=1,sp=1", 128, 4096, "none"),
    case("llama-3.2-3b", "v6e:4x4", "dp=2,fsdp=8,tp=1,sp=1", 32, 4096, "none"),
    case("llama-2-13b", "v4:4x4x4", "dp=2,fsdp=32,tp=1,sp=1", 64, 4096, "elementwise"),
    case("llama-3.1-8b", "2*v6e:4x4", "dp=2,fsdp=8,tp=2,sp=1", 32, 4096),
]
CASES = [
    case("llama-3.2-1b", "v5e:4x4", "dp=1,fsdp=16,tp=1,sp=1", 32, 2048, "none"),
    case("llama-3.2-1b", "v5e:4x4", "dp=1,fsdp=8,tp=2,sp=1", 32, 4096, "mlp"),
    case("llama-3.1-8b", "v6e:16x16", "dp=1,fsdp=256,tp=1,sp=1", 256, 8192),
    case("llama-3.1-8b", "v5e:16x16", "dp=1,fsdp=64,tp=4,sp=1", 128, 4096),
    case("llama-3.1-8b", "v5e:4x4", "dp=1,fsdp=16,tp=1,sp=1", 16, 4096, "none"),
    case("llama-3.1-8b", "v5e:4x4", "dp=1,fsdp=16,tp=1,sp=1", 32, 4096, "mlp"),
    case("llama-3.2-3b", "v5e:4x4", "dp=1,fsdp=16,tp=1,sp=1", 48, 4096, "mlp"),
    case("llama-3.2-1b", "v5e:4x4", "dp=1,fsdp=8,tp=2,sp=1", 64, 2048, "mlp", accumulation=2),
    case("llama-3.1-70b", "v6e:16x16", "dp=1,fsdp=64,tp=4,sp=1", 128, 8192),
    case("llama-3.1-70b", "v4:8x8x8", "dp=1,fsdp=128,tp=4,sp=1", 256, 4096),
    case("llama-3.1-70b", "v5e:16x16", "dp=1,fsdp=256,tp=1,sp=1", 256, 8192),
    *BOTH_WAYS,
    *(one | {"overlap": True} for one in BOTH_WAYS),
    *(one | {"overlap": True} for one in OVERLAPPED),
    # over two slices and over four
    case("llama-3.2-1b", "2*v5e:8x8", "dp=8,fsdp=16,tp=1,sp=1", 128, 2048, "none"),
    case("llama-3.2-1b", "2*v5e:8x8", "dp=2,fsdp=64,tp=1,sp=1", 128, 2048, "none"),
    case("llama-3.2-1b", "2*v5e:4x4", "dp=1,fsdp=32,tp=1,sp=1", 64, 2048, "none"),
    case("llama-3.1-8b", "2*v6e:4x4", "dp=2,fsdp=8,tp=2,sp=1", 32, 4096),
    case("llama-3.2-3b", "4*v5p:2x2x4", "dp=8,fsdp=8,tp=1,sp=1", 64, 4096, "none"),
    case("llama-3.2-1b", "7x:2x2x1", "dp=1,fsdp=8,tp=1,sp=1", 16, 2048),
    # long sequences, split over sp
    case("llama-3.1-8b", "v5e:16x16", "dp=1,fsdp=8,tp=1,sp=32", 8, 131072),
    case("llama-3.1-8b", "v5e:16x16", "dp=1,fsdp=16,tp=1,sp=16", 16, 65536),
    case("qwen3-8b", "v5e:16x16", "dp=1,fsdp=32,tp=1,sp=8", 32, 32768, context_parallel="ring"),
    case("llama-3.1-8b", "v6e:16x16", "dp=1,fsdp=8,tp=1,sp=32", 8, 131072),
    case("llama-3.2-3b", "v6e:8x8", "dp=1,fsdp=4,tp=1,sp=16", 8, 131072),
    case("llama-3.1-8b", "v5p:4x4x4", "dp=1,fsdp=8,tp=1,sp=8", 8, 32768, context_parallel="ring"),
    # a ring in each micro-batch
    case(
        "llama-3.2-1b", "v5e:4x4", "dp=1,fsdp=4,tp=1,sp=4", 16, 16384, accumulation=2,
        context_parallel="ring",
    ),
    case(
        "qwen3-1.7b", "v6e:4x4", "dp=1,fsdp=2,tp=1,sp=8", 8, 32768, accumulation=2,
        context_parallel="ring",
    ),
    # held out, and refused by the plan of that day: it fits, as weights are all-gathered once more
    case("llama-3.1-8b", "v5e:4x4", "dp=1,fsdp=16,tp=1,sp=1", 64, 4096),
    # a length that the fused kernel pads
    case("llama-3.2-1b", "v5e:4x4", "dp=1,fsdp=16,tp=1,sp=1", 16, 4000),
]  # fmt: skip

GPU_CASES = [
    case("llama-3.2-1b", "h100:1x1", "dp=1,fsdp=1,tp=1,sp=1", 8, 4096, "none"),
    case("llama-3.2-1b", "a100-80:1x8", "dp=8,fsdp=1,tp=1,sp=1", 32, 4096, "mlp"),
    case("llama-3.2-3b", "a100-40:1x4", "dp=1,fsdp=4,tp=1,sp=1", 8, 4096),
    case("llama-3.1-8b", "h100:1x8", "dp=1,fsdp=8,tp=1,sp=1", 8, 4096, "none"),
    case("llama-3.1-8b", "h100:1x8", "dp=1,fsdp=8,tp=1,sp=1", 32, 8192),
    case("llama-3.1-8b", "h100:1x8", "dp=1,fsdp=4,tp=2,sp=1", 16, 4096, "mlp"),
    case("llama-3.1-8b", "h200:2x8", "dp=2,fsdp=8,tp=1,sp=1", 32, 4096, "elementwise"),
    case("llama-3.1-8b", "b200:1x8", "dp=1,fsdp=8,tp=1,sp=1", 64, 4096, accumulation=4),
    case("llama-3.1-8b", "h100:4x8", "dp=1,fsdp=8,tp=1,sp=4", 8, 65536),
    case("llama-2-13b", "a100-40:2x8", "dp=1,fsdp=16,tp=1,sp=1", 16, 4096),
    case("qwen3-14b", "a100-80:4x8", "dp=1,fsdp=32,tp=1,sp=1", 64, 4096),
    case("llama-3.1-70b", "h100:16x8", "dp=1,fsdp=128,tp=1,sp=1", 128, 4096),
    case("llama-3.1-70b", "a100-80:16x8", "dp=1,fsdp=128,tp=1,sp=1", 128, 4096),
    case("llama-3.1-70b", "h100:16x8", "dp=2,fsdp=64,tp=1,sp=1", 256, 4096, accumulation=2),
    case("llama-3.1-70b", "h200:8x8", "dp=1,fsdp=16,tp=4,sp=1", 64, 8192),
    case("llama-3.1-70b", "h100:8x8", "dp=1,fsdp=16,tp=1,sp=4", 64, 16384),
    case("llama-3.1-405b", "h100:64x8", "dp=1,fsdp=512,tp=1,sp=1", 512, 4096),
    case("llama-3.1-405b", "a100-40:128x8", "dp=1,fsdp=1024,tp=1,sp=1", 1024, 3584),
    case("llama-3.1-405b", "h200:32x8", "dp=1,fsdp=64,tp=4,sp=1", 64, 8192),
    case("llama-3.1-405b", "b200:16x8", "dp=1,fsdp=128,tp=1,sp=1", 256, 4096),
    case("llama-3.1-405b", "a100-40:64x8", "dp=1,fsdp=512,tp=1,sp=1", 512, 4096),
    # micro-batches: the first three showed what the compiler sends once, the others were held out
    case("llama-3.2-1b", "h100:1x8", "dp=1,fsdp=8,tp=1,sp=1", 32, 2048, accumulation=4),
    case("llama-3.2-1b", "h100:2x8", "dp=2,fsdp=8,tp=1,sp=1", 64, 2048, accumulation=2),
    case("llama-3.2-1b", "h100:1x8", "dp=8,fsdp=1,tp=1,sp=1", 32, 2048, "mlp", accumulation=4),
    case("llama-3.1-8b", "h100:1x8", "dp=1,fsdp=4,tp=2,sp=1", 16, 4096, accumulation=4),
    case("qwen3-1.7b", "h100:1x8", "dp=2,fsdp=2,tp=2,sp=1", 32, 2048, "mlp", accumulation=2),
    case("qwen2.5-7b", "h100:2x8", "dp=2,fsdp=4,tp=2,sp=1", 64, 4096, "mlp", accumulation=2),
    case("llama-3.2-3b", "a100-80:2x8", "dp=4,fsdp=4,tp=1,sp=1", 64, 4096, accumulation=4),
    case("llama-3.2-1b", "h200:2x8", "dp=1,fsdp=4,tp=1,sp=4", 32, 8192, accumulation=4),
    case("qwen3-8b", "b200:1x8", "dp=1,fsdp=8,tp=1,sp=1", 64, 4096, "elementwise", accumulation=8),
    # an encoder and a decoder; their matmuls compile without Triton alone
    case("t5-v1.1-large", "h100:1x8", "dp=1,fsdp=8,tp=1,sp=1", 64, 512, "none"),
    case("t5-v1.1-xl", "a100-80:1x8", "dp=1,fsdp=8,tp=1,sp=1", 64, 512),
    case("t5-v1.1-large", "h100:1x8", "dp=2,fsdp=2,tp=2,sp=1", 64, 512, "mlp", accumulation=2),
    # the first showed that the decoder's loop ends while the encoder's begins; others were held out
    case("ul2", "h100:2x8", "dp=1,fsdp=16,tp=1,sp=1", 64, 512),
    case("flan-t5-xxl", "h100:1x8", "dp=1,fsdp=8,tp=1,sp=1", 64, 512, "mlp"),
    case("t5-11b", "a100-80:2x8", "dp=2,fsdp=8,tp=1,sp=1", 64, 512),
    # matmuls in fp8
    case("llama-3.2-1b", "h100:1x1", "dp=1,fsdp=1,tp=1,sp=1", 8, 4096, "mlp", matmul="fp8"),
    case("llama-3.1-8b", "h100:1x8", "dp=1,fsdp=8,tp=1,sp=1", 16, 4096, matmul="fp8"),
    case("llama-3.1-8b", "h200:1x8", "dp=1,fsdp=4,tp=2,sp=1", 16, 4096, "mlp", matmul="fp8"),
    case("llama-3.1-70b", "h100:8x8", "dp=1,fsdp=64,tp=1,sp=1", 64, 4096, matmul="fp8"),
    case("qwen3-8b", "b200:1x8", "dp=1,fsdp=8,tp=1,sp=1", 32, 4096, "none", matmul="fp8"),
    # a ring in each micro-batch
    case(
        "llama-3.2-1b", "h100:1x8", "dp=1,fsdp=2,tp=1,sp=4", 16, 16384, accumulation=2,
        context_parallel="ring",
    ),
    case(
        "llama-3.1-8b", "h100:4x8", "dp=1,fsdp=8,tp=1,sp=4", 32, 32768, accumulation=2,
        context_parallel="ring",
    ),
]  # fmt: skip

# inputs of layers in the host's memory
OFFLOAD_CASES = [
    case("llama-3.2-3b", "v5p:2x2x2", "dp=1,fsdp=8,tp=1,sp=1", 32, 8192, "offload"),
    case("llama-3.1-8b", "v6e:4x4", "dp=1,fsdp=16,tp=1,sp=1", 64, 8192, "offload"),
    case("qwen3-14b", "v5e:8x8", "dp=1,fsdp=64,tp=1,sp=1", 128, 4096, "offload"),
    case("llama-3.1-70b", "v6e:8x8", "dp=1,fsdp=64,tp=1,sp=1", 64, 8192, "offload"),
    case("llama-3.1-405b", "2*v6e:16x16", "dp=1,fsdp=512,tp=1,sp=1", 512, 8192, "offload"),
    case(
        "llama-3.1-405b", "2*v6e:16x16", "dp=1,fsdp=512,tp=1,sp=1", 512, 8192, "offload",
        overlap=True,
    ),
]  # fmt: skip

# LoRA of rank 16 beside frozen weights in 8 and 4 bits
LORA_CASES = [
    case("llama-3.1-70b", "h200:1x1", "dp=1,fsdp=1,tp=1,sp=1", 1, 2048, lora="nf4"),
    case("llama-3.1-70b", "h200:1x1", "dp=1,fsdp=1,tp=1,sp=1", 1, 2048, lora="int8"),
    case("llama-3.1-70b", "h100:1x1", "dp=1,fsdp=1,tp=1,sp=1", 1, 2048, lora="nf4"),
    case("llama-3.1-70b", "h100:1x8", "dp=1,fsdp=8,tp=1,sp=1", 8, 2048, lora="nf4"),
    case("llama-3.1-70b", "h100:1x4", "dp=1,fsdp=2,tp=2,sp=1", 4, 2048, "mlp", lora="int8"),
    case("llama-3.1-8b", "h100:1x1", "dp=1,fsdp=1,tp=1,sp=1", 4, 2048, "none", lora="int8"),
    case("llama-3.1-8b", "h100:1x1", "dp=1,fsdp=1,tp=1,sp=1", 4, 2048, "none", lora="nf4"),
]  # fmt: skip

# mixtures of experts; on Hopper GPUs with the kernel for their matmuls, which needs jax 0.11
EXPERT_CASES = [
    case("qwen3-30b-a3b", "v5p:4x4x4", "dp=1,fsdp=64,tp=1,sp=1", 64, 4096),
    case("mixtral-8x7b", "v6e:8x8", "dp=1,fsdp=64,tp=1,sp=1", 64, 4096),
    case("deepseek-v3", "v5p:8x8x8", "dp=1,fsdp=64,ep=8,tp=1,sp=1", 512, 4096),
    case("deepseek-v3", "h100:32x8", "dp=1,fsdp=32,ep=8,tp=1,sp=1", 256, 4096),
    case("mixtral-8x7b", "h100:4x8", "dp=1,fsdp=32,tp=1,sp=1", 32, 4096),
    case("qwen3-30b-a3b", "h100:1x8", "dp=1,fsdp=8,tp=1,sp=1", 8, 4096),
    case("qwen3-30b-a3b", "v6e:8x8", "dp=1,fsdp=8,ep=8,tp=1,sp=1", 64, 4096),
    case("qwen3-30b-a3b", "h100:2x8", "dp=1,fsdp=2,ep=8,tp=1,sp=1", 32, 4096),
    case("mixtral-8x7b", "h100:4x8", "dp=1,fsdp=8,ep=4,tp=1,sp=1", 32, 4096),
    case("mixtral-8x7b", "v5p:4x4x4", "dp=1,fsdp=16,ep=4,tp=1,sp=1", 64, 4096),
    case("qwen3-30b-a3b", "h100:4x8", "dp=1,fsdp=32,tp=1,sp=1", 64, 4096, "mlp"),
    # layers of two kinds in turn, matrices of 2,880
    case("gpt-oss-20b", "h100:1x8", "dp=1,fsdp=8,tp=1,sp=1", 16, 4096),
    # by Triton
    case("qwen3-30b-a3b", "a100-80:1x8", "dp=1,fsdp=8,tp=1,sp=1", 8, 4096),
    # tokens exchanged by all-to-all
    case("qwen3-30b-a3b", "h100:2x8", "dp=1,fsdp=1,ep=16,tp=1,sp=1", 32, 4096),
    case("qwen3-30b-a3b", "h100:4x8", "dp=1,fsdp=2,ep=16,tp=1,sp=1", 64, 4096),
]  # fmt: skip

# model, machine, sequences, tokens: the plan's choice is compiled, and the best of other kinds
SCENARIOS = [
    ("llama-3.2-1b", "v5e:4x4", 64, 2048),
    ("llama-3.2-1b", "v5e:4x4", 16, 8192),
    ("llama-3.2-3b", "v6e:4x4", 32, 4096),
    ("llama-3.1-8b", "v5p:2x2x4", 32, 4096),
    ("llama-3.1-8b", "v5p:4x4x4", 128, 4096),
    ("llama-3.1-8b", "v5p:4x4x4", 16, 32768),
    ("llama-3.1-8b", "v6e:8x8", 128, 4096),
    ("llama-3.1-8b", "v4:4x4x4", 64, 8192),
    ("qwen3-8b", "v5e:8x8", 64, 4096),
    ("llama-2-13b", "v4:4x4x4", 64, 4096),
    ("llama-3.1-70b", "v5p:4x4x8", 128, 4096),
]


def alternatives(model: str, on: str, batch: int, seq: int, most: int = 2) -> list[dict[str, Any]]:
    """The plan's choice first; then the best mesh of each other kind: which axes it uses."""
    import meshwright as mw

    found = mw.plan(model, on, batch=batch, seq=seq, overlap="off")  # as they were compiled
    kinds: dict[tuple[bool, ...], Any] = {}
    for one in found.ranked:
        wide = tuple(size > 1 for size in one.choice.sizes.values())
        kinds.setdefault(wide, one.choice)
    chosen = list(kinds.values())[: most + 1]
    return [
        case(
            model, on, choice.mesh, batch, seq, choice.remat,
            accumulation=choice.accumulation, sequence_parallel=choice.sequence_parallel,
            mlp_chunk=choice.mlp_chunk,
        )
        for choice in chosen
    ]  # fmt: skip


USUAL = {
    "accumulation": 1, "sequence_parallel": False, "mlp_chunk": 0, "context_parallel": "auto",
    "overlap": False, "matmul": "auto",
}  # fmt: skip


def key(one: dict[str, Any]) -> str:
    """What makes a case another one; what is as usual is not said."""
    return json.dumps({k: v for k, v in one.items() if USUAL.get(k) != v}, sort_keys=True)


def config_of(one: dict[str, Any]) -> Any:
    from meshwright.models import LoraConfig
    from meshwright.training.config import ComputeConfig, TrainConfig

    return TrainConfig(
        one["model"], mesh=one["mesh"], batch=one["batch"], seq=one["seq"],
        accumulation=one.get("accumulation", 1),
        context_parallel=one.get("context_parallel", "auto"),
        lora=LoraConfig(16, base=one["lora"]) if "lora" in one else LoraConfig(),
        override=(f"rope.theta={one['rope_theta']}",) if "rope_theta" in one else (),
        compute=ComputeConfig(
            remat=one["remat"], sequence_parallel=one.get("sequence_parallel", False),
            mlp_chunk=one.get("mlp_chunk", 0), overlap="on" if one.get("overlap") else "off",
            matmul=one.get("matmul", "auto"),
        ),
    )  # fmt: skip


def workload_of(one: dict[str, Any]) -> Any:
    from meshwright.machines import Machine
    from meshwright.planner import Workload

    config, machine = config_of(one), Machine.parse(one["on"])
    return Workload.of(config, machine)


def recorded(one: dict[str, Any], proof: Any) -> dict[str, Any]:
    """What the compiler said of a case."""
    from compiled_roofline import roofline
    from meshwright.audits import audit
    from meshwright.planner import StepModel
    from meshwright.proofs.compare import expected

    said: dict[str, Any] = {
        "case": one, "compiler": proof.compiler, "machine": proof.compiled_on, "date": proof.date,
        "times": dict(proof.times),
    }  # fmt: skip
    if proof.footprint is None:
        lacks = proof.out_of_memory
        return said | {"needed": lacks.needed, "limit": lacks.limit, "early": lacks.early}
    step = StepModel(workload_of(one))
    found = audit(proof.text, step.choice.sizes, expected=expected(step))
    sums = [
        {"operation": s.operation, "axes": list(s.axes), "bytes": s.bytes} for s in found.by_axis()
    ]
    if proof.machine.is_tpu:
        taken = roofline(proof.text, step.choice.sizes, step)
        said["seconds"] = {"as compiled": taken.seconds, "overlapped": taken.overlapped}
    return said | {
        "total": proof.footprint.total,
        "limit": proof.footprint.limit,
        "kinds": dict(proof.footprint.kinds),
        "sums": sums,
        "surprises": [
            f"{row.operation} over {'+'.join(row.axes)}: {row.source.partition('src/')[2]}"
            for row in found.surprises
        ],
        "rewritten": len(found.rewritten),
        # by the compiler's own rematerialization, where memory is nearly full
        "gathered_again": bool(re.search(r"%all-gather[\w.]*\.remat", proof.text)),
        "asynchronous": asynchronous(found.rows),
    }


def asynchronous(rows: Any) -> float:
    """Of the bytes all-gathered inside of loops, the share that is sent during compute."""
    gathers = [row for row in rows if row.operation == "all-gather" and row.times > 1]
    sizes = {told: sum(row.bytes * row.times for row in gathers if row.asynchronous is told)
             for told in (False, True)}  # fmt: skip
    return sizes[True] / max(sum(sizes.values()), 1)


def read_record() -> dict[str, dict[str, Any]]:
    found = json.loads(RECORD.read_text()) if RECORD.exists() else []
    return {key(one["case"]): one for one in found}


def add_to_record(entry: dict[str, Any]) -> None:
    record = read_record() | {key(entry["case"]): entry}
    lines = ",\n".join(json.dumps(record[name], sort_keys=True) for name in sorted(record))
    RECORD.write_text(f"[\n{lines}\n]\n")


def of_platform(record: dict[str, dict[str, Any]], platform: str) -> dict[str, dict[str, Any]]:
    """The part of a record that is of tpu or gpu."""
    from meshwright.machines import Machine

    return {
        name: entry
        for name, entry in record.items()
        if Machine.parse(entry["case"]["on"]).chip.platform == platform
    }


def compile_missing(cases: list[dict[str, Any]]) -> None:
    from meshwright.errors import MeshwrightError
    from meshwright.machines import Machine
    from meshwright.proofs import prove
    from meshwright.proofs.target import check_extra

    for one in cases:
        if key(one) in read_record():
            continue
        try:
            check_extra(Machine.parse(one["on"]))
            check_kernel(one)
        except MeshwrightError as missing:
            print(f"left out {words(one)}: {missing}", flush=True)
            continue
        print(f"compiling {words(one)}", flush=True)
        proof = prove(config_of(one), one["on"])
        add_to_record(recorded(one, proof))


def check_kernel(one: dict[str, Any]) -> None:
    """Raise where XLA would multiply every token with every expert, which no run should do."""
    import jax

    from meshwright.errors import MeshwrightError
    from meshwright.machines import Machine
    from meshwright.ops.mosaic import OLDEST

    of_gpus = one in EXPERT_CASES and Machine.parse(one["on"]).chip.platform == "gpu"
    if of_gpus and jax.__version_info__ < OLDEST:
        raise MeshwrightError(
            f"the kernel of experts needs jax {'.'.join(map(str, OLDEST))} or newer, on Python 3.12"
        )


def extras(one: dict[str, Any], mesh: str) -> list[str]:
    """Mesh, remat and whatever is not as usual."""
    more = [
        name if one[name] is True else f"{name} {one[name]}"
        for name in ("accumulation", "sequence_parallel", "context_parallel", "overlap", "matmul")
        if name in one and one[name] != USUAL[name]
    ]
    lora = [f"LoRA beside {one['lora']}"] if "lora" in one else []
    return [mesh, one["remat"], *more, *lora]


def words(one: dict[str, Any]) -> str:
    split = [part for part in one["mesh"].split(",") if not part.endswith("=1")]
    wide = ",".join(split) or "one device"
    said = f"{one['model']} {one['batch']}×{one['seq']} on {one['on']}"
    return ", ".join([said, *extras(one, wide)])


def memory_table(record: dict[str, dict[str, Any]]) -> tuple[list[str], list[float], int, int]:
    """Lines, how far each is off, how many verdicts are right, and of how many."""
    from meshwright.planner import StepModel, memory

    lines = [
        "| case | plan | compiler | off | fits, by plan and compiler |",
        "|---|---|---|---|---|",
    ]
    off, right, verdicts = [], 0, 0
    for entry in record.values():
        one = entry["case"]
        need = memory(StepModel(workload_of(one)))
        fits = "total" in entry and entry["total"] <= entry["limit"]
        verdicts += 1
        right += need.fits == fits
        verdict = f"{'yes' if need.fits else 'no'}, {'yes' if fits else 'no'}"
        compiled = entry.get("total", entry.get("needed"))
        off.append(need.total / compiled - 1)
        said = f"{compiled / GIB:.2f} GiB | {100 * off[-1]:+.1f}%"
        lines.append(f"| {words(one)} | {need.total / GIB:.2f} GiB | {said} | {verdict} |")
    return lines, off, right, verdicts


def traffic_table(record: dict[str, dict[str, Any]]) -> tuple[list[str], list[float]]:
    """Every kind of collective of at least a thousandth of all bytes, and how far each is off."""
    from meshwright.planner import StepModel, staged

    lines = ["| case | collective | plan | compiler | off |", "|---|---|---|---|---|"]
    off = []
    for entry in record.values():
        if "sums" not in entry:
            continue
        one = entry["case"]
        planned: dict[tuple[str, tuple[str, ...]], int] = {}
        for sent in staged(StepModel(workload_of(one))):
            place = sent.operation, sent.axes
            planned[place] = planned.get(place, 0) + sent.bytes * sent.times
        compiled = {(s["operation"], tuple(s["axes"])): s["bytes"] for s in entry["sums"]}
        for place in sorted({*planned, *compiled}, key=lambda p: -compiled.get(p, 0)):
            there, here_ = planned.get(place, 0), compiled.get(place, 0)
            if max(there, here_) < sum(compiled.values()) / 1000:
                continue
            off.append(there / here_ - 1 if here_ else float("inf"))
            lines.append(
                f"| {words(one)} | {place[0]} over {'+'.join(place[1])} | "
                f"{there / 2**20:,.1f} MiB | {here_ / 2**20:,.1f} MiB | {100 * off[-1]:+.2f}% |"
            )
    return lines, off


def choice_table(record: dict[str, dict[str, Any]]) -> tuple[list[str], list[float]]:
    """Of each scenario the plan's choice, and whatever else of it is recorded."""
    import meshwright as mw

    lines = [
        "| scenario | mesh | plan | roofline of the compiled program | of the best |",
        "|---|---|---|---|---|",
    ]
    worst = []
    for scenario in SCENARIOS:
        model, on, batch, seq = scenario
        chosen = key(alternatives(*scenario)[0])
        others = [
            name
            for name, entry in record.items()
            if tuple(entry["case"][part] for part in ("model", "on", "batch", "seq")) == scenario
            and "seconds" in entry
            and not entry["case"].get("overlap")
            and name != chosen
        ]
        if "seconds" not in record.get(chosen, {}) or not others:
            continue
        seconds = {
            name: record[name]["seconds"]["as compiled"] for name in (chosen, *sorted(others))
        }
        best = min(seconds.values())
        worst.append(seconds[chosen] / best)
        found = mw.plan(model, on, batch=batch, seq=seq, overlap="off")
        planned = {one.choice.mesh: one.step_seconds for one in found.ranked}
        for name, taken in seconds.items():
            one = record[name]["case"]
            said = f"{model} {batch}×{seq} on {on}" if name == chosen else ""
            by_plan = f"{planned[one['mesh']]:.3f} s" if name == chosen else ""
            lines.append(
                f"| {said} | {', '.join(extras(one, one['mesh']))} | {by_plan} | {taken:.3f} s | "
                f"{taken / best:.3f} |"
            )
    return lines, worst


def overlap_table(record: dict[str, dict[str, Any]]) -> list[str]:
    """Of steps compiled both ways: with overlap over without."""
    lines = ["| step | roofline | memory | asynchronous |", "|---|---|---|---|"]
    for one in BOTH_WAYS:
        plain, told = (record.get(key(one | {"overlap": told})) for told in (False, True))
        if plain is not None and told is not None:
            seconds = told["seconds"]["as compiled"] / plain["seconds"]["as compiled"]
            memory = told["total"] / plain["total"]
            share = f"{100 * told['asynchronous']:.0f}%"
            lines.append(f"| {words(one)} | {seconds:.3f} | {memory:.3f} | {share} |")
    return lines


def times_of_roofline(record: dict[str, dict[str, Any]]) -> tuple[float, float]:
    """The plan's seconds over the roofline's: the least and the most of all programs."""
    from meshwright.planner import StepModel
    from meshwright.planner.time import step_time

    ratios = [
        step_time(StepModel(workload_of(entry["case"]))).step / entry["seconds"]["as compiled"]
        for entry in record.values()
        if "seconds" in entry
    ]
    return min(ratios), max(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.compile:
        compile_missing([*CASES, *OFFLOAD_CASES, *GPU_CASES, *LORA_CASES, *EXPERT_CASES])
        for scenario in SCENARIOS:
            compile_missing(alternatives(*scenario))
    record = of_platform(read_record(), "tpu")
    for platform in ("tpu", "gpu"):
        memory_and_traffic(of_platform(read_record(), platform), platform.upper(), options.write)
    start = introduction(record)
    said = (
        f"{start} The roofline of the compiled program and its memory with `--compute.overlap on`, "
        "each over that without; and of the bytes all-gathered in loops the share that is "
        "asynchronous."
    )
    if mixed := [entry for entry in record.values() if {"without", "seconds"} <= entry.keys()]:
        said += f" {len(mixed)} have the memory of a later program than the roofline."
    _out("All-gathers while layers compute, on TPUs", said, overlap_table(record), options.write)
    lines, worst = choice_table(record)
    least, most = times_of_roofline(record)
    if worst:
        said = (
            f"{start} The plan's choice stands first in each scenario; it takes {max(worst):.3f} "
            "of the time of the best of its alternatives at most. Of all programs recorded the "
            f"plan's time is {least:.2f} to {most:.2f} of the roofline's."
        )
        _out("The chosen mesh among others", said, lines, options.write)


def introduction(record: dict[str, dict[str, Any]]) -> str:
    """The command, and by what the programs of a record were compiled, where and when."""
    command = "`python benchmarks/plan_against_compiler.py --compile --write`"
    return f"{command}; compiled by {origins(record.values())}."


def memory_and_traffic(record: dict[str, dict[str, Any]], kind: str, write: bool) -> None:
    """The tables that there are of TPUs and of GPUs."""
    start = introduction(record)
    lines, off, right, verdicts = memory_table(record)
    codeless = sum("without" in entry for entry in record.values())
    short = f"; {codeless} were compiled no further, and lack the program's own size"
    most, mean = 100 * max(map(abs, off)), 100 * sum(map(abs, off)) / len(off)
    said = (
        f"{start} The compiler's figure is its buffer assignment, or what it said it needs"
        f"{short if codeless else ''}. Off by {most:.1f}% at most, {mean:.1f}% on average; {right} "
        f"of {verdicts} verdicts right."
    )
    _out(f"Memory planned and compiled for {kind}s", said, lines, write)
    lines, off = traffic_table(record)
    exact = sum(abs(one) <= 0.01 for one in off)
    surprises, rewritten = (
        sum(count(entry.get(name, ())) for entry in record.values())
        for name, count in (("surprises", len), ("rewritten", lambda n: n or 0))
    )
    said = (
        f"{start} Sums of a step on a device, of every kind that is a thousandth of them: {exact} "
        f"of {len(off)} within 1%; {surprises} surprises, {rewritten} rows that the compiler made "
        "of something else (an all-reduce of a reduce-scatter, say). The others follow: most are "
        "reduce-scatters that it pads, and hops of their edges."
    )
    different = [line for line, one in zip(lines[2:], off, strict=True) if abs(one) > 0.01]
    _out(f"Bytes planned and compiled for {kind}s", said, [*lines[:2], *different], write)


def _out(title: str, said: str, lines: list[str], write: bool) -> None:
    print("\n".join([title, said, *lines, ""]))
    if write:
        write_section(title, said, lines)


if __name__ == "__main__":
    main()
