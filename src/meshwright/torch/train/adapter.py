"""The factors of a run with LoRA: those of the JAX backend, with the same initial values."""

from typing import Any

import jax
import torch
from torch import nn

from meshwright.layouts import create
from meshwright.models import ADAPTER, LoraConfig, adapter_files, hf_tensors
from meshwright.torch.lora import adapted_layer, add_factors, peft_name, saved_parameters
from meshwright.torch.parallelize import parallelized


def add_adapter(network: nn.Module, model: Any, lora: LoraConfig, base: torch.dtype) -> None:
    """Give a network on the meta device, of the config `model`, factors beside frozen weights."""
    names = (name for array in adapter_files(model, lora).arrays.values() for name in array.names)
    layers = dict.fromkeys(map(adapted_layer, names))
    add_factors(network, layers, lora.rank, lora.scale, base)


def start_adapter(network: nn.Module, model: Any, lora: LoraConfig, seed: int) -> None:
    """Fill the factors of a parallelized network; each rank makes all and takes its slices."""
    files, own = adapter_files(model, lora), parallelized(network)
    factors = {peft_name(name): (name, param) for name, param in saved_parameters(network)}
    on_cpu = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    first = {ADAPTER: create(files.specs[ADAPTER], on_cpu, seed)}
    with torch.no_grad():
        for peft, tensor in hf_tensors(first, files):
            name, param = factors[peft]
            param.to_local().copy_(torch.tensor(tensor[own.slices(name)]))
