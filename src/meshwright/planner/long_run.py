"""A run of days beside its step: size of a checkpoint, rate of data, which batch to take."""

import math

from meshwright.data import token_dtype
from meshwright.planner.step import StepModel
from meshwright.planner.workload import Choice, Workload

TOKENS_A_PARAMETER = 20  # Hoffmann et al., Training Compute-Optimal LLMs, arXiv 2203.15556


def checkpoint_bytes(workload: Workload) -> int:
    """Bytes of a checkpoint: what is trained and the optimizer's state, of all devices."""
    on_one_device = StepModel(workload, Choice.of())
    kinds = workload.schedule.always(on_one_device)
    weights = kinds["parameters"]
    if workload.config.lora.rank:  # frozen weights are not saved
        weights = 4 * on_one_device.adapter
    return math.ceil(weights + kinds["optimizer"])


def data_bytes_per_second(workload: Workload, tokens_per_second: float) -> float:
    """Bytes of tokens that the run reads from its store."""
    return tokens_per_second * token_dtype(workload.model.vocab).itemsize


def batch_for(workload: Workload, tokens: float | None = None) -> int:
    """Sequences of a step for a run over so many tokens, a power of two.

    By the law of DeepSeek LLM (arXiv 2401.02954, 3.1): 0.2920 · C^0.3271 tokens, where C are the
    run's FLOPs. Without tokens, 20 for each parameter, trained or not.
    """
    if tokens is None:
        tokens = TOKENS_A_PARAMETER * workload.sizes.parameters
    return sequences(0.2920 * (flops_per_token(workload) * tokens) ** 0.3271, workload.seq)


def flops_per_token(workload: Workload) -> float:
    """Useful FLOPs, as MFU counts them."""
    return workload.flops / workload.seq


def sequences(tokens: float, seq: int) -> int:
    """The power of two of sequences that is nearest to so many tokens; at least one."""
    return 1 << round(math.log2(max(1.0, tokens / seq)))
