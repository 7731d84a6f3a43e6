"""Loss and perplexity of a model on all of a token store, by the trainer's own evaluation."""

import dataclasses
import math
from pathlib import Path
from typing import Any, Literal

import jax

from meshwright.data import Loader, Mixture, all_sequences_loader, open_or_pack
from meshwright.errors import MeshwrightError
from meshwright.hub import hub_name
from meshwright.layouts import fit, stored
from meshwright.models import family_of
from meshwright.serving import Source, generation_mesh
from meshwright.training import (
    DPO,
    ComputeConfig,
    TrainConfig,
    abstract_step,
    check_objective,
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

    `model` is the folder whose chat template a file of conversations is packed with. Texts are read
    in sequences of `seq` tokens. The targets are those of the objective that a run was trained on.
    """
    if hub_name(data) is not None:
        raise MeshwrightError(
            f"--data {data} is a dataset on the Hub; pack the split to evaluate on: meshwright "
            f"data pack {data} --split test --out test.store"
        )
    kept: Literal["float32", "bfloat16"] = "bfloat16" if dtype == "bfloat16" else "float32"
    compute = ComputeConfig(dtype=dtype, param_dtype=kept)
    template = Path(model) if model else None
    mixture = Mixture.parse(
        data, lambda path: open_or_pack(path, source.tokenizer, template=template)
    )
    config = TrainConfig(
        model,
        data=data,
        batch=batch,
        seq=seq,
        compute=compute,
        objective=_objective(source, mixture),
    )
    step = abstract_step(config, generation_mesh(mesh), source.config)
    if mixture.tokenizer.identity != source.tokenizer.identity:
        raise MeshwrightError(
            f"data {data!r} was packed with a tokenizer that is not the model's; pack it with "
            "that: meshwright data pack --tokenizer"
        )
    objective, length, packed = objective_of(config, step.model, mixture.tokenizer), seq, True
    if objective is not None:
        check_objective(objective, mixture, evaluates=True)
        length, packed = objective.raw_length, not objective.of_examples
    loader = all_sequences_loader(
        mixture, batch=batch, seq=length, objective=objective, packed=packed
    )
    on_disk = jax.tree.map(
        lambda target, spec: stored(target, spec.unpadded_shape), step.state.params, step.arrays
    )
    params = fit(source.read(on_disk), step.state.params)
    return _summed(params, loader, step)


def _objective(source: Source, mixture: Mixture) -> Any:
    """The run's; of a model that no run trained, `examples` where it has that and the data is some.

    That of preference pairs compares two models: the loss is then that of next tokens.
    """
    if pairs := [store.name for store in mixture.stores if store.holds_pairs]:
        raise MeshwrightError(
            f"data '{pairs[0]}' holds pairs of chosen and rejected answers, and eval measures the "
            "loss of single texts or examples; pack those, as with --format messages"
        )
    if source.objective not in ("auto", DPO):
        return source.objective
    has_examples = any(store.weights is not None for store in mixture.stores)
    known = family_of(source.config).objectives
    return "examples" if has_examples and "examples" in known else "auto"


def _summed(params: Any, loader: Loader, step: Any) -> StoreLoss:
    total, targets = 0.0, 0
    for _, batch in loader.iterate(0, step.functions.batch_sharding):
        found = jax.device_get(step.functions.evaluate(params, batch))["loss"]
        total, targets = total + found.sum.item(), targets + int(found.count.item())
    if not targets:
        raise MeshwrightError("the data has no target: every token is masked")
    return StoreLoss(total / targets, targets)
