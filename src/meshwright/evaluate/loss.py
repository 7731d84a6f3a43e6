"""Loss and perplexity of a model on all of a token store, by the trainer's own evaluation."""

import dataclasses
import math
from typing import Any, Literal

import jax

from meshwright.data import Loader, all_sequences_loader
from meshwright.errors import MeshwrightError
from meshwright.hub import hub_name
from meshwright.layouts import fit, stored
from meshwright.serving import Source, generation_mesh
from meshwright.training import (
    ComputeConfig,
    TrainConfig,
    abstract_step,
    mixture_of,
    objective_of,
)


@dataclasses.dataclass(frozen=True)
class StoreLoss:
    loss: float  # of a target, in nats
    targets: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    def data(self) -> dict[str, Any]:
        return {"loss": self.loss, "perplexity": self.perplexity, "targets": self.targets}


def store_loss(
    source: Source,
    data: str,
    *,
    model: str = "",
    batch: int = 8,
    seq: int = 512,
    mesh: str = "dp=1,fsdp=1,tp=1,sp=1",
    dtype: Literal["auto", "bfloat16", "float32"] = "auto",
) -> StoreLoss:
    """The mean loss of the targets of a token store, or of a file that is packed on first use.

    `model` is the folder whose tokenizer packs a file. Texts are read in sequences of `seq` tokens.
    """
    if hub_name(data) is not None:
        raise MeshwrightError(
            f"--data {data} is a dataset on the Hub; pack the split to evaluate on: meshwright "
            f"data pack {data} --split test --out test.store"
        )
    kept: Literal["float32", "bfloat16"] = "bfloat16" if dtype == "bfloat16" else "float32"
    compute = ComputeConfig(dtype=dtype, param_dtype=kept)
    config = TrainConfig(model, data=data, batch=batch, seq=seq, compute=compute)
    step = abstract_step(config, generation_mesh(mesh), source.config)
    mixture = mixture_of(config)
    if mixture.tokenizer.identity != source.tokenizer.identity:
        raise MeshwrightError(
            f"data {data!r} was packed with a tokenizer that is not the model's; pack it with "
            "that: meshwright data pack --tokenizer"
        )
    objective = objective_of(config, step.model, mixture.tokenizer)
    length = seq if objective is None else objective.raw_length
    loader = all_sequences_loader(mixture, batch=batch, seq=length, objective=objective)
    on_disk = jax.tree.map(
        lambda target, spec: stored(target, spec.unpadded_shape), step.state.params, step.arrays
    )
    params = fit(source.read(on_disk), step.state.params)
    return _summed(params, loader, step)


def _summed(params: Any, loader: Loader, step: Any) -> StoreLoss:
    total, targets = 0.0, 0
    for _, batch in loader.iterate(0, step.functions.batch_sharding):
        found = jax.device_get(step.functions.evaluate(params, batch))["loss"]
        total, targets = total + found.sum.item(), targets + int(found.count.item())
    if not targets:
        raise MeshwrightError("the data has no target: every token is masked")
    return StoreLoss(total / targets, targets)
