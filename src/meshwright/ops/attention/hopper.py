"""The backward pass of attention on Hopper GPUs, by jax's Mosaic GPU.

Each block of threads holds 128 keys with their values, 64 for each of two warpgroups; a third
warpgroup fetches queries, 64 at a time, of all heads that share the keys. A warpgroup makes, with
keys as rows:

    scores, and slopes of weights    S = K Qᵀ,    dP = V dOᵀ
    weights, and slopes of scores    P = exp(S - log_sum),    dS = P (dP - sum(dO O))
    its own gradients                dV += P dO,    dK += dS Q

P and dS stay in registers, where the next matmul reads them. dQ needs dS of both warpgroups: they
leave it in shared memory and take turns in multiplying it with the keys, one turn late, so that
neither waits for the other; sums over blocks are added up in memory, in float32.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.ops.attention.block import Partial, Slopes
from meshwright.ops.exchange import untyped
from meshwright.ops.mosaic import HOPPER, LOG2_E, load, mosaic, pallas, say, unavailable, when

HEAD_DIM = 64  # what registers have room for
KEYS, QUERIES = 128, 64  # of a block, and that it takes at a time
_HALF = KEYS // 2  # of a warpgroup
_STAGES = 3  # runs of queries under way


def refuses(
    queries: int, keys: int, head_dim: int, *, causal: bool, documents: bool = False
) -> str | None:
    """Why such a call cannot be served, None if it can."""
    why = _why_not(queries, keys, head_dim, causal)
    if why is None and documents:
        why = "it does not know packed documents"
    say(f"backward of attention, {queries} queries and {keys} keys", why)
    return why


def _why_not(queries: int, keys: int, head_dim: int, causal: bool) -> str | None:
    why = unavailable(HOPPER)
    if why is not None:
        return why
    if head_dim != HEAD_DIM:
        return f"it is for a head_dim of {HEAD_DIM}, not {head_dim}"
    if queries % KEYS or keys % KEYS:
        return f"rows of {queries} and {keys} are not multiples of {KEYS}"
    if causal and queries != keys:
        return "its causal mask begins at the first key"
    return None


def backward(
    q: jax.Array, k: jax.Array, v: jax.Array, whole: Partial, given: jax.Array, *, causal: bool
) -> Slopes:
    """Gradients by these keys, where `whole` may be over more keys than these."""
    batch, queries, heads, _ = q.shape
    kv_heads = k.shape[2]
    sizes = _Sizes(queries, k.shape[1], kv_heads, heads // kv_heads, causal)
    given = given.astype(q.dtype)
    dots = jnp.sum(whole.out.astype(jnp.float32) * given.astype(jnp.float32), axis=-1)
    log_sum, dots = (jnp.swapaxes(x, 1, 2) for x in (whole.log_sum * LOG2_E, dots))

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        sums = jax.new_ref(jnp.zeros(q.shape, jnp.float32))
        of_keys = jax.ShapeDtypeStruct(k.shape, q.dtype)
        k_slope, v_slope = mosaic().kernel(
            lambda *refs: _block(sizes, _Refs(*refs)),
            out_type=(of_keys, of_keys),
            scratch_types=_scratch(q.dtype),
            grid=(batch * kv_heads * sizes.blocks,),
            grid_names=("block",),
            num_threads=3,
            thread_name="group",
            compiler_params=mosaic().CompilerParams(approx_math=True),
        )(*arrays, sums)
        return jax.freeze(sums).astype(q.dtype), k_slope, v_slope

    return Slopes(*untyped(run, q, k, v, given, log_sum, dots))


class _Sizes(NamedTuple):
    queries: int
    keys: int
    kv_heads: int
    group: int  # query heads that share a key head
    causal: bool

    @property
    def blocks(self) -> int:
        return self.keys // KEYS


class _Refs(NamedTuple):
    """What a block reads, writes and keeps. Barriers are named for what they say."""

    q: Any  # in memory: [batch, queries, heads, head_dim]
    k: Any
    v: Any
    given: Any
    log_sum: Any  # [batch, heads, queries], times log2(e)
    dots: Any
    q_slope: Any
    k_slope: Any
    v_slope: Any
    k_here: Any  # in shared memory: [2, 64, head_dim]
    v_here: Any
    q_here: Any  # [stages, 64, head_dim]
    given_here: Any
    log_sum_here: Any  # [stages, 64]
    dots_here: Any
    slopes: Any  # of scores: [turn, warpgroup, keys, queries]
    q_slope_here: Any  # [warpgroup, queries, head_dim], float32
    keys_came: Any
    q_came: Any
    given_came: Any
    used: Any
    slopes_came: Any
    slopes_used: Any
    done: Any


def _scratch(dtype: Any) -> list[Any]:
    plgpu = mosaic()
    swizzle = plgpu.SwizzleTransform(128)
    narrow = (plgpu.TilingTransform((8, 64)), swizzle)
    wide = (plgpu.TilingTransform((8, 32)), swizzle)

    def tiles(*shape: int) -> Any:
        return plgpu.SMEM(shape, dtype, transforms=narrow)

    def barrier(arrivals: int, *number: int) -> Any:
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=number)

    row = plgpu.SMEM((_STAGES, QUERIES), jnp.float32)
    return [
        *(tiles(2, _HALF, HEAD_DIM) for _ in range(2)),
        *(tiles(_STAGES, QUERIES, HEAD_DIM) for _ in range(2)),
        *(row, row),
        tiles(2, 2, _HALF, QUERIES),
        plgpu.SMEM((2, QUERIES, HEAD_DIM), jnp.float32, transforms=wide),
        barrier(4),
        *(barrier(2, _STAGES) for _ in range(3)),
        *(barrier(2, 2), barrier(1, 2), barrier(2)),
    ]


def _block(sizes: _Sizes, refs: _Refs) -> None:
    """What one block of threads does."""
    plgpu = mosaic()
    group, block = lax.axis_index("group"), lax.axis_index("block")
    # blocks of the same heads run at the same time, so that queries are read from the cache; the
    # first keys, which most queries see, begin
    tile, pair = lax.rem(block, sizes.blocks), lax.div(block, sizes.blocks)
    place = _Place(lax.div(pair, sizes.kv_heads), lax.rem(pair, sizes.kv_heads), tile)
    first = tile * (KEYS // QUERIES) if sizes.causal else jnp.int32(0)
    runs = _Runs(first, sizes.queries // QUERIES - first, sizes.group)

    @when(group == 2)
    def _() -> None:
        plgpu.set_max_registers(40, action="decrease")
        _fetch(refs, place, runs)

    @when(group < 2)
    def _() -> None:
        plgpu.set_max_registers(232, action="increase")
        _compute(refs, place, runs, group, sizes.causal)


class _Place(NamedTuple):
    row: Any
    kv_head: Any
    tile: Any  # which of the row's runs of keys

    def keys(self, group: Any) -> Any:
        """Those of one warpgroup, as indices into memory."""
        start = self.tile * KEYS + group * _HALF
        return self.row, pallas().ds(start, _HALF), self.kv_head


class _Runs(NamedTuple):
    """The runs of queries that see a block's keys: for each head, from the first such on."""

    first: Any
    number: Any  # for a head
    heads: int

    def each(self, do: Any) -> None:
        """do(head, run, turn): turns count the runs of all heads."""

        def head(h: Any, _: Any) -> None:
            lax.fori_loop(0, self.number, lambda r, _: do(h, r, h * self.number + r), None)

        lax.fori_loop(0, self.heads, head, None)

    def queries(self, run: Any) -> Any:
        return pallas().ds((self.first + run) * QUERIES, QUERIES)


