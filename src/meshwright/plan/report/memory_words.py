"""Each kind of memory put in terms of weights or tokens: so many here, so many bytes for each.

The bytes for each are the kind's total divided, not the formula of plan/memory.py: they say what
the total amounts to, and cannot show that it is right.
"""

from meshwright.plan.report.words import amount
from meshwright.plan.result import Choice, Job

OF_WEIGHTS = ("parameters", "optimizer", "gradients", "weights in bfloat16", "weights in float32")
OF_LAYERS_AND_TOKENS = ("saved activations",)
OF_TOKENS = ("working activations", "attention", "batch")


def that_is(kind: str, number: int, job: Job, choice: Choice) -> str:
    """`"8.03B weights / 64 devices × 4 bytes"`; empty for kinds that are no such product."""
    model = job.model
    if kind in OF_WEIGHTS:
        embedding = 0 if model.tied_embeddings else model.vocab * model.embed
        weights = model.matmul_params + embedding
        split = choice.fsdp * choice.tp * choice.sp
        return f"{amount(weights)} weights / {split:,} devices × {_bytes(number * split / weights)}"
    if kind == "gathered weights":
        weights = (model.matmul_params - model.embed * model.vocab) // model.layers
        each = _bytes(number * choice.tp / weights)
        return f"{amount(weights)} weights of a layer / tp {choice.tp} × {each}"
    if kind == "key-value cache":
        tokens = job.batch * job.seq // choice.dp
        return f"{tokens:,} tokens × {_bytes(number / tokens)}"
    if job.kind == "serve":
        return ""
    tokens = job.batch * job.seq // (choice.dp * choice.fsdp * choice.sp)
    if kind != "batch":
        tokens //= choice.accumulation
    if kind in OF_LAYERS_AND_TOKENS:
        each = _bytes(number / (model.layers * tokens))
        return f"{model.layers} layers × {tokens:,} tokens × {each}"
    return f"{tokens:,} tokens × {_bytes(number / tokens)}" if kind in OF_TOKENS else ""


def _bytes(number: float) -> str:
    return f"{number:,.0f} bytes" if number >= 99.5 else f"{number:.3g} bytes"
