"""The backward pass of attention on Hopper GPUs, in Mosaic GPU.

Each thread block has 128 keys with their values, 64 for each of two compute warpgroups; a third
warpgroup fetches queries, 64 at a time, of all heads that share the keys. With keys as rows of the
matrices, a warpgroup computes:

    scores, and gradients of weights    S = K Qᵀ,    dP = V dOᵀ
    weights, and gradients of scores    P = exp(S - lse),    dS = P (dP - sum(dO O))
    its own gradients                dV += P dO,    dK += dS Q

P and dS stay in registers, where the next matmul reads them. dQ needs dS of both warpgroups: they
write it to shared memory and multiply it with the keys one iteration later, so that neither waits
for the other. Sums over thread blocks accumulate in global memory, in float32.

With head_dim 64 the two warpgroups alternate at dQ; with 128 each computes 64 of its columns.
There, registers are scarce: keys are read from shared memory, and the accumulators of S and dP
start with the terms that are subtracted above.

All vectors are stored as one or two arrays of 64 columns.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.ops.attention.block import Gradients, Partial
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

_HALF = RUNS.k // 2  # keys of a warpgroup
_COLUMNS = 64  # columns of a vector in one array


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    output: Partial,
    dout: jax.Array,
    mask: Mask,
    documents: Documents | None,
    dtype: Any = None,
) -> Gradients:
    """Gradients from these keys; `output` may be over more keys.

    `dtype` is that of the gradients: None for that of the queries, or float32.
    """
    dtype = jnp.dtype(dtype or q.dtype)
    batch, queries, heads, head_dim = q.shape
    keys, kv_heads = k.shape[1:3]
    sizes = _Sizes(keys, kv_heads, heads // kv_heads, head_dim, documents is not None)
    guided = guide("keys", mask, documents, Lengths(queries, keys))
    dout = dout.astype(q.dtype)
    dots = jnp.sum(output.out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1)
    lse = output.lse * (LOG2_E if sizes.roomy else head_dim**0.5)
    starts = (jnp.swapaxes(-x, 1, 2) for x in (lse, dots))

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        sums = jax.new_ref(jnp.zeros(q.shape, jnp.float32))
        of_keys = jax.ShapeDtypeStruct(k.shape, dtype)
        k_gradient, v_gradient = mosaic().kernel(
            lambda *refs: _block(sizes, mask, _Refs(*refs)),
            out_type=(of_keys, of_keys),
            scratch_types=_scratch(q.dtype, sizes),
            grid=(batch * kv_heads * sizes.blocks,),
            grid_names=("block",),
            num_threads=3,
            thread_name="group",
            compiler_params=mosaic().CompilerParams(approx_math=True),
        )(*arrays, sums)
        return jax.freeze(sums).astype(dtype), k_gradient, v_gradient

    return Gradients(*untyped(run, q, k, v, dout, *starts, *guided))


class _Sizes(NamedTuple):
    keys: int
    kv_heads: int
    group: int  # query heads that share a key head
    head_dim: int
    documents: bool

    @property
    def blocks(self) -> int:
        return self.keys // RUNS.k

    @property
    def columns(self) -> int:
        return self.head_dim // _COLUMNS

    @property
    def roomy(self) -> bool:
        """Whether registers have room for the keys and for subtractions after the matmuls."""
        return self.columns == 1

    @property
    def stages(self) -> int:
        """Runs of queries in flight."""
        return 3 if self.roomy else 2

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread: of compute warpgroups, and of the one that fetches."""
        return (232, 40) if self.roomy else (240, 24)


class _Refs(NamedTuple):
    """Global memory, shared memory (`_here`) and barriers (`_came`, `_used`) of a thread block."""

    q: Any  # global memory: [batch, queries, heads, head_dim]
    k: Any
    v: Any
    dout: Any
    scores_start: Any  # [batch, heads, queries]: initial value of the accumulator
    weight_gradients_start: Any
    q_documents: Any  # [batch, queries]
    k_documents: Any
    spans: Any  # [batch or 1, blocks, 4]
    q_gradient: Any
    k_gradient: Any
    v_gradient: Any
    k_here: Any  # shared memory: [2, columns, 64, 64]
    v_here: Any
    q_here: Any  # [stages, columns, 64, 64]
    dout_here: Any
    scores_start_here: Any  # [stages, 64]
    weight_gradients_start_here: Any
    q_documents_here: Any
    k_documents_here: Any  # [2, 64]
    numbers: Any  # [2, 64]: 0, 1, .. 63
    gradients: Any  # of scores: [iteration, warpgroup, keys, queries]
    q_gradient_here: Any  # [warpgroup, queries, 64], float32
    keys_came: Any
    q_came: Any
    dout_came: Any
    used: Any
    gradients_came: Any
    gradients_used: Any
    done: Any


