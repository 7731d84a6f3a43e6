"""From settings to everything a run needs, with every mistake found before anything is compiled."""

import contextlib
import dataclasses
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from meshwright.data import (
    WEIGHTS,
    EncoderDecoderObjective,
    Loader,
    Mixture,
    Tokenizer,
    check_data,
    held_out_loader,
    load_tokenizer,
    training_loader,
)
from meshwright.errors import MeshwrightError
from meshwright.layouts import Explanation, explain
from meshwright.models import SOURCE, SPECIAL_TOKENS, describe_padding, family_of, override
from meshwright.training.abstract_step import AbstractStep, abstract_step
from meshwright.training.config import DPO, TrainConfig
from meshwright.training.run.trackers import check_trackers
from meshwright.training.setup import mixture_of, objective_of, weights_folder
from meshwright.training.state import TrainState, stored_state


@dataclasses.dataclass(frozen=True)
class Setup:
    """A run, made ready: nothing is on a device yet."""

    step: AbstractStep
    model: Any  # with what `save_hf` needs
    stored: TrainState  # the step's state as a checkpoint holds it, without padding
    loader: Loader
    eval_loader: Loader | None
    explanation: Explanation
    padding: str | None  # what is padded in memory, in words
    weights: Path | None  # the folder of the weights that it starts from


def prepare(config: TrainConfig) -> Setup:
    """Read model, mesh, rules and data, and check them against each other."""
    check_trackers(config.log.tensorboard, config.log.wandb is not None)
    step = abstract_step(config)
    data = prepare_data(config, step.model)
    if data.loader.is_weighted:
        weights = step.batch["tokens"].update(dtype=jnp.float32)
        step = dataclasses.replace(step, batch=step.batch | {WEIGHTS: weights})
    return Setup(
        step,
        data.model,
        stored_state(step.arrays, step.state, step.optimizer),
        data.loader,
        data.eval_loader,
        explain(step.arrays, step.rules, step.mesh),
        describe_padding(step.model, step.rules, step.mesh.shape),
        weights_folder(config),
    )


class Data(NamedTuple):
    """What a run reads, checked against its model."""

    loader: Loader
    eval_loader: Loader | None
    model: Any  # its config, with what `save_hf` needs


def prepare_data(config: TrainConfig, model: Any) -> Data:
    """Open the data; raise if it, or the weights to start from, do not suit the model."""
    weights = weights_folder(config)
    if weights is not None:
        _check_weights(weights, config, model)
    mixture = mixture_of(config)
    tokenizer = None
    if weights is not None and (weights / "tokenizer.json").exists():
        tokenizer = load_tokenizer(str(weights))
    objective = objective_of(config, model, mixture.tokenizer)
    if objective is not None:
        check_objective(objective, mixture)
    packed = config.pack and (objective is None or not objective.of_examples)
    seq = config.seq if objective is None else objective.raw_length
    held_out = config.eval.sequences
    check_data(
        mixture,
        vocab=model.vocab,
        seq=seq,
        batch=config.batch,
        held_out=held_out,
        tokenizer=tokenizer,
        packed=packed,
        pairs=config.objective == DPO,
    )
    loader = training_loader(
        mixture,
        batch=config.batch,
        seq=seq,
        accumulation=config.accumulation,
        seed=config.seed,
        held_out=held_out,
        objective=objective,
        packed=packed,
    )
    eval_loader = None
    if held_out:
        micro_batch = config.batch // config.accumulation
        eval_loader = held_out_loader(
            mixture,
            batch=micro_batch,
            seq=seq,
            held_out=held_out,
            objective=objective,
            packed=packed,
        )
    fields = _hf_config(config, model, mixture.tokenizer)
    return Data(loader, eval_loader, dataclasses.replace(model, hf_config=fields))


def check_objective(
    objective: EncoderDecoderObjective, mixture: Mixture, evaluates: bool = False
) -> None:
    """Raise if a store holds texts where examples are needed, or the reverse.

    `evaluates`: the objective is the model's, and data alone can be another.
    """
    for store in mixture.stores:
        if evaluates and (store.weights is not None) != objective.of_examples:
            held, needed = "examples with a loss mask", "texts"
            if objective.of_examples:
                held, needed = "texts", "prompts with answers"
            raise MeshwrightError(
                f"data '{store.name}' holds {held}, and the model is evaluated on "
                f"{objective.name}; give {needed}"
            )
        if store.weights is not None and not objective.of_examples:
            raise MeshwrightError(
                f"data '{store.name}' holds examples with a loss mask, and {objective.name} makes "
                "its own targets from texts; give --objective examples, or pack texts"
            )
        if store.weights is None and objective.of_examples:
            raise MeshwrightError(
                f"objective 'examples' needs prompts with answers, and data '{store.name}' holds "
                "texts; pack records such as inputs/targets, or choose another --objective"
            )
        if store.is_weighted:
            raise MeshwrightError(
                f"data '{store.name}' has weights other than 0 and 1, which encoder-decoder models "
                "do not take; pack it without --weigh examples and --weight-field"
            )


def _check_weights(folder: Path, config: TrainConfig, model: Any) -> None:
    """Weights made for other settings (a rope, a norm) would fit and be wrong."""
    theirs = override(_read_config(folder, model), config.override, config.seq)
    differ = [
        field.name
        for field in dataclasses.fields(model)
        if field.compare
        and field.name != "max_seq"
        and getattr(model, field.name) != getattr(theirs, field.name)
    ]
    if differ:
        differences = ", ".join(
            f"{name} {getattr(theirs, name)} there, {getattr(model, name)} here" for name in differ
        )
        raise MeshwrightError(
            f"init_from {str(folder)!r} holds the weights of another model: {differences}; give "
            f"that folder as the model too: meshwright train {folder}"
        )


def _read_config(folder: Path, model: Any) -> Any:
    """The config of a folder, read as that of `model` was."""
    return family_of(model).hugging_face.read_config(folder)


def _hf_config(config: TrainConfig, model: Any, tokenizer: Tokenizer) -> dict[str, Any]:
    """What `save_hf` will need of the folder that the weights or the model came from.

    Special tokens and tokenizer files are kept if the data was packed with that tokenizer.
    """
    weights = weights_folder(config)
    source = model if weights is None else _read_config(weights, model)
    fields = dict(source.hf_config or {})
    folder = None if SOURCE not in fields else Path(fields[SOURCE])
    if folder is not None and (folder / "tokenizer.json").is_file():
        with contextlib.suppress(MeshwrightError):  # one that cannot be read is another one
            if load_tokenizer(folder).identity == tokenizer.identity:
                return fields
    elif weights is not None:
        return fields  # no tokenizer contradicts its special tokens
    kept = {name: fields[name] for name in fields if name not in (SOURCE, *SPECIAL_TOKENS)}
    return kept | {"eos_token_id": tokenizer.end_of_document}


def bytes_per_device(tree: Any) -> int:
    """Bytes of abstract arrays with shardings on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )
