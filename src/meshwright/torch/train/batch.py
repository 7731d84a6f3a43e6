"""A batch of the loader as what a Hugging Face model takes."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from meshwright.data import NO_TARGET, WEIGHTS

IGNORED = -100
Arrays = Mapping[str, "np.ndarray[Any, Any]"]


def model_inputs(
    batch: Arrays, window: int | None, device: torch.device, own_masks: bool = False
) -> dict[str, Any]:
    """Arguments of the model for sequences [batch, length].

    Documents that share a sequence do not see each other: they get positions and a mask of their
    own. Where each sequence is one document, the model's plain causal attention is used.
    `own_masks`: the model makes its masks itself, from positions; its layers may have windows.
    """
    segments = batch["segments"]
    inputs: dict[str, Any] = {"input_ids": _long(batch["tokens"], device), "use_cache": False}
    length = segments.shape[1]
    packed = bool((segments != segments[:, :1]).any())
    if packed:
        inputs["position_ids"] = _long(batch["positions"], device)
    if not own_masks and (packed or (window is not None and length > window)):
        own = torch.from_numpy(segments).to(device)
        index = torch.arange(length, device=device)
        distance = index[:, None] - index
        seen = distance >= 0
        if window is not None:
            seen &= distance < window
        inputs["attention_mask"] = ((own[:, :, None] == own[:, None, :]) & seen)[:, None]
    return inputs


def targets(batch: Arrays, device: torch.device) -> torch.Tensor:
    """The next tokens, IGNORED where there is none."""
    wanted = batch["targets"]
    return _long(np.where(wanted == NO_TARGET, IGNORED, wanted), device)


def target_weights(batch: Arrays, device: torch.device) -> torch.Tensor | None:
    """The weights of the targets; None if all are 1."""
    return torch.from_numpy(batch[WEIGHTS]).to(device) if WEIGHTS in batch else None


def counted_weight(batch: Arrays) -> float:
    """What a summed loss is divided by: the number of targets, or the sum of their weights."""
    if WEIGHTS in batch:
        return float(batch[WEIGHTS].sum(dtype=np.float64))
    return target_count(batch)


def target_count(batch: Arrays) -> int:
    """How many targets count in the loss."""
    return int((batch["targets"] != NO_TARGET).sum())


def micro_batches(batch: Arrays) -> Iterator[Arrays]:
    """The parts [batch, length] of a batch [micro-batches, batch, length]."""
    for index in range(batch["tokens"].shape[0]):
        yield {name: array[index] for name, array in batch.items()}


def _long(array: "np.ndarray[Any, Any]", device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array, np.int64))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