def _scratch(dtype: Any, sizes: _Sizes) -> list[Any]:
    plgpu, columns, stages = mosaic(), sizes.columns, sizes.stages
    swizzle = plgpu.SwizzleTransform(128)
    tiled = (plgpu.TilingTransform((8, 64)), swizzle)
    tiled_float32 = (plgpu.TilingTransform((8, 32)), swizzle)

    def tiles(*shape: int) -> Any:
        return plgpu.SMEM(shape, dtype, transforms=tiled)

    def barrier(arrivals: int, *number: int) -> Any:
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=number)

    per_query = plgpu.SMEM((stages, RUNS.q), jnp.float32)
    with_documents = 1 if sizes.documents else 0
    return [
        *(tiles(2, columns, _HALF, _COLUMNS) for _ in range(2)),
        *(tiles(stages, columns, RUNS.q, _COLUMNS) for _ in range(2)),
        *(per_query, per_query),
        plgpu.SMEM((stages, RUNS.q), jnp.int32),
        *(plgpu.SMEM((2, n), jnp.int32) for n in (_HALF, RUNS.q)),
        tiles(2, 2, _HALF, RUNS.q),
        plgpu.SMEM((2, RUNS.q, _COLUMNS), jnp.float32, transforms=tiled_float32),
        barrier(4 * columns + 2 * with_documents),
        *(barrier(columns + 1 + with_documents, stages), barrier(columns + 1, stages)),
        *(barrier(2, stages), barrier(2, 2), barrier(columns, 2), barrier(2)),
    ]


def _block(sizes: _Sizes, mask: Mask, refs: _Refs) -> None:
    """The program of one thread block."""
    plgpu = mosaic()
    group, block = lax.axis_index("group"), lax.axis_index("block")
    # the first keys, which most queries attend to, start first
    batch, queries = refs.q.shape[:2]
    queried = 2 * 2 * queries * sizes.group * sizes.head_dim  # bytes of queries and dout
    tile, pair = tile_and_pair(block, sizes.blocks, batch * sizes.kv_heads, queried)
    place = _Place(lax.div(pair, sizes.kv_heads), lax.rem(pair, sizes.kv_heads), tile)
    span_index = place.sequence if refs.spans.shape[0] > 1 else jnp.int32(0)
    first, whole, whole_end, end = Span(
        *(refs.spans[span_index, tile, number] for number in range(4))
    )
    runs = _Runs(first, end - first, whole - first, whole_end - first, sizes.group)
    of_computing, of_fetching = sizes.registers

    @when(group == 2)
    def _() -> None:
        plgpu.set_max_registers(of_fetching, action="decrease")
        _fetch(refs, place, runs, sizes)

    @when(group < 2)
    def _() -> None:
        plgpu.set_max_registers(of_computing, action="increase")
        _compute(refs, place, runs, group, mask, sizes)


class _Place(NamedTuple):
    sequence: Any
    kv_head: Any
    tile: Any  # index of the run of keys in the sequence

    def keys(self, group: Any) -> Any:
        """The keys of one warpgroup, as indices into global memory."""
        return pallas().ds(self.tile * RUNS.k + group * _HALF, _HALF)


class _Runs(NamedTuple):
    """The runs of queries that attend to a block's keys, the same for each head."""

    first: Any
    number: Any  # per head
    whole: Any  # start of the runs that need no mask
    whole_end: Any  # and their end
    heads: int

    def each(self, do: Any) -> None:
        """do(head, run, iteration): iterations count the runs of all heads."""

        def head(h: Any, _: Any) -> None:
            lax.fori_loop(0, self.number, lambda r, _: do(h, r, h * self.number + r), None)

        lax.fori_loop(0, self.heads, head, None)

    def queries(self, run: Any) -> Any:
        return pallas().ds((self.first + run) * RUNS.q, RUNS.q)


def _column(column: Any) -> Any:
    return pallas().ds(column * _COLUMNS, _COLUMNS)


