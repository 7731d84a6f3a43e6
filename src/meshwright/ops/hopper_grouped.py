"""Grouped matmul on Hopper GPUs, in Mosaic GPU, of groups that begin at multiples of 128 rows.

So a tile of rows is of one group: no tile is masked, and every tile is written whole. Two compute
warpgroups have 64 rows of a tile of 128 × 256 each; a third fetches blocks of both operands.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.ops.collectives import untyped
from meshwright.ops.mosaic import mosaic, pallas, when

ROWS = 128  # of a tile
_GROUPS = 2  # compute warpgroups
_BYTES = 128  # of a block, along the dim that is summed
_DEPTH = _BYTES // 2  # the same, in numbers of 16 bits
_STAGES = 4  # blocks in flight
_PART = 64  # rows and columns that are written at a time


def columns(size: int) -> int | None:
    """Those of a tile: the most that divide a matrix; None if none do."""
    return next((n for n in (256, 192, 128, 64) if size % n == 0), None)


def rows_product(
    x: jax.Array,
    weights: jax.Array,
    tiles: jax.Array,
    transposed: bool = False,
    dtype: Any = None,
) -> jax.Array:
    """[rows, out] of x [rows, in] and weights [groups, in, out]; or, transposed, [groups, out, in].

    `tiles` [rows / 128] are their groups; tiles of the group after the last are not written. In 8
    bits the weights are transposed; `dtype` is that of the result, if it is not that of x.
    """
    groups, *sizes = weights.shape
    width = sizes[0] if transposed else sizes[1]

    def run(*arrays: jax.Array) -> jax.Array:
        body = functools.partial(_rows_kernel, groups=groups, transposed=transposed)
        return _kernel(body, (x.shape[0], width), dtype or x.dtype)(*arrays)

    found: jax.Array = untyped(run, x, weights, tiles)
    return found


def weights_product(x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
    """[groups, in, out]: of each group of rows the product of x [rows, in] and y [rows, out].

    `sizes` [groups] are multiples of 128. A group of no rows gets zeros.
    """
    shape = (sizes.shape[0], x.shape[1], y.shape[1])
    ends, steps = jnp.cumsum(sizes) // _DEPTH, sizes // _DEPTH

    def run(*arrays: jax.Array) -> jax.Array:
        return _kernel(_weights_kernel, shape, x.dtype)(*arrays)

    found: jax.Array = untyped(run, x, y, ends - steps, steps)
    return found


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


def _transforms(depth: int = _DEPTH) -> tuple[Any, ...]:
    plgpu = mosaic()
    return plgpu.TilingTransform((8, depth)), plgpu.SwizzleTransform(_BYTES)


def _rows_kernel(
    x: Any, weights: Any, tiles: Any, out: Any, *, groups: int, transposed: bool
) -> None:
    pl, plgpu = pallas(), mosaic()
    width = columns(out.shape[1])
    assert width is not None
    depth = _BYTES // x.dtype.itemsize
    block = (width, depth) if transposed else (depth, width)
    steps = x.shape[1] // depth

    def specs() -> list[Any]:
        return [
            plgpu.BlockSpec(
                (ROWS, depth), lambda i: (0, i), transforms=_transforms(depth), delay_release=1
            ),
            plgpu.BlockSpec(
                block,
                (lambda i: (0, i)) if transposed else (lambda i: (i, 0)),
                transforms=_transforms(depth),
                delay_release=1,
            ),
        ]

    def multiply(indices: Any, x_here: Any, weights_here: Any, total: Any) -> Any:
        rows = pl.ds(lax.axis_index("group") * 64, 64)
        weight = weights_here.transpose((1, 0)) if transposed else weights_here
        plgpu.wgmma(total, x_here.at[rows], weight)
        plgpu.wgmma_wait(1)
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
    _tiles(count, specs(), multiply, sources, (x, weights.at[0]), out.dtype, width)


def _weights_kernel(x: Any, y: Any, starts: Any, sizes: Any, out: Any) -> None:
    pl, plgpu = pallas(), mosaic()
    groups, height, breadth = out.shape
    width = columns(breadth)
    assert width is not None
    down, across = height // ROWS, breadth // width

    def specs() -> list[Any]:
        shapes = (_DEPTH, ROWS), (_DEPTH, width)
        return [
            plgpu.BlockSpec(shape, lambda i: (i, 0), transforms=_transforms(), delay_release=1)
            for shape in shapes
        ]

    def multiply(indices: Any, x_here: Any, y_here: Any, total: Any) -> Any:
        rows = pl.ds(lax.axis_index("group") * 64, 64)
        plgpu.wgmma(total, x_here.at[:, rows].transpose((1, 0)), y_here)
        plgpu.wgmma_wait(1)
        return total

    def sources(tile: Any) -> Any:
        group, place = lax.div(tile, down * across), lax.rem(tile, down * across)
        row, column = lax.div(place, across), lax.rem(place, across)
        of_x, of_y = pl.ds(row * ROWS, ROWS), pl.ds(column * width, width)
        start, steps = starts[group], sizes[group]
        rows = pl.ds(start * _DEPTH, x.shape[0])
        return True, steps, (x.at[rows, of_x], y.at[rows, of_y]), out.at[group, of_x, of_y]

    _tiles(groups * down * across, specs(), multiply, sources, (x, y), out.dtype, width)


def _tiles(
    count: int,
    specs: list[Any],
    multiply: Any,
    sources: Any,
    like: tuple[Any, Any],
    dtype: Any,
    width: int,
) -> None:
    """One tile after another: the sum of the products of its blocks, written to global memory."""
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
    parts = plgpu.SMEM((_GROUPS, 2, _PART, _PART), dtype, transforms=_transforms())

    def scope(room: Any, parts: Any) -> None:
        group = lax.axis_index("group")

        def tile(info: Any) -> None:
            is_used, steps, inputs, target = sources(info.index[0])

            def compute(run: Any) -> None:
                def with_total(total: Any) -> None:
                    run(total)
                    values = total[...].astype(dtype)
                    for part in range(width // _PART):
                        at = slice(part * _PART, (part + 1) * _PART)
                        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
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
