"""Continue a run in PyTorch and back: a state as pieces under Hugging Face names.

    save_pieces("run/exchange", state, config)            # read by mw.torch.Checkpoints
    state, meta = load_pieces("run/exchange", 20, target, config)

Weights and AdamW's moments go with it. `step-…/params` is also a Hugging Face folder, of an adapter
one of PEFT. Moments that are kept in fewer bits than the weights go as numbers of the weights'
dtype, as PyTorch has them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from meshwright.checkpoint import (
    Command,
    Piece,
    Record,
    SavedArray,
    as_json,
    bits_of,
    fingerprint_of,
    folders,
    list_files,
    load_piece_tree,
    read_intact_step,
    sums_of_bits,
    write_pieces,
    write_record,
)
from meshwright.errors import MeshwrightError
from meshwright.models import (
    ADAPTER_WEIGHTS,
    LoraConfig,
    MappedFiles,
    read_folder,
    read_header,
    save_adapter,
    save_hf,
)
from meshwright.training.moments import pack, unpack
from meshwright.training.state import TrainState, saved_params

# folder of a tree, and what its arrays are called
_PARTS = {"params": "params", "exp_avg": "optimizer/exp_avg", "exp_avg_sq": "optimizer/exp_avg_sq"}


def save_pieces(
    folder: Any,
    state: TrainState,
    config: Any,
    meta: dict[str, Any] | None = None,
    lora: LoraConfig | None = None,
) -> int:
    """Write a state of AdamW where `mw.torch.Checkpoints(folder)` reads it; gives back its step.

    `lora`: the settings of the state's adapter, if it has one. Every process calls it; the first
    writes.
    """
    place = folders.checked_folder(folder)
    step = int(state.step)
    adam = _in_full(_adam_of(state.optimizer), saved_params(state.params))
    saving = folders.saving_folder(place, step)
    writes = jax.process_index() == 0
    if writes and step in folders.complete_steps(place):
        raise MeshwrightError(f"step {step} is already saved in {place}; delete it to replace it")
    begun = folders.Saving(place, step) if writes else None
    trees = {"params": saved_params(state.params), "exp_avg": adam.mu, "exp_avg_sq": adam.nu}
    adapter = lora if lora is not None and lora.rank else None
    for part, tree in trees.items():
        if adapter is None:
            save_hf(saving / part, tree, config)
        else:
            save_adapter(saving / part, tree, config, adapter)
    if begun is None:
        return step
    pieces: dict[str, list[Piece]] = {}
    arrays: dict[str, SavedArray] = {}
    for part, prefix in _PARTS.items():
        own = saving / part
        files = MappedFiles(read_header(own / ADAPTER_WEIGHTS) if adapter else read_folder(own))
        for name, tensor in files.tensors.items():
            value = files.array(name)
            start = (0,) * value.ndim
            printed = fingerprint_of([sums_of_bits(bits_of(value), start, value.shape)])
            file = f"{part}/{tensor.file.name}"
            pieces[f"{prefix}/{name}"] = [Piece(file, name, start, value.shape)]
            arrays[f"{prefix}/{name}"] = SavedArray(value.shape, str(value.dtype), printed)
        files.release()
    names = [name.removeprefix("params/") for name in arrays if name.startswith("params/")]
    numbers = {name: {"step": float(adam.count)} for name in names}
    optimizer = {"numbers": numbers, "groups": []}
    content = as_json({"user": meta or {}, "optimizer": optimizer, "mesh": ""})
    write_pieces(saving, pieces)
    write_record(saving, Record(step, arrays, content, list_files(saving)))
    begun.complete()
    return step


def load_pieces(
    folder: Any,
    step: int,
    target: TrainState,
    config: Any,
    command: Command | None = None,
    lora: LoraConfig | None = None,
) -> tuple[TrainState, dict[str, Any]]:
    """The state of a checkpoint of `mw.torch.Checkpoints` or `save_pieces`, and its meta.

    `target`: the abstract state (`abstract_state`), with AdamW; its arrays must not be padded.
    `command`: the shell command that uses a step, for messages. `lora`: the settings of the state's
    adapter, if it has one.
    """
    found = folders.checked_folder(folder)
    record = read_intact_step(found, step, command)

    dtype = jax.tree.leaves(target.params)[0].dtype

    def tree(prefix: str, targets: Any) -> Any:
        held = saved_params(targets)
        return {**targets, **load_piece_tree(found, record, config, prefix, held, dtype, lora)}

    adam = _adam_of(target.optimizer)
    numbers = record.meta["optimizer"]["numbers"].values()
    count = int(max((own["step"] for own in numbers), default=step))
    moments = {"mu": tree(_PARTS["exp_avg"], adam.mu), "nu": tree(_PARTS["exp_avg_sq"], adam.nu)}

    def scalar(leaf: Any, value: int) -> jax.Array:
        return jax.device_put(jnp.asarray(value, leaf.dtype), leaf.sharding)

    def filled(node: Any) -> Any:
        if isinstance(node, optax.ScaleByAdamState):
            full = optax.ScaleByAdamState(count=scalar(node.count, count), **moments)
            return _kept_like(full, node)
        if node.ndim:
            raise MeshwrightError(
                f"the optimizer has an array of shape {node.shape} beside AdamW's moments; only "
                "AdamW goes between JAX and PyTorch"
            )
        return scalar(node, count)

    state = TrainState(
        step=scalar(target.step, step),
        params=tree(_PARTS["params"], target.params),
        optimizer=jax.tree.map(filled, target.optimizer, is_leaf=_is_adam),
        skipped=scalar(target.skipped, step - count),
        skipped_in_a_row=scalar(target.skipped_in_a_row, 0),
    )
    return state, record.user_meta


def _adam_of(optimizer: Any) -> Any:
    """The state of Adam inside an optax state."""
    found = [node for node in jax.tree.leaves(optimizer, is_leaf=_is_adam) if _is_adam(node)]
    if len(found) != 1:
        raise MeshwrightError(
            "this state is not of AdamW, whose moments PyTorch has too; train with "
            "--optimizer.name adamw, or move the weights alone: save_hf"
        )
    return found[0]


def _in_full(adam: Any, params: Any) -> Any:
    """The state of Adam with the saved part of its moments, in the dtype of their parameters."""

    @jax.jit
    def full(adam: Any, params: Any) -> Any:
        adam = unpack(adam)
        mu, nu = (
            optax.tree.cast_like(saved_params(moment), params) for moment in (adam.mu, adam.nu)
        )
        return adam._replace(mu=mu, nu=nu)

    with jax.set_mesh(_mesh_of(adam)):
        return full(adam, params)


def _kept_like(full: Any, target: Any) -> Any:
    """The state of Adam with its moments as `target` keeps them."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, target)
    kept_as: Any = str(jax.tree.leaves(target.mu)[0].dtype)

    def packed(adam: Any) -> Any:
        mu, nu = optax.tree.cast((adam.mu, adam.nu), jnp.float32)
        return pack(adam._replace(mu=mu, nu=nu), kept_as)

    with jax.set_mesh(_mesh_of(target)):
        kept = jax.sharding.auto_axes(packed, out_sharding=shardings)
        return jax.jit(kept, out_shardings=shardings)(full)


def _mesh_of(adam: Any) -> Any:
    return jax.tree.leaves(adam)[0].sharding.mesh


def _is_adam(node: Any) -> bool:
    return isinstance(node, optax.ScaleByAdamState)