def _fetch(refs: _Refs, place: _Place, runs: _Runs) -> None:
    """Bring in the keys, then queries as room is made for them."""
    plgpu = mosaic()
    for half in range(2):
        at = place.keys(half)
        plgpu.copy_gmem_to_smem(refs.k.at[at], refs.k_here.at[half], refs.keys_came)
        plgpu.copy_gmem_to_smem(refs.v.at[at], refs.v_here.at[half], refs.keys_came)

    def fetch(head: Any, run: Any, turn: Any) -> None:
        stage = lax.rem(turn, _STAGES)

        @when(turn >= _STAGES)
        def _() -> None:
            plgpu.barrier_wait(refs.used.at[stage])

        head = place.kv_head * runs.heads + head
        vectors, sums = (place.row, runs.queries(run), head), (place.row, head, runs.queries(run))
        for source, target, came in (
            (refs.q.at[vectors], refs.q_here, refs.q_came),
            (refs.log_sum.at[sums], refs.log_sum_here, refs.q_came),
            (refs.given.at[vectors], refs.given_here, refs.given_came),
            (refs.dots.at[sums], refs.dots_here, refs.given_came),
        ):
            plgpu.copy_gmem_to_smem(source, target.at[stage], came.at[stage])

    runs.each(fetch)


def _compute(refs: _Refs, place: _Place, runs: _Runs, group: Any, causal: bool) -> None:
    """A warpgroup's gradients, and its turns of the queries'."""
    pl, plgpu = pallas(), mosaic()
    registers, scale = plgpu.Layout.WGMMA, HEAD_DIM**-0.5
    tile = (_HALF, QUERIES)
    plgpu.barrier_wait(refs.keys_came)
    k, v = (load(ref.at[group], registers) for ref in (refs.k_here, refs.v_here))
    key = plgpu.broadcasted_iota(jnp.int32, tile, 0, layout=registers)

    def along_queries(ref: Any) -> jax.Array:
        return lax.broadcast_in_dim(load(ref, registers.reduce(0)), tile, [1])

    def weights_and_slopes(run: Any, turn: Any) -> Any:
        stage = lax.rem(turn, _STAGES)

        def multiply(scores: Any, weight_slopes: Any) -> Any:
            plgpu.wgmma(scores, k, refs.q_here.at[stage].transpose((1, 0)))
            plgpu.wgmma(weight_slopes, v, refs.given_here.at[stage].transpose((1, 0)))
            found = plgpu.wgmma_accumulator_load(scores, wait_n=1)

            # matmuls end in order: those of the turn before are done with what they read
            @when(turn >= 1)
            def _() -> None:
                plgpu.barrier_arrive(refs.used.at[lax.rem(turn + _STAGES - 1, _STAGES)])

            log_sum = along_queries(refs.log_sum_here.at[stage])
            weights = jnp.exp2(found * (scale * LOG2_E) - log_sum)
            if causal:
                weights = lax.cond(run < KEYS // QUERIES, masked, lambda x: x, weights)
            return weights, plgpu.wgmma_accumulator_load(weight_slopes, wait_n=0)

        def masked(weights: jax.Array) -> jax.Array:
            query = plgpu.broadcasted_iota(jnp.int32, tile, 1, layout=registers)
            ahead = (runs.first + run) * QUERIES - (place.tile * KEYS + group * _HALF)
            return jnp.where(query + ahead >= key, weights, 0.0)

        sums = plgpu.ACC(tile, jnp.float32)
        return pl.run_scoped(multiply, sums, sums)

    def queries(head: Any, run: Any, parity: Any) -> None:
        """The queries' gradient by all of the block's keys, added to what is in memory."""
        plgpu.barrier_wait(refs.slopes_came.at[parity])

        def multiply(sums: Any) -> jax.Array:
            for half in range(2):
                slopes = refs.slopes.at[parity, half].transpose((1, 0))
                plgpu.wgmma(sums, slopes, refs.k_here.at[half])
            return plgpu.wgmma_accumulator_load(sums)

        found = pl.run_scoped(multiply, plgpu.ACC((QUERIES, HEAD_DIM), jnp.float32))
        plgpu.barrier_arrive(refs.slopes_used.at[parity])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        refs.q_slope_here[group] = found * scale
        plgpu.commit_smem()
        at = place.row, runs.queries(run), place.kv_head * runs.heads + head
        plgpu.copy_smem_to_gmem(
            refs.q_slope_here.at[group], refs.q_slope.at[at], reduction_op="add"
        )

    def all_runs(k_slope: Any, v_slope: Any) -> Any:
        def one(head: Any, run: Any, turn: Any) -> None:
            stage, parity = lax.rem(turn, _STAGES), lax.rem(turn, 2)
            plgpu.barrier_wait(refs.q_came.at[stage])
            plgpu.barrier_wait(refs.given_came.at[stage])
            weights, weight_slopes = weights_and_slopes(run, turn)
            plgpu.wgmma(v_slope, weights.astype(refs.k.dtype), refs.given_here.at[stage])
            slopes = weights * (weight_slopes - along_queries(refs.dots_here.at[stage]))
            slopes = slopes.astype(refs.k.dtype)
            plgpu.wgmma(k_slope, slopes, refs.q_here.at[stage])

            @when(turn >= 2)
            def _() -> None:
                plgpu.barrier_wait(refs.slopes_used.at[parity])

            refs.slopes[parity, group] = slopes
            plgpu.commit_smem()
            plgpu.barrier_arrive(refs.slopes_came.at[parity])

            @when((turn >= 1) & (parity != group))
            def _() -> None:
                begins = run == 0  # then the turn before was the last of another head
                before = jnp.where(begins, runs.number, run) - 1
                queries(jnp.where(begins, head - 1, head), before, 1 - parity)

        runs.each(one)
        last = lax.rem(runs.number * runs.heads - 1, 2)

        @when(last == group)
        def _() -> None:
            queries(runs.heads - 1, runs.number - 1, last)

        return plgpu.wgmma_accumulator_load(k_slope), plgpu.wgmma_accumulator_load(v_slope)

    sums = plgpu.ACC((_HALF, HEAD_DIM), jnp.float32)
    k_slope, v_slope = pl.run_scoped(all_runs, sums, sums)
    plgpu.barrier_arrive(refs.done)
    plgpu.barrier_wait(refs.done)  # nobody reads keys any more: there is room for their gradients
    refs.k_here[group] = (k_slope * scale).astype(refs.k.dtype)
    refs.v_here[group] = v_slope.astype(refs.k.dtype)
    plgpu.commit_smem()
    for source, target in ((refs.k_here, refs.k_slope), (refs.v_here, refs.v_slope)):
        plgpu.copy_smem_to_gmem(source.at[group], target.at[place.keys(group)])
    plgpu.wait_smem_to_gmem(0)
