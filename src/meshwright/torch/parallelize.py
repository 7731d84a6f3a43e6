"""`parallelize(model, mesh, rules)`: tensor parallelism, then fully_shard, both from one layout."""

import collections
import dataclasses
import functools
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.meshes import MeshSpec
from meshwright.torch.checks import (
    check_model,
    check_sequence,
    explain_mixed_tensors,
    refuse_generate,
    refuse_training,
)
from meshwright.torch.dry_run import SplitActivations
from meshwright.torch.loss import causal_lm_loss
from meshwright.torch.mesh import mesh as make_mesh
from meshwright.torch.placement import Placements, Slices, place, tied
from meshwright.torch.random_state import share_random_state
from meshwright.torch.styles import blocks_of, styles, use_local_parameters

_PARALLELIZED = "_meshwright"
_DTYPES = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclasses.dataclass(frozen=True)
class Parallelized:
    """How a model was split, and over which ranks."""

    placements: Placements
    mesh: DeviceMesh
    sequence_parallel: bool
    loss_parallel: bool
    split: SplitActivations

    @property
    def device(self) -> torch.device:
        return _device(self.mesh)

    @functools.cached_property
    def position(self) -> dict[str, int]:
        """Where this rank is on each axis."""
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None, "a rank outside of the mesh"
        return dict(zip(self.placements.spec.names, coordinate, strict=True))

    def slices(self, name: str) -> Slices:
        """This rank's part of a parameter."""
        return self.placements.by_name[name].slices(self.placements.spec.shape, self.position)


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh | MeshSpec | str,
    rules: Any = None,
    *,
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
    mixed_precision: str | torch.dtype | None = None,
    reshard_after_forward: bool | int | None = None,
    activation_checkpointing: bool = False,
    compile: bool = False,
    example: Any = None,
) -> nn.Module:
    """Split a model over a mesh, in place, and give it back.

        model = mw.torch.parallelize(model, mw.torch.mesh("dp=-1,tp=3"), mixed_precision="bf16")

    Arguments:
        rules: `mw.PathRules` over parameter names, or `mw.Rules` over dims (vocab, heads, kv_heads,
            mlp, embed, norm). By default vocabulary, heads and mlp go over tp (or what the model's
            own tp plan says), and fully_shard splits dim 0 over the data axis.
        sequence_parallel: split activations between blocks along the sequence, over tp.
        loss_parallel: keep logits split over the vocabulary; `model(…, labels=…)` then computes the
            loss from the parts.
        mixed_precision: the dtype of compute and of all-gathered weights, "bf16"; weights,
            optimizer and gradient sums stay in float32.
        reshard_after_forward: free all-gathered weights after the forward pass (default: all but
            the root's).
        activation_checkpointing: recompute each block in the backward pass.
        compile: torch.compile each block.
        example: the input of a forward pass (a tensor, a tuple of arguments, or a dict), small,
            for a dry run on the CPU that finds which activations may stay split over tp. A Hugging
            Face model that takes tokens needs none. Without it, activations are all-gathered after
            every column-parallel layer.

    Give the model in the mode that it will run in: after `model.train()` if it is to be trained.
    A model on the meta device gets its weights with `mw.torch.load_hf` or `mw.torch.initialize`.
    """
    device_mesh = mesh if isinstance(mesh, DeviceMesh) else make_mesh(mesh)
    placements = place(model, device_mesh, rules)
    check_model(model, placements)
    plan, split = styles(model, placements, sequence_parallel, loss_parallel, example)
    is_told = rules is not None or split.not_in_training
    if split.note is not None and is_told and dist.get_rank() == 0:
        warnings.warn(split.note, stacklevel=2)
    axes = placements.axes
    policy = _policy(mixed_precision)
    on_meta = any(param.is_meta for param in model.parameters())
    if not on_meta:
        _check_same_weights(model)
        model.to(_device(device_mesh))
    shared = tied(dict(model.named_parameters(remove_duplicate=False)))
    if axes.tensor is not None and axes.tp > 1:
        parallelize_module(model, device_mesh[axes.tensor], plan, src_data_rank=None)
        tie(model, shared)
        use_local_parameters(model, blocks_of(model), plan)
        share_random_state(model, split.random, device_mesh[axes.tensor])
        if split.why_not_train is not None:
            refuse_training(model, split.why_not_train)
    blocks = [model.get_submodule(path) for path in blocks_of(model)]
    for block in blocks:
        if activation_checkpointing:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        if compile:
            block.compile()
    data_mesh = device_mesh[axes.data] if len(axes.data) > 1 else device_mesh[axes.shard]
    dims = {
        id(param): placements.by_name[name].dim_of(axes.shard)
        for name, param in model.named_parameters(remove_duplicate=False)
    }
    for module in (*_with_own_parameters(blocks, model), model):
        fully_shard(
            module,
            mesh=data_mesh,
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=lambda param: Shard(dims[id(param)] or 0),
            mp_policy=policy,
        )
    setattr(
        model,
        _PARALLELIZED,
        Parallelized(placements, device_mesh, sequence_parallel, loss_parallel, split),
    )
    model.forward = explain_mixed_tensors(model.forward)
    if sequence_parallel and axes.tp > 1:
        _guard_sequence(model, placements)
    if loss_parallel and axes.tp > 1:
        model.loss_function = causal_lm_loss
    for option, chosen in (
        ("sequence_parallel", sequence_parallel),
        ("loss_parallel", loss_parallel),
    ):
        if chosen and axes.tp > 1 and hasattr(model, "generate"):
            model.generate = refuse_generate(option)
    return model


