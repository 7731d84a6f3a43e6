"""`audit(step)`: every collective of a real step, by mesh axis, bytes, module and pass.

    found = mw.torch.audit(step, batch, mesh=mesh, model=model)
    print(found)                                # the table of mw.audit

The step runs once. Rows are those of this rank; what FSDP sends for a group of parameters is one
row, with the array that is sent.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.audits import (
    BOOKKEEPING,
    Audit,
    Collective,
    SentCollective,
    axes_between,
    expected_of,
    judged,
    objections,
    part_of_axes,
)
from meshwright.errors import MeshwrightError
from meshwright.torch.mesh import spec_of
from meshwright.torch.parallelize import parallelized

# operators that start a collective, and whether the array of the row is the result or the input
_STARTS = {
    "all_gather_into_tensor": "all-gather",
    "all_gather_into_tensor_out": "all-gather",
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter",
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "allreduce_": "all-reduce",
    "all_to_all_single": "all-to-all",
    "alltoall_base_": "all-to-all",
    "alltoall_": "all-to-all",
    "broadcast": "all-reduce",
    "broadcast_": "all-reduce",
}
_DTYPES = {
    torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16", torch.float16: "f16",
    torch.int64: "s64", torch.int32: "s32", torch.uint8: "u8", torch.bool: "pred",
}  # fmt: skip

_NOTES = ("whether a collective runs beside compute is not recorded; a profile shows it",)


def audit(
    step: Callable[..., Any],
    *arguments: Any,
    model: nn.Module,
    expected: Mapping[Any, Sequence[str]] | Sequence[Collective] | None = None,
    bookkeeping: int = BOOKKEEPING,
    **keywords: Any,
) -> Audit:
    """Run `step(*arguments)` once and list what it sends.

    `model`: the parallelized model that the step trains. With `expected` (`{"dp": ["all-gather",
    "reduce-scatter"], "tp": ["all-reduce"]}`) rows that match nothing are surprises; by default
    they are judged by what FSDP2 and tensor parallelism need: `expected_of_model(model)`.
    """
    own = parallelized(model)
    shape = spec_of(own.mesh).shape
    if expected is None:
        expected = expected_of_model(model)
    known = expected_of(expected, shape) if isinstance(expected, Mapping) else tuple(expected)
    with _Recorder(shape, model) as recorder:
        step(*arguments, **keywords)
    rows = judged(recorder.rows, known, bookkeeping)
    return Audit(shape, rows, (), (), known, _NOTES)


def expected_of_model(model: nn.Module) -> tuple[Collective, ...]:
    """What a step of a parallelized model sends, from how it was split."""
    own = parallelized(model)
    axes, shape = own.placements.axes, own.placements.spec.shape
    found = []
    if shape[axes.shard] > 1:
        found.append(Collective("all-gather", (axes.shard,), what="weights"))
        found.append(
            Collective("reduce-scatter", (axes.shard,), phase="backward", what="gradients")
        )
    if axes.replicate is not None:
        found.append(
            Collective("all-reduce", (axes.replicate,), phase="backward", what="gradients")
        )
    if axes.tensor is not None and axes.tp > 1:
        over = (axes.tensor,)
        found.append(Collective("all-reduce", over, what="partial sums"))
        if own.sequence_parallel:
            found.append(Collective("all-gather", over, what="the sequence"))
            found.append(Collective("reduce-scatter", over, what="partial sums"))
        elif not own.loss_parallel:
            found.append(Collective("all-gather", over, phase="forward", what="logits"))
    return tuple(found)


def assert_collectives(
    step: Callable[..., Any],
    expected: Mapping[Any, Sequence[str]],
    *arguments: Any,
    model: nn.Module,
    allow_missing: bool = False,
    bookkeeping: int = BOOKKEEPING,
    **keywords: Any,
) -> Audit:
    """Fail unless a step has exactly the expected collectives, as `mw.testing.assert_collectives`.

    assert_collectives(step, {"dp": ["all-gather", "reduce-scatter"]}, batch, model=model)
    """
    if not isinstance(expected, Mapping):
        raise MeshwrightError(
            f"assert_collectives(step, expected, …): expected is {expected!r}, not a mapping from "
            'axes to operations; write {"dp": ["all-gather"]}, or {} for nothing'
        )
    found = audit(
        step, *arguments, model=model, expected=expected, bookkeeping=bookkeeping, **keywords
    )
    if wrong := objections(found, allow_missing):
        raise AssertionError(wrong)
    return found


class _Recorder(TorchDispatchMode):
    """Lists the collectives that run inside it."""

    def __init__(self, shape: Mapping[str, int], model: nn.Module) -> None:
        super().__init__()
        self.rows: list[SentCollective] = []
        self._shape = shape
        self._names = {id(module): path for path, module in model.named_modules()}
        self._inside: list[str] = []
        self._backward = False  # whether a backward pass has begun since the last forward pass
        self._hooks = contextlib.ExitStack()
        self._begun = ""  # the module whose backward pass began last

    def __enter__(self) -> "_Recorder":
        before = nn.modules.module.register_module_forward_pre_hook(self._enter_module)
        after = nn.modules.module.register_module_forward_hook(self._leave_module, always_call=True)
        self._hooks.callback(before.remove)
        self._hooks.callback(after.remove)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._hooks.close()
        super().__exit__(*error)

    def _enter_module(self, module: nn.Module, _: Any) -> None:
        if not self._inside and not _in_backward():
            self._backward = False  # the next micro-batch: what its loss sends is no optimizer's
        self._inside.append(self._names.get(id(module), ""))

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        path = self._inside.pop() if self._inside else ""
        outputs = output if isinstance(output, list | tuple) else [output]
        for tensor in outputs:
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: setattr(self, "_begun", path))
                break

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again, as the operators on local tensors
        result = func(*args, **(kwargs or {}))
        in_backward = _in_backward()
        self._backward |= in_backward
        operation = _STARTS.get(func.__name__.split(".")[0])
        if operation is not None and func.namespace in ("c10d", "_c10d_functional"):
            self._record(operation, func, args, result, in_backward)
        return result

    def _record(
        self, operation: str, func: Any, args: tuple[Any, ...], result: Any, in_backward: bool
    ) -> None:
        groups = [_ranks(args)]
        module = next((path for path in reversed(self._inside) if path), "")
        if in_backward:
            scope = f"transpose({self._begun})"
        elif self._backward and not self._inside:
            scope = "optimizer"
        else:
            scope = module
        for tensor in _sent(func, args, result):
            self.rows.append(
                SentCollective(
                    operation,
                    axes_between(groups, self._shape),
                    len(groups[0]),
                    _DTYPES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch.")),
                    tuple(tensor.shape),
                    scope=scope,
                    part_of_axes=part_of_axes(groups, self._shape),
                )
            )


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _sent(func: Any, args: tuple[Any, ...], result: Any) -> Iterator[torch.Tensor]:
    """The result of a collective, a tensor or some."""
    if func.namespace == "_c10d_functional":
        yield from [result] if isinstance(result, torch.Tensor) else result
        return
    # c10d operators write into their first argument
    first = args[0]
    while isinstance(first, list | tuple) and first and isinstance(first[0], list | tuple):
        first = first[0]
    yield from [first] if isinstance(first, torch.Tensor) else first


def _ranks(args: Sequence[Any]) -> list[int]:
    """The ranks of the group among the arguments of an operator."""
    for value in reversed(args):
        if isinstance(value, str):
            with contextlib.suppress(KeyError, RuntimeError, ValueError):
                group = dist.distributed_c10d._resolve_process_group(value)
                return dist.get_process_group_ranks(group)
        if isinstance(value, torch.ScriptObject):
            with contextlib.suppress(RuntimeError):
                return dist.get_process_group_ranks(dist.ProcessGroup.unbox(value))
        if isinstance(value, dist.ProcessGroup):
            return dist.get_process_group_ranks(value)
    return list(range(dist.get_world_size()))
