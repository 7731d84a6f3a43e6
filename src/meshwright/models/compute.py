"""How a forward pass is computed, whatever the model: dtype, remat, scan, kernels."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax.ad_checkpoint import Offloadable

from meshwright.errors import MeshwrightError, did_you_mean, one_of
from meshwright.layouts import Rules
from meshwright.models.activations import ActivationLayouts, activation_layouts
from meshwright.ops import EXCHANGES, SCALE, exchange_by_bytes, nontrivial_axes

Policy = Callable[..., Any]  # to a bool, or an Offloadable
OFFLOAD = "offload"  # the remat policy whose saved activations go to the host's memory
DTYPES = ("auto", "bfloat16", "float32")
UNROLLED_LAYERS = 32  # at most, by default: compile time grows with each


@dataclasses.dataclass(frozen=True)
class Compute:
    """Settings of a forward pass."""

    rules: Rules
    dtype: Any = jnp.float32
    remat: str = "none"  # which activations are saved for the backward pass: see ModelFamily.remat
    scan: bool = True  # a loop over layers compiles once; False unrolls it, which runs faster
    kernel: str = "auto"  # of attention
    context_parallel: str = "auto"  # the method of attention where sp splits sequences
    mlp_chunk: int = 0  # tokens of a sequence on a device in the mlp at a time; 0: all
    matmul: str = "auto"  # of the layers: in dtype, or fp8
    fp8_skips: int = 0  # layers at each end that stay in dtype with fp8
    experts: str = "auto"  # how tokens reach experts of other devices: see ops/experts.py
    capacity: float = 0.0  # of an expert, over the average of a sequence's tokens; 0: of all
    adapter_scale: float = 1.0  # of what an adapter adds: see lora.py
    dropout: float = 0.0  # of an adapter's inputs, where a batch has the field `dropout`
    seed: int = 0  # of dropout
    context: int = 0  # tokens that a sequence may have in an engine; 0: those of the batch
    stationary: bool = False  # weights stay sharded and activations move: see activations.py

    @property
    def layouts(self) -> ActivationLayouts:
        return activation_layouts(self.rules, nontrivial_axes(), self.stationary)


def default_dtype(dtype: str, platform: str) -> str:
    """The dtype of matmuls; auto: bfloat16 on accelerators, float32 on CPUs."""
    if dtype not in DTYPES:
        raise MeshwrightError(f"dtype {dtype!r} is none of {one_of(DTYPES)}")
    if dtype != "auto":
        return dtype
    return "float32" if platform == "cpu" else "bfloat16"


def scans_layers(setting: str, layers: int, platform: str, devices: int) -> tuple[bool, str]:
    """Whether a loop runs over the layers, or they are unrolled; and why.

    `setting`: scan, unroll or auto. Unrolled is chosen where it was measured to be faster, on one
    GPU: XLA does not copy what a layer saves in and out of stacked arrays.
    """
    if setting != "auto":
        return setting == "scan", "as asked"
    if platform not in ("gpu", "cuda"):
        return True, "one layer to compile"
    if devices > 1:
        return True, f"on {devices} GPUs no step was faster yet without"
    if layers > UNROLLED_LAYERS:
        return True, f"{layers} layers would take long to compile"
    return False, f"{layers} layers on one GPU: about 10% faster, and longer to compile"


def choose_exchange(setting: str, ways: int, per_token: int) -> str:
    """The exchange of a setting; auto: the one that sends less."""
    if setting not in ("auto", *EXCHANGES):
        raise MeshwrightError(
            f"compute.experts={setting!r} is none of {one_of(('auto', *EXCHANGES))}"
        )
    return exchange_by_bytes(ways, per_token) if setting == "auto" else setting


def remat_policy(name: str, saved: Mapping[str, frozenset[str]]) -> Policy:
    """The jax.checkpoint policy that saves the activations of that name.

    Offloaded ones are copied to pinned memory of the host and back; a CPU's are in it anyway.
    """
    if name not in saved:
        raise MeshwrightError(f"remat={name!r} is not a policy{did_you_mean(name, saved)}")
    how = Offloadable("device", "pinned_host") if name == OFFLOAD else True
    saved_as = dict.fromkeys(saved[name], how) | {SCALE: True}

    def keeps(prim: Any, *_: Any, **params: Any) -> bool | Offloadable:
        return saved_as.get(params["name"], False) if prim.name == "name" else False

    return keeps