def _with_own_parameters(blocks: list[nn.Module], model: nn.Module) -> list[nn.Module]:
    """The blocks that share no parameter with the rest of the model, which FSDP2 cannot group."""
    uses: collections.Counter[int] = collections.Counter()
    for module in model.modules():
        uses.update(id(param) for param in module._parameters.values() if param is not None)
    own = (
        collections.Counter(
            id(param)
            for module in block.modules()
            for param in module._parameters.values()
            if param is not None
        )
        for block in blocks
    )
    return [
        block
        for block, counts in zip(blocks, own, strict=True)
        if all(uses[param] == count for param, count in counts.items())
    ]


def parallelized(model: nn.Module) -> Parallelized:
    """How a model was split by `parallelize`."""
    found = getattr(model, _PARALLELIZED, None)
    if not isinstance(found, Parallelized):
        raise MeshwrightError(
            f"this {type(model).__name__} was not parallelized; call mw.torch.parallelize first"
        )
    return found


def tie(model: nn.Module, shared: list[list[str]]) -> None:
    """Give tied modules one parameter again, the first one's."""
    for names in shared:
        first = model.get_parameter(names[0])
        for name in names[1:]:
            module, _, own = name.rpartition(".")
            model.get_submodule(module).register_parameter(own, first)


def _policy(dtype: str | torch.dtype | None) -> MixedPrecisionPolicy:
    if dtype is None:
        return MixedPrecisionPolicy()
    if isinstance(dtype, str):
        if dtype not in _DTYPES:
            raise MeshwrightError(
                f"mixed_precision={dtype!r} is not a dtype{did_you_mean(dtype, _DTYPES)}"
            )
        dtype = _DTYPES[dtype]
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def _check_same_weights(model: nn.Module) -> None:
    """Every rank takes its shards from its own copy, so all copies must be the same."""
    if dist.get_backend() == "fake":
        return
    named = dict(model.named_parameters())
    hashes = [
        torch.hash_tensor(param.detach().flatten(), dim=0).view(torch.int64)
        for param in named.values()
    ]
    own = torch.stack(hashes)
    first = own.clone()
    dist.broadcast(first, 0)
    wrong = torch.zeros(1, dtype=torch.int64, device=own.device)
    differ = (own != first).nonzero()
    wrong += len(differ)
    dist.all_reduce(wrong)
    if not wrong:
        return
    where = f", here first in {list(named)[int(differ[0])]!r}" if len(differ) else ""
    raise MeshwrightError(
        f"the ranks have different weights{where}, and each would put its own shards into one "
        "model; call torch.manual_seed(0) before the model is made, load the same files, or make "
        "it on the meta device and call mw.torch.load_hf"
    )


def _guard_sequence(model: nn.Module, placements: Placements) -> None:
    axes = placements.axes

    def check(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        tokens = kwargs.get("input_ids", kwargs.get("inputs_embeds", args[0] if args else None))
        if isinstance(tokens, torch.Tensor) and tokens.ndim > 1:
            check_sequence(tokens.shape[1], axes.tp, axes.tensor)
        kept = kwargs.get("logits_to_keep", 0)
        if not isinstance(kept, int) or kept:
            raise MeshwrightError(
                "logits_to_keep cuts the sequence, which sequence parallelism splits; leave it out"
            )

    model.register_forward_pre_hook(check, with_kwargs=True, prepend=True)