def _fetch(refs: _Refs, place: _Place, runs: _Runs, sizes: _Sizes) -> None:
    """Fetch the keys, then queries as stages become free."""
    copy = mosaic().copy_gmem_to_smem
    for half in range(2):
        keys = place.keys(half)
        for column in range(sizes.columns):
            at = place.sequence, keys, place.kv_head, _column(column)
            copy(refs.k.at[at], refs.k_here.at[half, column], refs.keys_came)
            copy(refs.v.at[at], refs.v_here.at[half, column], refs.keys_came)
        if sizes.documents:
            of_keys = refs.k_documents.at[place.sequence, keys]
            copy(of_keys, refs.k_documents_here.at[half], refs.keys_came)

    def fetch(head: Any, run: Any, iteration: Any) -> None:
        stage = lax.rem(iteration, sizes.stages)

        @when(iteration >= sizes.stages)
        def _() -> None:
            mosaic().barrier_wait(refs.used.at[stage])

        head, queries = place.kv_head * runs.heads + head, runs.queries(run)
        q_came, dout_came = refs.q_came.at[stage], refs.dout_came.at[stage]
        vectors = [(place.sequence, queries, head, _column(c)) for c in range(sizes.columns)]
        for column, at in enumerate(vectors):
            copy(refs.q.at[at], refs.q_here.at[stage, column], q_came)
        sums = place.sequence, head, queries
        copy(refs.scores_start.at[sums], refs.scores_start_here.at[stage], q_came)
        if sizes.documents:
            of_queries = refs.q_documents.at[place.sequence, queries]
            copy(of_queries, refs.q_documents_here.at[stage], q_came)
        for column, at in enumerate(vectors):
            copy(refs.dout.at[at], refs.dout_here.at[stage, column], dout_came)
        starts = refs.weight_gradients_start.at[sums], refs.weight_gradients_start_here.at[stage]
        copy(*starts, dout_came)

    runs.each(fetch)


