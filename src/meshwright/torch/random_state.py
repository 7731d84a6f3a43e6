"""The same random numbers on all ranks of a tensor-parallel group.

Complete activations are the same on these ranks, so dropout must drop the same of them, whatever
seeds a script has given its ranks. DTensor sees to that for its own operators, on GPUs alone;
activations here are plain tensors, which take what the rank's generator gives. Activations that are
split meet no random numbers: the dry run has all-gathered them.
"""

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.torch.dry_run import is_trained


def share_random_state(model: nn.Module, modes: Collection[bool], over: DeviceMesh) -> None:
    """Begin each forward pass with the random state of the group's first rank.

    `modes`: whether any module trains where the model may draw random numbers. A broadcast of 5 KB
    in those; a state that is restored, as by torch.utils.checkpoint, gives the same numbers again.
    """
    if not modes:
        return
    group = over.get_group()
    first = dist.get_global_rank(group, 0)
    on_cuda = over.device_type == "cuda"

    @torch.compiler.disable
    def share(*_: Any) -> None:
        if is_trained(model) not in modes:
            return
        states = [torch.get_rng_state()] + ([torch.cuda.get_rng_state()] if on_cuda else [])
        shared = torch.cat(states).to(over.device_type)
        dist.broadcast(shared, first, group=group)
        if dist.get_rank() == first:
            return
        of_cpu, *of_cuda = shared.cpu().split([len(state) for state in states])
        torch.set_rng_state(of_cpu)
        for state in of_cuda:
            torch.cuda.set_rng_state(state)

    model.register_forward_pre_hook(share)
