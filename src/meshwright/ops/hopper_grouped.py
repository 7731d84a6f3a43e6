"""Grouped matmul on Hopper GPUs, in Mosaic GPU, of groups that begin at multiples of 128 rows.

So a tile of rows is of one group: no tile is masked, and every tile is written whole. Two compute
warpgroups have 64 rows of a tile of 128 × 256 each; a third fetches blocks of both operands.
Matrices that no blocks divide are padded: a copy for each product.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.ops.collectives import untyped
from meshwright.ops.mosaic import is_hopper, mosaic, pallas, when

ROWS = 128  # of a tile
_GROUPS = 2  # compute warpgroups
_BYTES = 128  # of a block, along the dim that is summed
_STAGES = 4  # blocks in flight
_PART = 64  # rows and columns that are written at a time
# of matrices of experts: casts and transposes of narrower ones take longer than fp8 saves
# (benchmarks/expert_step.py)
_NARROWEST_IN_FP8 = 1024


def columns(size: int) -> int | None:
    """Those of a tile: the most that divide a matrix; None if none do."""
    return next((n for n in (256, 192, 128, 64) if size % n == 0), None)


@functools.cache
def experts_not_in_fp8(platform: str, kind: str, dtype: str, dims: tuple[int, int]) -> str | None:
    """Why a train step in fp8 does not multiply experts in it on such a device, or None.

    `dtype` is that of other matmuls, and `dims` are those of a device's part of a matrix. CPUs
    simulate fp8, of all sizes.
    """
    if platform == "cpu":
        return None
    if not is_hopper(kind):
        return "only Hopper GPUs gain by it"
    if dtype != "bfloat16":
        return f"the kernel is for bfloat16, not {dtype}"
    if any(dim % ROWS for dim in dims):
        return f"the kernel needs matrices of multiples of {ROWS}, these are {dims}"
    if min(dims) < _NARROWEST_IN_FP8:
        return f"matrices {min(dims)} wide are slower in it, under {_NARROWEST_IN_FP8}"
    return None


def rows_product(
    x: jax.Array,
    weights: jax.Array,
    tiles: jax.Array,
    transposed: bool = False,
    dtype: Any = None,
    scale: jax.Array | None = None,
) -> jax.Array:
    """[rows, out] of x [rows, in] and weights [groups, in, out]; or, transposed, [groups, out, in].

    `tiles` [rows / 128] are their groups; tiles of the group after the last are not written. In 8
    bits the weights are transposed; `dtype` is that of the result, if it is not that of x. `scale`
    multiplies the result before it is rounded.
    """
    outputs = weights.shape[1 if transposed else 2]
    of_in, of_out = -x.shape[1] % _depth(x), -outputs % _PART
    x = padded(x, 0, of_in)
    weights = padded(weights, 0, *((of_out, of_in) if transposed else (of_in, of_out)))
    groups, shape = weights.shape[0], (x.shape[0], outputs + of_out)

    def run(*arrays: jax.Array) -> jax.Array:
        body = functools.partial(_rows_kernel, groups=groups, transposed=transposed)
        return _kernel(body, shape, dtype or x.dtype)(*arrays)

    found: jax.Array = untyped(run, x, weights, tiles, *_as_array(scale))
    return found[:, :outputs] if of_out else found


def weights_product(
    x: jax.Array,
    y: jax.Array,
    sizes: jax.Array,
    dtype: Any = None,
    scale: jax.Array | None = None,
) -> jax.Array:
    """[groups, in, out]: of each group of rows the product of x [rows, in] and y [rows, out].

    In 8 bits both are transposed: x [in, rows], y [out, rows]. `sizes` [groups] are multiples of
    128. A group of no rows gets zeros. `dtype` and `scale` are those of the result.
    """
    depth, transposed = _depth(x), x.dtype.itemsize == 1
    inputs, outputs = (array.shape[0 if transposed else 1] for array in (x, y))
    of_in, of_out = -inputs % ROWS, -outputs % _PART
    x, y = (
        padded(array, *((missing, 0) if transposed else (0, missing)))
        for array, missing in ((x, of_in), (y, of_out))
    )
    shape = (sizes.shape[0], inputs + of_in, outputs + of_out)
    ends, steps = jnp.cumsum(sizes) // depth, sizes // depth

    def run(*arrays: jax.Array) -> jax.Array:
        body = functools.partial(_weights_kernel, transposed=transposed)
        return _kernel(body, shape, dtype or x.dtype)(*arrays)

    found: jax.Array = untyped(run, x, y, ends - steps, steps, *_as_array(scale))
    return found[:, :inputs, :outputs] if of_in or of_out else found


def padded(x: jax.Array, *after: int) -> jax.Array:
    """With so many zeros after each dim."""
    return jnp.pad(x, [(0, number) for number in after]) if any(after) else x


def _as_array(scale: jax.Array | None) -> list[jax.Array]:
    return [] if scale is None else [scale.reshape(1)]


def _depth(x: Any) -> int:
    """Of a block, along the dim that is summed."""
    return _BYTES // int(x.dtype.itemsize)


def _kernel(body: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    plgpu = mosaic()
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(shape, dtype),
        grid=(_processors(),),
        grid_names=("processor",),
        num_threads=_GROUPS + 1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True
        ),
    )


def _processors() -> int:
    """The streaming multiprocessors of a GPU, which may be absent."""
    absent = jax.sharding.get_abstract_mesh().abstract_device
    if absent is not None:
        return int(absent.num_cores or 132)
    return int(getattr(jax.devices()[0], "core_count", 132))


def _transforms(dtype: Any) -> tuple[Any, ...]:
    plgpu = mosaic()
    depth = _BYTES // jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform((8, depth)), plgpu.SwizzleTransform(_BYTES)


def _block(shape: tuple[int, int], at: Any, dtype: Any, pending: int) -> Any:
    """A BlockSpec of which step i reads block `at(i)`, while `pending` matmuls may still run.

    Their blocks are released later, and the last ones not at all: a tile of no more steps than
    that would be followed by the next before it is multiplied.
    """
    return mosaic().BlockSpec(shape, at, transforms=_transforms(dtype), delay_release=pending)


def _along(i: Any) -> tuple[Any, Any]:
    return 0, i


def _down(i: Any) -> tuple[Any, Any]:
    return i, 0


def _rows_kernel(
    x: Any, weights: Any, tiles: Any, *refs: Any, groups: int, transposed: bool
) -> None:
    pl, plgpu = pallas(), mosaic()
    *scale, out = refs
    width = columns(out.shape[1])
    assert width is not None
    depth = _depth(x)
    block = (width, depth) if transposed else (depth, width)
    steps = x.shape[1] // depth
    pending = 1 if steps > 1 else 0
    specs = [
        _block((ROWS, depth), _along, x.dtype, pending),
        _block(block, _along if transposed else _down, weights.dtype, pending),
    ]

    def multiply(indices: Any, x_here: Any, weights_here: Any, total: Any) -> Any:
        rows = pl.ds(lax.axis_index("group") * 64, 64)
        weight = weights_here.transpose((1, 0)) if transposed else weights_here
        plgpu.wgmma(total, x_here.at[rows], weight)
        plgpu.wgmma_wait(pending)
        return total

    across = out.shape[1] // width

    def sources(tile: Any) -> Any:
        row, column = lax.div(tile, across), lax.rem(tile, across)
        group = tiles[row]
        at = pl.ds(column * width, width)
        chosen = jnp.minimum(group, groups - 1)
        weight = weights.at[chosen, at] if transposed else weights.at[chosen, :, at]
        inputs = x.at[pl.ds(row * ROWS, ROWS)], weight
        return group < groups, steps, inputs, out.at[pl.ds(row * ROWS, ROWS), at]

    count = (x.shape[0] // ROWS) * across
    _tiles(count, specs, multiply, sources, (x, weights.at[0]), out.dtype, width, scale)


def _weights_kernel(x: Any, y: Any, starts: Any, sizes: Any, *refs: Any, transposed: bool) -> None:
    pl, plgpu = pallas(), mosaic()
    *scale, out = refs
    groups, height, breadth = out.shape
    width = columns(breadth)
    assert width is not None
    down, across = height // ROWS, breadth // width
    depth, order = _depth(x), _along if transposed else _down
    pending = 1 if depth < ROWS else 0  # a group of 128 rows of 8 bits is one step
    specs = [
        _block((size, depth) if transposed else (depth, size), order, ref.dtype, pending)
        for size, ref in ((ROWS, x), (width, y))
    ]

    def multiply(indices: Any, x_here: Any, y_here: Any, total: Any) -> Any:
        rows = pl.ds(lax.axis_index("group") * 64, 64)
        if transposed:
            plgpu.wgmma(total, x_here.at[rows], y_here.transpose((1, 0)))
        else:
            plgpu.wgmma(total, x_here.at[:, rows].transpose((1, 0)), y_here)
        plgpu.wgmma_wait(pending)
        return total

    def sources(tile: Any) -> Any:
        group, place = lax.div(tile, down * across), lax.rem(tile, down * across)
        row, column = lax.div(place, across), lax.rem(place, across)
        of_x, of_y = pl.ds(row * ROWS, ROWS), pl.ds(column * width, width)
        start, steps = starts[group], sizes[group]
        rows = pl.ds(start * depth, x.shape[1 if transposed else 0])
        if transposed:
            inputs = x.at[of_x, rows], y.at[of_y, rows]
        else:
            inputs = x.at[rows, of_x], y.at[rows, of_y]
        return True, steps, inputs, out.at[group, of_x, of_y]

    count = groups * down * across
    _tiles(count, specs, multiply, sources, (x, y), out.dtype, width, scale)


def _tiles(
    count: int,
    specs: list[Any],
    multiply: Any,
    sources: Any,
    like: tuple[Any, Any],
    dtype: Any,
    width: int,
    scale: list[Any],
) -> None:
    """One tile after another: the sum of the products of its blocks, written to global memory.

    `scale`: nothing, or one number that multiplies the sums.
    """
    pl, plgpu = pallas(), mosaic()

    def pipeline(steps: Any, body: Any, context: Any) -> Any:
        return plgpu.emit_pipeline_warp_specialized(
            body,
            grid=(steps,),
            in_specs=specs,
            memory_registers=40,
            wg_axis="group",
            num_compute_wgs=_GROUPS,
            max_concurrent_steps=_STAGES,
            compute_context=context,
        )

    nothing = lambda *_, **__: None  # noqa: E731
    room = pipeline(_STAGES, nothing, nothing).get_allocations(*like)
    parts = plgpu.SMEM((_GROUPS, 2, _PART, _PART), dtype, transforms=_transforms(dtype))

    def scope(room: Any, parts: Any) -> None:
        group = lax.axis_index("group")

        def tile(info: Any) -> None:
            is_used, steps, inputs, target = sources(info.index[0])

            def compute(run: Any) -> None:
                def with_total(total: Any) -> None:
                    run(total)
                    values = total[...]
                    for ref in scale:
                        values *= ref[0]
                    values = values.astype(dtype)
                    for part in range(width // _PART):
                        at = slice(part * _PART, (part + 1) * _PART)
                        # an odd number of parts ends where the next tile begins
                        plgpu.wait_smem_to_gmem(min(part, 1), wait_read_only=True)
                        parts[group, part % 2] = values[:, at]
                        plgpu.commit_smem()
                        plgpu.copy_smem_to_gmem(
                            parts.at[group, part % 2],
                            target.at[pl.ds(group * 64, 64), pl.ds(part * _PART, _PART)],
                        )

                pl.run_scoped(with_total, plgpu.ACC((64, width), jnp.float32))

            @when(is_used)
            def _() -> None:
                pipeline(steps, multiply, compute)(*inputs, allocations=room)

        plgpu.nd_loop((count,), collective_axes="processor")(tile)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    pl.run_scoped(scope, room, parts, collective_axes="group")
