"""Abstract arrays: shape, dtype, dims and initializer, before the array exists."""

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshwright.arithmetic import whole_numbers
from meshwright.errors import MeshwrightError
from meshwright.present import count

with contextlib.suppress(ImportError):
    import ml_dtypes  # noqa: F401  # teaches NumPy bfloat16 and float8; comes with jax


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """Shape, dtype, dim names and initializer of an array.

    >>> ArraySpec((4096, 14336), dims="embed mlp")
    ArraySpec(shape=(4096, 14336), dims=('embed', 'mlp'), dtype=dtype('float32'))

    `init` is its initializer: `mw.Normal(0.02)`, `mw.Constant(1.0)`, or any function of
    (key, shape, dtype). `unpadded` is the shape of its values where that is smaller: the rest of
    the array is zeros, so that its dims are divisible. `inputs` counts the dims that a matmul sums
    over, after a leading `layers`: 1 for `layers embed heads head_dim`. With 0 the array is a
    vector, such as a norm or a bias: optimizers do not decay it, and it is not cast for matmuls.
    `kind` says what it is: a matrix, an expert (a matrix of each), a router, a norm, a bias, an
    embedding, or what a step moves to balance the load of experts (balance). `activation` names
    what a norm or bias of a layer is applied to (residual, heads, kv_heads or mlp): it is
    replicated over the mesh axes that split the other dims of that activation, and its gradient is
    reduced over them.
    `trained` is False for an array that a run leaves as it is; of one that stacks layers it may be
    the layers that are trained.
    """

    shape: tuple[int, ...]
    dims: Sequence[str | None]  # or one text: "embed mlp"
    dtype: Any = np.float32
    init: Any = dataclasses.field(default=None, repr=False)
    unpadded: tuple[int, ...] | None = dataclasses.field(default=None, repr=False)
    inputs: int = dataclasses.field(default=0, repr=False)
    kind: str = dataclasses.field(default="", repr=False)
    activation: str = dataclasses.field(default="", repr=False)
    trained: bool | tuple[int, ...] = dataclasses.field(default=True, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", whole_numbers(self.shape, "shape"))
        object.__setattr__(self, "dims", dim_names(self.dims))
        try:
            if is_abstract(self.dtype) and not isinstance(self.dtype, type):
                raise TypeError
            object.__setattr__(self, "dtype", np.dtype(self.dtype))
        except TypeError:
            raise MeshwrightError(
                f"{self.dtype!r} is not a dtype; give jnp.bfloat16, 'float32' or the like"
            ) from None
        if len(self.shape) != len(self.dims):
            raise MeshwrightError(
                f"shape {self.shape} has {count(len(self.shape), 'dim')}, dims "
                f"{self.dims} name {len(self.dims)}; name each dim once"
            )
        if self.unpadded is not None:
            unpadded = whole_numbers(self.unpadded, "unpadded")
            object.__setattr__(self, "unpadded", unpadded)
            if len(unpadded) != self.ndim or any(map(int.__gt__, unpadded, self.shape)):
                raise MeshwrightError(
                    f"unpadded={unpadded} is larger than shape={self.shape}, or has other dims"
                )
        if self.init is not None and not callable(self.init):
            raise MeshwrightError(
                f"init={self.init!r} is not a function of (key, shape, dtype); use mw.Normal(0.02)"
            )

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Used in matmuls: decayed by optimizers, cast to the dtype of matmuls."""
        return self.inputs > 0

    @property
    def is_cast(self) -> bool:
        """Used in the dtype of matmuls; routers stay in float32."""
        return self.is_matrix and self.kind != "router"

    @property
    def is_stacked(self) -> bool:
        """One array for all layers, dim `layers` first."""
        return self.dims[:1] == ("layers",)

    @property
    def trained_part(self) -> "ArraySpec | None":
        """What is trained of it: all, nothing (None), or an array of fewer layers."""
        if isinstance(self.trained, bool):
            return self if self.trained else None
        layers = len(self.trained)
        unpadded = None if self.unpadded is None else (layers, *self.unpadded[1:])
        shape = (layers, *self.shape[1:])
        return dataclasses.replace(self, shape=shape, unpadded=unpadded, trained=True)

    @property
    def unpadded_shape(self) -> tuple[int, ...]:
        return self.shape if self.unpadded is None else self.unpadded

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


def dim_names(dims: Sequence[str | None]) -> tuple[str | None, ...]:
    """Dim names given as a tuple or as text: `"embed mlp"`; None for a dim without a name."""
    if not isinstance(dims, str | tuple | list):
        raise MeshwrightError(f"dims {dims!r} are not names; give 'embed mlp' or a tuple of names")
    names = tuple(dims.split()) if isinstance(dims, str) else tuple(dims)
    for name in names:
        if name is not None and not isinstance(name, str):
            raise MeshwrightError(f"dims {dims!r}: {name!r} is not a dim name; use text or None")
    return names


def pairs_and_optional(
    rules: Any, optional: Any, name: str, pair: str
) -> tuple[Sequence[Any], frozenset[str]]:
    """Rules as a list, and the names that need not match; `name`, `pair`: for messages."""
    if not isinstance(rules, tuple | list):
        raise MeshwrightError(
            f"{name} {rules!r} are not a list of pairs ({pair}); read text with .parse"
        )
    optional = (optional,) if isinstance(optional, str) else optional
    if not isinstance(optional, tuple | list | set | frozenset):
        first = pair.partition(",")[0]
        raise MeshwrightError(f"optional={optional!r} is not a list of names ({first})")
    return rules, frozenset(map(str, optional))


def is_abstract(leaf: Any) -> bool:
    """Whether a leaf has a shape and a dtype."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")
