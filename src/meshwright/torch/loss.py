"""Cross-entropy of logits that are split over the vocabulary; no rank ever has all of them."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn import functional

from meshwright.errors import MeshwrightError
from meshwright.torch.collectives import first_of_rank


class _VocabParallel(torch.autograd.Function):
    """Loss of each token, from this rank's logits [tokens, vocab / tp], the first of `first`."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, first: int, group: Any
    ) -> torch.Tensor:
        entries = logits.shape[-1]
        largest = logits.amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        exponentials = (logits - largest[:, None]).exp()
        own = (target >= first) & (target < first + entries)
        index = torch.where(own, target - first, 0)
        picked = logits.gather(1, index[:, None])[:, 0] * own
        # one sum for both: of the exponentials, and of the logit that one rank has
        sums = torch.stack([exponentials.sum(-1), picked])
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(exponentials / sums[0, :, None], index, own)
        return sums[0].log() + largest - sums[1]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        softmax, index, own = ctx.saved_tensors
        change = -own.to(softmax.dtype)[:, None]
        gradient = softmax.scatter_add(1, index[:, None], change)
        return gradient * grads[0][:, None], None, None, None


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    ignore_index: int = -100,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum of the losses of all tokens but those with `ignore_index`, in float32.

    `labels`, and `weights` that multiply the losses: [tokens]. `logits`: [tokens, vocab] or
    [batch, length, vocab], plain, or a DTensor split over its last dim.
    """
    if not isinstance(logits, DTensor):
        flat = logits.flatten(0, -2).float()
        if weights is None:
            return functional.cross_entropy(
                flat, labels, ignore_index=ignore_index, reduction="sum"
            )
        losses = functional.cross_entropy(flat, labels, ignore_index=ignore_index, reduction="none")
        return (losses * weights).sum()
    if [p.is_shard(logits.ndim - 1) or p.is_shard(-1) for p in logits.placements] != [True]:
        raise MeshwrightError(
            f"logits are placed {logits.placements}; cross_entropy takes those of "
            "parallelize(…, loss_parallel=True), split over the vocabulary"
        )
    valid = labels != ignore_index
    group = logits.device_mesh.get_group()
    local = logits.to_local().flatten(0, -2).float()
    first = first_of_rank(logits.shape[-1], logits.device_mesh)
    losses = _VocabParallel.apply(local, torch.where(valid, labels, 0), first, group)
    return (losses * (valid if weights is None else valid * weights)).sum()


def causal_lm_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """What a Hugging Face causal model calls with its labels, for logits that are split."""
    if shift_labels is None:
        shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    flat = shift_labels.reshape(-1)
    total = cross_entropy(logits, flat, ignore_index)
    count = (flat != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
    return total / count
