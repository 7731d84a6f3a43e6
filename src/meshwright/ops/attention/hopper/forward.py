"""The forward pass of attention on Hopper GPUs, in Mosaic GPU.

Each thread block has queries of one head, 64 for each of two or three compute warpgroups (limited
by registers). One more warpgroup fetches runs (tiles) of keys and values, which all of them read:

    scores                            S = Q Kᵀ
    weights                           P = exp(S - most),    sum += P
    output                            out += P V

`most` is the running maximum of each query's scores; when it grows, the sums are rescaled. While
one warpgroup computes weights, another runs its matmuls.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.ops.attention.block import Partial
from meshwright.ops.attention.hopper.spans import (
    RUNS,
    Documents,
    Lengths,
    Span,
    guide,
    masked,
    tile_and_pair,
)
from meshwright.ops.attention.mask import Mask
from meshwright.ops.collectives import untyped
from meshwright.ops.mosaic import LOG2_E, load, mosaic, pallas, when

_STAGES = 2  # runs of keys in flight
_LEAST = -1e30  # the maximum without scores: finite, so that it can be subtracted from itself


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Mask,
    documents: Documents | None,
    dtype: Any = None,
) -> Partial:
    """Output and lse; zero and -inf for a query without any of these keys.

    The output has the queries' dtype; or float32, written as two arrays of that dtype (the value
    and its rounding error), since shared memory has no room for float32.
    """
    in_two = dtype is not None and jnp.dtype(dtype) != q.dtype
    batch, queries, heads, head_dim = q.shape
    sizes = _Sizes(heads, heads // k.shape[2], head_dim, documents is not None)
    guided = guide("queries", mask, documents, Lengths(queries, k.shape[1]))

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        found: tuple[jax.Array, ...] = mosaic().kernel(
            lambda *refs: _block(
                sizes, mask, _Refs(*refs if in_two else (*refs[:8], None, *refs[8:]))
            ),
            out_type=(
                jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32),
                *(jax.ShapeDtypeStruct(q.shape, q.dtype),) * (2 if in_two else 1),
            ),
            scratch_types=_scratch(q.dtype, sizes),
            grid=(batch * heads * sizes.tiles(queries),),
            grid_names=("block",),
            num_threads=sizes.groups + 1,
            thread_name="group",
            compiler_params=mosaic().CompilerParams(approx_math=True),
        )(*arrays)
        return found

    lse, *outs = untyped(run, q, k, v, *guided)
    out = outs[0].astype(jnp.float32) + outs[1].astype(jnp.float32) if in_two else outs[0]
    return Partial(out, jnp.swapaxes(lse, 1, 2))


class _Sizes(NamedTuple):
    heads: int
    group: int  # query heads that share a key head
    head_dim: int
    documents: bool

    @property
    def groups(self) -> int:
        """Number of compute warpgroups."""
        return 3 if self.head_dim == 64 else 2

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread: of compute warpgroups, and of the one that fetches."""
        return (160, 32) if self.groups == 3 else (240, 24)

    def tiles(self, queries: int) -> int:
        return -(-(queries // RUNS.q) // self.groups)


class _Refs(NamedTuple):
    """Global memory, shared memory (`_here`) and barriers (`_came`, `_used`) of a thread block."""

    q: Any  # global memory: [batch, queries, heads, head_dim]
    k: Any
    v: Any
    q_documents: Any  # [batch, queries]
    k_documents: Any
    spans: Any  # [batch or 1, runs of queries, 4]
    lse: Any  # [batch, heads, queries]
    out: Any
    out_rest: Any  # None unless the output is float32
    q_here: Any  # shared memory: [groups, 64, head_dim]
    k_here: Any  # [stages, 128, head_dim]
    v_here: Any
    q_documents_here: Any  # [groups, 64]
    k_documents_here: Any  # [stages, 128]
    lse_here: Any  # [groups, 64]
    q_came: Any
    k_came: Any
    v_came: Any
    k_used: Any
    v_used: Any


def _scratch(dtype: Any, sizes: _Sizes) -> list[Any]:
    plgpu, groups = mosaic(), sizes.groups
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    def tiles(number: int, length: int) -> Any:
        return plgpu.SMEM((number, length, sizes.head_dim), dtype, transforms=transforms)

    def barrier(arrivals: int, number: int) -> Any:
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=number)

    with_documents = 2 if sizes.documents else 1
    return [
        tiles(groups, RUNS.q),
        *(tiles(_STAGES, RUNS.k) for _ in range(2)),
        plgpu.SMEM((groups, RUNS.q), jnp.int32),
        plgpu.SMEM((_STAGES, RUNS.k), jnp.int32),
        plgpu.SMEM((groups, RUNS.q), jnp.float32),
        barrier(with_documents, groups),
        *(barrier(with_documents, _STAGES), barrier(1, _STAGES)),
        *(barrier(groups, _STAGES) for _ in range(2)),
    ]


class _Place(NamedTuple):
    """What a thread block computes, and the runs of keys that any of its warpgroups needs."""

    sequence: Any
    head: Any
    kv_head: Any
    first: Any
    end: Any


def _block(sizes: _Sizes, mask: Mask, refs: _Refs) -> None:
    """The program of one thread block."""
    plgpu = mosaic()
    group, block = lax.axis_index("group"), lax.axis_index("block")
    runs = refs.q.shape[1] // RUNS.q
    tiles = sizes.tiles(refs.q.shape[1])
    read = 2 * 2 * refs.k.shape[1] * sizes.head_dim  # bytes of keys and values
    from_last, pair = tile_and_pair(block, tiles, refs.q.shape[0] * sizes.heads, read)
    tile = tiles - 1 - from_last  # the last queries attend to most keys
    sequence, head = lax.div(pair, sizes.heads), lax.rem(pair, sizes.heads)
    span_index = sequence if refs.spans.shape[0] > 1 else jnp.int32(0)

    def run_of(group: Any) -> Any:
        return jnp.minimum(tile * sizes.groups + group, runs - 1)  # the last may be computed twice

    def span(group: Any) -> Span:
        return Span(*(refs.spans[span_index, run_of(group), number] for number in range(4)))

    first, end = jnp.int32(2**30), jnp.int32(0)
    for one in map(span, range(sizes.groups)):
        first = jnp.where(one.end > one.first, jnp.minimum(first, one.first), first)
        end = jnp.maximum(end, one.end)
    first = jnp.minimum(first, end)
    place = _Place(sequence, head, lax.div(head, sizes.group), first, end)
    of_computing, of_fetching = sizes.registers

    @when(group == sizes.groups)
    def _() -> None:
        plgpu.set_max_registers(of_fetching, action="decrease")
        _fetch(refs, place, sizes)

    @when(group < sizes.groups)
    def _() -> None:
        plgpu.set_max_registers(of_computing, action="increase")
        own = Span(*(jnp.clip(number, first, end) for number in span(group)))
        _compute(refs, place, sizes, mask, own, group, run_of(group) * RUNS.q)


def _fetch(refs: _Refs, place: _Place, sizes: _Sizes) -> None:
    """Fetch keys and values as stages become free."""
    plgpu = mosaic()

    def fetch(run: Any, carry: None) -> None:
        iteration = run - place.first
        stage, keys = lax.rem(iteration, _STAGES), pallas().ds(run * RUNS.k, RUNS.k)
        at = place.sequence, keys, place.kv_head

        @when(iteration >= _STAGES)
        def _() -> None:
            plgpu.barrier_wait(refs.k_used.at[stage])

        plgpu.copy_gmem_to_smem(refs.k.at[at], refs.k_here.at[stage], refs.k_came.at[stage])
        if sizes.documents:
            plgpu.copy_gmem_to_smem(
                refs.k_documents.at[place.sequence, keys],
                refs.k_documents_here.at[stage],
                refs.k_came.at[stage],
            )

        @when(iteration >= _STAGES)
        def _() -> None:
            plgpu.barrier_wait(refs.v_used.at[stage])

        plgpu.copy_gmem_to_smem(refs.v.at[at], refs.v_here.at[stage], refs.v_came.at[stage])

    lax.fori_loop(place.first, place.end, fetch, None)


class _Sums(NamedTuple):
    out: jax.Array
    most: jax.Array
    total: jax.Array


def _compute(
    refs: _Refs, place: _Place, sizes: _Sizes, mask: Mask, span: Span, group: Any, start: Any
) -> None:
    """The output of a warpgroup, for the queries from `start`."""
    pl, plgpu = pallas(), mosaic()
    layout, tile = plgpu.Layout.WGMMA, (RUNS.q, RUNS.k)
    scale, queries = sizes.head_dim**-0.5 * LOG2_E, pl.ds(start, RUNS.q)
    at = place.sequence, queries, place.head
    plgpu.copy_gmem_to_smem(refs.q.at[at], refs.q_here.at[group], refs.q_came.at[group])
    if sizes.documents:
        plgpu.copy_gmem_to_smem(
            refs.q_documents.at[at[:2]], refs.q_documents_here.at[group], refs.q_came.at[group]
        )
    plgpu.barrier_wait(refs.q_came.at[group])

    def along_keys(x: jax.Array, width: int) -> jax.Array:
        return lax.broadcast_in_dim(x, (RUNS.q, width), [0])

    def with_mask(run: Any, stage: Any, scores: jax.Array) -> jax.Array:
        query, key = (
            plgpu.broadcasted_iota(jnp.int32, tile, dim, layout=layout) for dim in range(2)
        )
        documents = None
        if sizes.documents:
            of_queries = load(refs.q_documents_here.at[group], layout.reduce(1))
            of_keys = load(refs.k_documents_here.at[stage], layout.reduce(0))
            of_keys = lax.broadcast_in_dim(of_keys, tile, [1])
            documents = along_keys(of_queries, RUNS.k), of_keys
        return masked(scores, mask, query + start, key + run * RUNS.k, documents)

    def look(run: Any, sums: _Sums) -> _Sums:
        stage = lax.rem(run - place.first, _STAGES)
        plgpu.barrier_wait(refs.k_came.at[stage])

        def scores_of(scores: Any) -> jax.Array:
            plgpu.wgmma(scores, refs.q_here.at[group], refs.k_here.at[stage].transpose((1, 0)))
            found: jax.Array = scores[...]
            return found

        scores = pl.run_scoped(scores_of, plgpu.ACC(tile, jnp.float32))
        if not sizes.documents:
            plgpu.barrier_arrive(refs.k_used.at[stage])
        scores = lax.cond(
            (run < span.whole) | (run >= span.whole_end),
            lambda scores: with_mask(run, stage, scores), lambda scores: scores, scores,
        )  # fmt: skip
        if sizes.documents:
            plgpu.barrier_arrive(refs.k_used.at[stage])
        most = jnp.maximum(sums.most, scores.max(axis=1) * scale)
        shrink = jnp.exp2(sums.most - most)
        weights = jnp.exp2(scores * scale - along_keys(most, RUNS.k))
        total = sums.total * shrink + weights.sum(axis=1)
        out = sums.out * along_keys(shrink, sizes.head_dim)
        weights = weights.astype(refs.q.dtype)
        plgpu.barrier_wait(refs.v_came.at[stage])
        add = pl.run_state(lambda out: plgpu.wgmma(out, weights, refs.v_here.at[stage]))
        out = add(plgpu.ACC.init(out))
        plgpu.barrier_arrive(refs.v_used.at[stage])
        return _Sums(out, most, total)

    def pass_over(run: Any, carry: None) -> None:
        """Skip keys that only other warpgroups need."""
        stage = lax.rem(run - place.first, _STAGES)
        for came, used in ((refs.k_came, refs.k_used), (refs.v_came, refs.v_used)):
            plgpu.barrier_wait(came.at[stage])
            plgpu.barrier_arrive(used.at[stage])

    def filled(shape: tuple[int, ...], number: float, layout: Any) -> jax.Array:
        found: jax.Array = plgpu.layout_cast(jnp.full(shape, number, jnp.float32), layout)
        return found

    nothing = _Sums(
        filled((RUNS.q, sizes.head_dim), 0, layout),
        filled((RUNS.q,), _LEAST, layout.reduce(1)),
        filled((RUNS.q,), 0, layout.reduce(1)),
    )
    lax.fori_loop(place.first, span.first, pass_over, None)
    out, most, total = lax.fori_loop(span.first, span.end, look, nothing)
    lax.fori_loop(span.end, place.end, pass_over, None)
    some = jnp.where(total == 0, 1.0, total)
    out = out / along_keys(some, sizes.head_dim)
    cast_out = out.astype(refs.q.dtype)
    refs.q_here[group] = cast_out
    lse = (most + jnp.log(some) * LOG2_E) / LOG2_E
    refs.lse_here[group] = jnp.where(total == 0, -jnp.inf, lse)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(refs.q_here.at[group], refs.out.at[at])
    plgpu.copy_smem_to_gmem(
        refs.lse_here.at[group], refs.lse.at[place.sequence, place.head, queries]
    )
    plgpu.wait_smem_to_gmem(0)
    if refs.out_rest is not None:
        refs.q_here[group] = (out - cast_out.astype(jnp.float32)).astype(refs.q.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(refs.q_here.at[group], refs.out_rest.at[at])
        plgpu.wait_smem_to_gmem(0)
