"""How a step is computed: kernels, context parallelism, layers, experts and fp8, with checks."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from meshwright.errors import MeshwrightError
from meshwright.launch import flat_settings
from meshwright.layouts import Rules
from meshwright.machines import CHIPS, Chip, chip_of_kind
from meshwright.models import (
    OFFLOAD,
    Compute,
    activation_layouts,
    choose_exchange,
    default_dtype,
    experts_of,
    family_of,
    layer_count,
    layer_counts,
    scans_layers,
)
from meshwright.ops import (
    EXCHANGES,
    experts_not_in_fp8,
    group_alignment,
    nontrivial_axes,
    rows_per_token,
    split_axes,
)
from meshwright.ops.attention import (
    FLOPS_PER_BYTE,
    calls_of,
    choose_strategy,
    explain_strategy,
    sequence_order,
    slow_kernel,
)
from meshwright.present import count
from meshwright.training.config import ComputeConfig, TrainConfig


def compute_of(
    config: TrainConfig, model: Any, rules: Rules, placed: Mesh
) -> tuple[Compute, str | None]:
    """How the forward is computed; and of attention, how it is split and whether it is slow."""
    settings = config.compute
    device = placed.devices.flat[0]
    dtype = jnp.dtype(default_dtype(settings.dtype, device.platform))
    layouts = activation_layouts(rules, nontrivial_axes(placed.shape))
    split = family_of(model).sequence_split(model, layouts, placed.shape, config.seq)
    strategy: str = config.context_parallel
    words = None
    if split.ways > 1:
        split = dataclasses.replace(split, flops_per_byte=flops_per_byte(device))
        why = "as asked"
        if strategy == "auto":
            strategy, why = explain_strategy(split)
        order = sequence_order(split, choose_strategy(split, strategy))
        words = f"{strategy} over {split.ways} parts of a sequence, in {order} order ({why})"
    calls = calls_of(split, strategy, device.platform, dtype.name, segmented=True)
    slow = slow_kernel(calls, settings.attention, device.device_kind)
    if slow is not None:
        slower = f"in the slower kernel {slow[0]} ({slow[1]})"
        words = slower if words is None else f"{words}; {slower}"
    scan, _ = layers_choice(config, model, device.platform, placed.size)
    compute = Compute(
        rules,
        dtype,
        settings.remat,
        scan,
        settings.attention,
        strategy,
        settings.mlp_chunk,
        settings.matmul,
        settings.fp8_skips,
        settings.experts,
        settings.capacity,
        adapter_scale=config.lora.scale,
        dropout=config.lora.dropout,
        seed=config.seed,
    )
    if settings.matmul == "fp8":
        chip = chip_of_kind(device.device_kind, device.platform)
        check_fp8(config, model, chip)
    if settings.mlp_chunk and experts_of(model) is not None:
        raise MeshwrightError(
            f"compute.mlp_chunk={settings.mlp_chunk}: the experts of {config.model} are not "
            "computed in chunks; leave it out, and give --compute.remat mlp to save memory"
        )
    check_experts(config, model)
    if refusal := split_capacity(config, split_axes(layouts.residual.partitions[1:2])):
        raise MeshwrightError(
            f"{refusal}; leave it out, or use a mesh with sp=1 without --compute.sequence-parallel"
        )
    return compute, words


_OF_EXPERTS = (
    "compute.capacity", "compute.experts", "loss.load_balance", "loss.router_z",
    "loss.balance_bias",
)  # fmt: skip


def check_balance(arrays: Any, speed: float, kept_by: str) -> None:
    """Raise if there is no selection bias to move, or LoRA or DPO keep it as it is."""
    given = f"loss.balance_bias={speed} moves the selection bias of routers, "
    kinds = {spec.kind for spec in jax.tree.leaves(arrays)}
    if "expert" not in kinds:
        raise MeshwrightError(f"{given}and this model has no experts; leave it out")
    if "balance" not in kinds:
        raise MeshwrightError(
            f"{given}and this model has none; leave it out and balance experts with "
            "--loss.load-balance 0.001, or give it one with --override selection_bias=true"
        )
    if kept_by:
        raise MeshwrightError(f"{given}which {kept_by} leaves as it is; leave it out")


def check_experts(config: TrainConfig, model: Any) -> None:
    """Raise if a setting of experts is given, and the model has none."""
    if experts_of(model) is not None:
        return
    values, defaults = flat_settings(config), flat_settings(TrainConfig("tiny"))
    for name in _OF_EXPERTS:
        if values[name] != defaults[name]:
            raise MeshwrightError(
                f"{name}={values[name]}: {config.model or 'the model'} has no experts; leave it out"
            )


def split_capacity(config: TrainConfig, axes: Sequence[str]) -> str | None:
    """Why these mesh axes may not split sequences, None if they may: experts have a capacity."""
    if not config.compute.capacity or not axes:
        return None
    given = f"compute.capacity={config.compute.capacity}"
    return f"{given} counts the tokens of whole sequences, and {'+'.join(axes)} splits them"


def exchange_text(setting: str, model: Any, mesh_shape: Mapping[str, int]) -> str | None:
    """How tokens reach the experts of other devices, and why; None where none has to."""
    experts, ways = experts_of(model), mesh_shape.get("ep", 1)
    if experts is None or ways == 1:
        return None
    sent = {name: rows_per_token(name, ways, experts.per_token) for name in EXCHANGES}
    each = ", ".join(f"{name} sends {number:.3g}" for name, number in sent.items())
    chosen = choose_exchange(setting, ways, experts.per_token)
    why = "" if setting == "auto" else "as asked; "
    return f"experts: {chosen} over ep={ways} ({why}copies of a token on the way there: {each})"


def experts_kernel_text(dtype: Any, model: Any, platform: str) -> str | None:
    """By what experts are multiplied on a GPU, where that is not the fastest kernel, and why."""
    if experts_of(model) is None or platform not in ("gpu", "cuda"):
        return None
    alignment, why = group_alignment(dtype)
    if not why:
        return None
    kernel = (
        "Triton's kernel"
        if alignment > 1
        else "XLA, which multiplies every token with every expert"
    )
    return f"experts: by {kernel} (the faster kernel is not used: {why})"


def check_fp8(config: TrainConfig, model: Any, chip: Chip) -> None:
    """That the chip multiplies in fp8, or is a CPU, which simulates it; that layers are left."""
    if config.lora.quantizes:
        raise MeshwrightError(
            "compute.matmul fp8 rounds weights of 16 or 32 bits for each matmul, and lora.base is "
            f"{config.lora.base}; leave one of the two out"
        )
    if chip.platform != "cpu" and chip.fp8_flops is None:
        raise MeshwrightError(
            f"compute.matmul fp8: {chip.name} has no fp8 units; leave it out, or use one of "
            + ", ".join(one.name for one in CHIPS.values() if (one.fp8_flops or 0) > one.bf16_flops)
        )
    stacks = layer_counts(model)
    if min(stacks) <= 2 * config.compute.fp8_skips:
        raise MeshwrightError(
            f"compute.fp8_skips={config.compute.fp8_skips} leaves none of {min(stacks)} layers to "
            "fp8; give a smaller one, or 0"
        )


def layers_choice(config: TrainConfig, model: Any, platform: str, devices: int) -> tuple[bool, str]:
    """Whether a loop runs over the layers, and why."""
    if config.compute.remat == OFFLOAD:
        return True, "offloaded activations need it"
    return scans_layers(config.compute.layers, layer_count(model), platform, devices)


def layers_text(config: TrainConfig, model: Any, platform: str, devices: int) -> str:
    """A line that says how the layers run, why, and which setting changes it."""
    scan, why = layers_choice(config, model, platform, devices)
    how, other = ("a scan", "unroll") if scan else ("unrolled", "scan")
    if config.compute.remat == OFFLOAD:
        where = "which is a CPU's own: as remat full" if platform == "cpu" else "pinned"
        return f"layers: {how} ({why}); their inputs go to the host's memory, {where}"
    return f"layers: {how} ({why}); --compute.layers {other} runs the other way"


def without_fp8(compute: ComputeConfig, model: Any, chip: Chip, tensor: int = 1) -> str | None:
    """Why the experts of a model, if it has some, are not multiplied in fp8 on a chip, or None.

    `tensor`: the size of tp, over which they are split.
    """
    experts = experts_of(model)
    if experts is None:
        return None
    dtype, (embed, mlp) = default_dtype(compute.dtype, chip.platform), experts.dims
    return experts_not_in_fp8(chip.platform, chip.device_kinds[0], dtype, (embed, mlp // tensor))


def matmuls_text(compute: ComputeConfig, model: Any, chip: Chip, tensor: int = 1) -> str | None:
    """A line that says how many layers multiply in fp8; None if none do, or were meant to."""
    if compute.matmul != "fp8":
        without = "note: --compute.fp8-skips has no effect without --compute.matmul fp8"
        return without if compute.fp8_skips else None
    stacks = layer_counts(model)
    layers = sum(stacks)
    in_fp8 = layers - 2 * compute.fp8_skips * len(stacks)
    how = "e4m3, gradients e5m2"
    if chip.platform == "cpu":
        how = "simulated: CPUs have no fp8 units"
    elif (chip.fp8_flops or 0) <= chip.bf16_flops:
        how += f"; {chip.name} has the same peak in bfloat16: only all-gathers gain"
    if why := without_fp8(compute, model, chip, tensor):
        how += f"; not of experts: {why}"
    return f"matmuls: fp8 in {in_fp8} of {count(layers, 'layer')} ({how})"


def known_chip(device: Any) -> Chip | None:
    """The chip of a device; None if it is not in the catalogue."""
    try:
        return chip_of_kind(device.device_kind, device.platform)
    except MeshwrightError:
        return None


def flops_per_byte(device: Any) -> float:
    """FLOP/s of a chip for each byte/s to its neighbour; a usual figure where it is not known."""
    chip = known_chip(device)
    return FLOPS_PER_BYTE if chip is None or chip.platform == "cpu" else chip.flops_per_byte
