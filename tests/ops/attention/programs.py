"""Attention over a split length as a compiled program, and its agreement with the reference."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh as DeviceMesh
from jax.sharding import PartitionSpec as P
from tests.ops.attention.reference import Arrays, Sees, documents, in_float64, inputs, zigzag

import meshwright as mw
from meshwright.ops.attention import ContextParallel, Mask, Split, attention, sequence_order

# most of a test's time is the compiler's: what it spends on faster code is not earned back
QUICKLY = {"xla_backend_optimization_level": 0}
FORWARD, GRADIENT = 2e-6, 5e-6
CAUSAL = Mask()


@dataclasses.dataclass(frozen=True)
class Case:
    strategy: str
    mesh: str
    mask: Mask = CAUSAL
    heads: int = 4
    kv_heads: int = 2
    packed: bool = True  # with segments
    batch: int = 3
    length: int = 32
    dtype: str = "float32"
    kernel: str = "auto"
    order: str | None = None  # the one sequence_order says, unless given
    along: tuple[str, ...] = ("sp",)  # the axes that split the length

    @property
    def devices(self) -> DeviceMesh:
        sizes = [int(part.split("=")[1]) for part in self.mesh.split(",")]
        return mw.mesh(
            self.mesh, devices=jax.devices()[: int(np.prod(sizes))], axis_types="explicit"
        )

    @property
    def ways(self) -> int:
        return int(np.prod([self.devices.shape[axis] for axis in self.along]))

    @property
    def layout(self) -> P:
        """[batch, length, heads, head_dim] over all axes of the mesh."""
        axes = self.devices.axis_names
        rows = tuple(axis for axis in ("dp", "fsdp") if axis in axes and axis not in self.along)
        return P(rows or None, self.along, "tp" if "tp" in axes else None, None)

    @property
    def sequence_order(self) -> str:
        tensor = dict(self.devices.shape).get("tp", 1)
        split = Split(
            self.ways, self.length, self.heads // tensor, self.kv_heads // tensor, 8,
            self.mask.within(self.length, self.length),
        )  # fmt: skip
        return self.order or sequence_order(split, self.strategy)

    def attention(self, q: Any, k: Any, v: Any, segments: Any = None) -> jax.Array:
        return attention(
            q, k, v, segments, self.mask, kernel=self.kernel,
            context=ContextParallel(self.strategy, self.sequence_order),
        )  # fmt: skip

    def shapes(self, head_dim: int = 8) -> tuple[Any, ...]:
        """q, k, v and segments, None without."""
        whole = (self.batch, self.length)
        sizes = [(*whole, n, head_dim) for n in (self.heads, self.kv_heads, self.kv_heads)]
        given = [
            jax.ShapeDtypeStruct(size, self.dtype, sharding=self.sharding(self.layout))
            for size in sizes
        ]
        rows = jax.ShapeDtypeStruct(whole, jnp.int32, sharding=self.sharding(P(*self.layout[:2])))
        return *given, rows if self.packed else None

    def sharding(self, layout: P) -> jax.sharding.NamedSharding:
        return jax.NamedSharding(self.devices, layout)


@functools.cache
def forward_and_backward(case: Case) -> Any:
    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def both(q: Any, k: Any, v: Any, segments: Any, given: Any) -> Any:
        out, backward = jax.vjp(lambda *x: case.attention(*x, segments), q, k, v)
        return out, *backward(given)

    return both


def run(case: Case, arrays: Arrays, segments: np.ndarray | None) -> list[np.ndarray]:
    """The output and the gradients of q, k and v, for rows in the order of the text."""
    text = np.arange(case.length)
    places = zigzag(case.length, case.ways) if case.sequence_order == "zigzag" else text
    with jax.set_mesh(case.devices):
        q, k, v, given = (
            jax.device_put(jnp.asarray(x[:, places], case.dtype), case.layout) for x in arrays
        )
        rows = P(*case.layout[:2])
        held = None if segments is None else jax.device_put(segments[:, places], rows)
        found = forward_and_backward(case)(q, k, v, held, given)
    for one, like in zip(found, (q, q, k, v), strict=True):
        assert one.sharding.is_equivalent_to(like.sharding, 4)
        assert one.dtype == like.dtype
    return [np.asarray(x.astype(jnp.float32))[:, np.argsort(places)] for x in found]


def agrees(case: Case, segments: np.ndarray | None = None, seed: int = 0) -> None:
    """Forward within 2e-6 and gradients within 5e-6 of float64."""
    if segments is None and case.packed:
        segments = documents(case.batch, case.length)
    arrays = inputs(case.batch, case.length, case.heads, case.kv_heads, seed=seed)
    sees = Sees(**dataclasses.asdict(case.mask))
    expected, gradients = in_float64(*arrays, segments, sees)
    found, *found_gradients = run(case, arrays, segments)
    np.testing.assert_allclose(found, expected, rtol=0, atol=FORWARD)
    for name, one, right in zip("qkv", found_gradients, gradients, strict=True):
        np.testing.assert_allclose(one, right, rtol=0, atol=GRADIENT, err_msg=f"of {name}")