def _compute(
    refs: _Refs, place: _Place, runs: _Runs, group: Any, mask: Mask, sizes: _Sizes
) -> None:
    """dk and dv of a warpgroup, and its part of dq."""
    pl, plgpu = pallas(), mosaic()
    registers, scale = plgpu.Layout.WGMMA, sizes.head_dim**-0.5
    columns, stages = sizes.columns, sizes.stages
    tile = (_HALF, RUNS.q)
    plgpu.barrier_wait(refs.keys_came)

    def own(ref: Any) -> list[Any]:
        refs = [ref.at[group, column] for column in range(columns)]
        return [load(ref, registers) for ref in refs] if sizes.roomy else refs

    k, v = own(refs.k_here), own(refs.v_here)
    # index of each query in a run; in shared memory, to save registers
    numbers = plgpu.broadcasted_iota(jnp.int32, (RUNS.q,), 0, layout=registers.reduce(0))
    refs.numbers[group] = numbers
    plgpu.commit_smem()

    def along_queries(ref: Any) -> jax.Array:
        return lax.broadcast_in_dim(load(ref, registers.reduce(0)), tile, [1])

    def with_mask(run: Any, stage: Any, scores: jax.Array) -> jax.Array:
        key = plgpu.broadcasted_iota(jnp.int32, tile, 0, layout=registers)
        query = along_queries(refs.numbers.at[group])
        start = place.tile * RUNS.k + group * _HALF
        documents = None
        if sizes.documents:
            of_keys = load(refs.k_documents_here.at[group], registers.reduce(1))
            of_keys = lax.broadcast_in_dim(of_keys, tile, [0])
            documents = of_keys, along_queries(refs.q_documents_here.at[stage])
        query, key = query + (runs.first + run) * RUNS.q, key + start
        return masked(scores, mask, query, key, documents)

    def weights_and_gradients(run: Any, iteration: Any) -> Any:
        stage = lax.rem(iteration, stages)

        def masked_in_part(scores: jax.Array) -> jax.Array:
            in_part = (run < runs.whole) | (run >= runs.whole_end)
            found: jax.Array = lax.cond(
                in_part, lambda scores: with_mask(run, stage, scores), lambda scores: scores, scores
            )
            return found

        def start_of_scores() -> jax.Array:
            return along_queries(refs.scores_start_here.at[stage])

        def gradients_start() -> jax.Array:
            return along_queries(refs.weight_gradients_start_here.at[stage])

        def multiply(scores: Any, weight_gradients: Any) -> Any:
            if not sizes.roomy:
                scores[...] = masked_in_part(start_of_scores())
                weight_gradients[...] = gradients_start()
            for c in range(columns):
                plgpu.wgmma(scores, k[c], refs.q_here.at[stage, c].transpose((1, 0)))
            for c in range(columns):
                plgpu.wgmma(weight_gradients, v[c], refs.dout_here.at[stage, c].transpose((1, 0)))
            found = plgpu.wgmma_accumulator_load(scores, wait_n=columns) * (scale * LOG2_E)

            # matmuls complete in order: those of the previous iteration have read their operands
            @when(iteration >= 1)
            def _() -> None:
                plgpu.barrier_arrive(refs.used.at[lax.rem(iteration + stages - 1, stages)])

            if sizes.roomy:
                found = masked_in_part(found + start_of_scores())
            weights = jnp.exp2(found)  # while the other matmul runs
            gradients = plgpu.wgmma_accumulator_load(weight_gradients, wait_n=0)
            return weights, gradients + gradients_start() if sizes.roomy else gradients

        sums = plgpu.ACC(tile, jnp.float32)
        return pl.run_scoped(multiply, sums, sums)

    def queries(head: Any, run: Any, parity: Any) -> None:
        """dq from all keys of the block, added to global memory."""
        column = 0 if columns == 1 else group
        plgpu.barrier_wait(refs.gradients_came.at[parity])

        def multiply(sums: Any) -> jax.Array:
            for half in range(2):
                gradients = refs.gradients.at[parity, half].transpose((1, 0))
                plgpu.wgmma(sums, gradients, refs.k_here.at[half, column])
            found: jax.Array = plgpu.wgmma_accumulator_load(sums)
            return found

        found = pl.run_scoped(multiply, plgpu.ACC((RUNS.q, _COLUMNS), jnp.float32))
        plgpu.barrier_arrive(refs.gradients_used.at[parity])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        refs.q_gradient_here[group] = found * scale
        plgpu.commit_smem()
        head = place.kv_head * runs.heads + head
        at = place.sequence, runs.queries(run), head, _column(column)
        plgpu.copy_smem_to_gmem(
            refs.q_gradient_here.at[group], refs.q_gradient.at[at], reduction_op="add"
        )

    def mine(parity: Any) -> Any:
        """Whether this warpgroup computes dq in iterations of this parity."""
        return parity == group if columns == 1 else parity >= 0

    def all_runs(*sums: Any) -> Any:
        k_gradient, v_gradient = sums[:columns], sums[columns:]

        def one(head: Any, run: Any, iteration: Any) -> None:
            stage, parity = lax.rem(iteration, stages), lax.rem(iteration, 2)
            plgpu.barrier_wait(refs.q_came.at[stage])
            plgpu.barrier_wait(refs.dout_came.at[stage])
            weights, weight_gradients = weights_and_gradients(run, iteration)
            cast_weights = weights.astype(refs.k.dtype)
            for c in range(columns):
                plgpu.wgmma(v_gradient[c], cast_weights, refs.dout_here.at[stage, c])
            gradients = (weights * weight_gradients).astype(refs.k.dtype)
            for c in range(columns):
                plgpu.wgmma(k_gradient[c], gradients, refs.q_here.at[stage, c])

            @when(iteration >= 2)
            def _() -> None:
                plgpu.barrier_wait(refs.gradients_used.at[parity])

            refs.gradients[parity, group] = gradients
            plgpu.commit_smem()
            plgpu.barrier_arrive(refs.gradients_came.at[parity])

            @when((iteration >= 1) & mine(1 - parity))
            def _() -> None:
                begins = run == 0  # the previous iteration was the last of another head
                before = jnp.where(begins, runs.number, run) - 1
                queries(jnp.where(begins, head - 1, head), before, 1 - parity)

            if not sizes.roomy:  # otherwise their operands stay in registers
                plgpu.wgmma_wait(0)

        runs.each(one)
        last = lax.rem(runs.number * runs.heads - 1, 2)  # -1 without any run

        @when(mine(last))
        def _() -> None:
            queries(runs.heads - 1, runs.number - 1, last)

        return tuple(plgpu.wgmma_accumulator_load(x) for x in sums)

    sums = plgpu.ACC((_HALF, _COLUMNS), jnp.float32)
    found = pl.run_scoped(all_runs, *(sums,) * (2 * columns))
    plgpu.barrier_arrive(refs.done)
    plgpu.barrier_wait(refs.done)  # all keys are read, so their memory can hold gradients
    k_found, v_found = [x * scale for x in found[:columns]], found[columns:]

    def at(column: int) -> Any:
        return place.sequence, place.keys(group), place.kv_head, _column(column)

    if refs.k_gradient.dtype != refs.k.dtype:  # float32: through the buffer of dq
        for c in range(columns):
            for gradient, target in ((k_found[c], refs.k_gradient), (v_found[c], refs.v_gradient)):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                refs.q_gradient_here[group] = gradient
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(refs.q_gradient_here.at[group], target.at[at(c)])
        plgpu.wait_smem_to_gmem(0)
        return
    for c in range(columns):
        refs.k_here[group, c] = k_found[c].astype(refs.k.dtype)
        refs.v_here[group, c] = v_found[c].astype(refs.k.dtype)
    plgpu.commit_smem()
    for c in range(columns):
        plgpu.copy_smem_to_gmem(refs.k_here.at[group, c], refs.k_gradient.at[at(c)])
        plgpu.copy_smem_to_gmem(refs.v_here.at[group, c], refs.v_gradient.at[at(c)])
    plgpu.wait_smem_to_gmem(0)
