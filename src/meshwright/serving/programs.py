"""The compiled programs of an engine: a step of the model, and the choice of tokens.

A step computes decode tokens and chunks of prompts together, and returns the logits of the tokens
that are followed by a new one, and the most probable of these new tokens. So a step of greedy
requests is one program: each call takes the host as long as a small model takes a GPU. Sampling is
a separate program, so that other settings of a request compile nothing.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

from meshwright.errors import MeshwrightError
from meshwright.machines import check_host_memory, host_bytes
from meshwright.models import (
    ADAPTER,
    AdapterSlots,
    Compute,
    LoraConfig,
    encodes_prompts,
    family_of,
    for_tokens,
    lm_logits,
    serving_of,
)
from meshwright.ops import current_platform, spec_of
from meshwright.ops.attention import (
    CACHE_DTYPES,
    PagedCall,
    PagedKeys,
    PagedTokens,
    choose_paged,
    most_pages,
    pool_shape,
)
from meshwright.present import count
from meshwright.serving.abstract_weights import adapter_targets, targets
from meshwright.serving.adapters import load_factors
from meshwright.serving.device_sampling import TOP, greedy, top_logprobs
from meshwright.serving.from_trainer import check_params, trained_weights
from meshwright.serving.program_inputs import (
    Ints,
    PromptInputs,
    PromptShape,
    Shape,
    StepInputs,
    Widths,
)
from meshwright.serving.prompts import fill_with_prompts, prompt_shapes
from meshwright.serving.sampling import KnownTokens
from meshwright.serving.scheduler import scoring_shape
from meshwright.serving.settings import EngineConfig, decode_batch
from meshwright.serving.source import Adapter, Model, load_weights

# XLA times the kernels of each matmul, but does not compare their results: with fp8 weights the
# programs of an 8B model are compiled in 18 s instead of 113
_GPU_OPTIONS = {"xla_gpu_autotune_level": 2}
_SCORED_AT_ONCE = 64  # tokens of a prompt whose logits are in memory together


class Steps:
    """What a step computes, of weights and pages that may be abstract arrays."""

    def __init__(
        self, model_config: Any, mesh: Mesh, dtype: Any, config: EngineConfig, max_length: int
    ) -> None:
        self.model_config, self.mesh, self.config = model_config, mesh, config
        self.serving = serving_of(model_config)
        self.width = -(-max_length // config.page_size)
        encoder_pages = self.width if encodes_prompts(model_config) else 0
        self.widths = Widths(self.width, encoder_pages, int(config.max_adapters > 0))
        self.prompt_shapes = prompt_shapes(config, model_config, mesh.shape, max_length)
        self.dtype = jnp.dtype(dtype)
        self.known = KnownTokens(model_config.vocab)
        self.cache_dtype = CACHE_DTYPES[config.cache] if config.cache else self.dtype
        with jax.set_mesh(mesh):
            self.compute = Compute(
                self.serving.rules("ep" in mesh.shape),
                self.dtype,
                scan=False,
                stationary=True,
                context=max_length,
            )
            call = PagedCall(
                current_platform(), str(self.dtype), model_config.head_dim,
                self.serving.window(model_config), self.serving.biased, config.cache,
                config.page_size, self.serving.softcapped(model_config),
                self.serving.sinks(model_config),
            )  # fmt: skip
            self.kernel = choose_paged(call, config.kernel)

    @property
    def chunk_places(self) -> int:
        """Chunks of the largest shape: so many logits are computed for chunks in every step."""
        return max(chunks for chunks, _ in self.config.chunks)

    def run_step(
        self, shape: Shape, weights: Any, pools: Any, last_tokens: jax.Array, flat: jax.Array
    ) -> Any:
        inputs = StepInputs.unpack(flat, shape, self.widths)
        decode_tokens = jnp.where(inputs.tokens < 0, last_tokens[inputs.slots], inputs.tokens)
        tokens = jnp.concatenate([decode_tokens, inputs.chunk_tokens.reshape(-1)])
        paged = PagedTokens(
            inputs.tables, inputs.positions, inputs.chunk_tables, inputs.starts, inputs.counts,
            shape.length, shape.first, self.kernel,
        )  # fmt: skip
        if self.widths.adapter:
            of_chunks = jnp.repeat(inputs.chunk_adapters, shape.length)
            slots = jnp.concatenate([inputs.adapters, of_chunks])
            weights = for_tokens(weights, slots[None])
        family, config = family_of(self.model_config), self.model_config
        batch = {"tokens": tokens[None]}
        encoded = PagedKeys(
            inputs.encoder_tables, inputs.encoder_lengths, inputs.chunk_encoder_tables,
            inputs.chunk_encoder_lengths,
        )  # fmt: skip
        state = self.serving.state(pools, paged, encoded)
        hidden, state = family.forward(weights, batch, config, self.compute, state)
        head = family.lm_head(weights, config)

        def logits_at(indices: jax.Array) -> jax.Array:
            logits = lm_logits(_take(hidden, indices), head, config.vocab, self.compute)
            return reshard(logits, P(None, None, None))[0]

        ends = shape.decode + jnp.arange(shape.chunks) * shape.length + inputs.counts - 1
        rest = jnp.zeros(self.chunk_places - shape.chunks if shape.chunks else 0, jnp.int32)
        logits = logits_at(jnp.concatenate([jnp.arange(shape.decode), ends, rest]))
        new = greedy(logits, self.known)
        nobody = jnp.full(rest.shape, self.config.max_batch, jnp.int32)
        last_tokens = last_tokens.at[jnp.concatenate([inputs.next_slots, nobody])].set(new)
        scores = None
        if shape.scored:
            scores = _scores(logits_at, shape, inputs.chunk_targets.reshape(-1))
        return state.layers, last_tokens, logits, new, scores

    def run_prompts(self, shape: PromptShape, weights: Any, pools: Any, flat: jax.Array) -> Any:
        """The pools with the keys of whole prompts: see prompts.py."""
        inputs = PromptInputs.unpack(flat, shape, self.widths)
        if self.widths.adapter:
            slots = jnp.broadcast_to(inputs.adapters[:, None], inputs.tokens.shape)
            weights = for_tokens(weights, slots)
        return fill_with_prompts(
            weights, pools, inputs, self.model_config, self.compute, self.kernel
        )

    def lower(self, shape: Shape | PromptShape, pages: int) -> Any:
        """The program of a shape with so many pages, lowered: nothing is on the devices."""
        params = targets(self.model_config, self.mesh, self.dtype)
        of_weights = functools.partial(
            self.serving.weights, config=self.model_config, dtype=self.config.weights
        )
        with jax.set_mesh(self.mesh):
            weights = jax.tree.map(self._placed, jax.eval_shape(of_weights, params))
            pools = self._abstract_pools(pages)
            if isinstance(shape, PromptShape):
                inputs = self._abstract_ints(PromptInputs.empty(shape, self.widths)[1].size)
                run = functools.partial(self.run_prompts, shape)
                return jax.jit(run, donate_argnums=1).lower(weights, pools, inputs)
            inputs = self._abstract_ints(StepInputs.empty(shape, self.widths)[1].size)
            tokens = self._abstract_ints(self.config.max_batch + 1)
            step = jax.jit(functools.partial(self.run_step, shape), donate_argnums=(1, 2))
            return step.lower(weights, pools, tokens, inputs)

    def _abstract_ints(self, size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size,), jnp.int32, sharding=NamedSharding(self.mesh, P(None)))

    def _placed(self, array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """On the devices of the mesh, as the types of an explicit mesh say."""
        assert array.sharding is not None
        place = NamedSharding(self.mesh, array.sharding.spec)
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place)

    def _abstract_pools(self, pages: int) -> list[jax.ShapeDtypeStruct]:
        config, size = self.model_config, self.config.page_size
        shape = pool_shape(self.kernel, pages, size, config.kv_heads, config.head_dim)
        with jax.set_mesh(self.mesh):
            heads = self.compute.layouts.kv_heads.partitions[2]
        place = NamedSharding(self.mesh, P(None, None, heads, None))
        layer = jax.ShapeDtypeStruct(shape, self.cache_dtype, sharding=place)
        return [layer] * self.serving.layers(config)


class Programs(Steps):
    """Weights and pages on the devices, and compiled programs over them."""

    def __init__(self, model: Model, config: EngineConfig, max_length: int, release: bool) -> None:
        super().__init__(
            model.config, model.mesh, model.params["embedding"].dtype, config, max_length
        )
        self.known = KnownTokens.of(model.source.tokenizer, model.config.vocab)
        self._source = model.source
        self.compilations = 0
        self._functions: dict[Any, Any] = {}  # jitted
        self.is_ready = False
        check_host_memory(
            host_bytes(self._abstract_pools(config.pages or self._most_pages)),
            f"a KV cache for {count(config.max_batch, 'sequence')} of up to {max_length} tokens",
            "use a smaller max_batch (fewer prompts) or max_length (max_new)",
        )
        with jax.set_mesh(self.mesh):
            self.weights = self.serving.weights(model.params, model.config, config.weights, release)
        if config.max_adapters:
            self.weights[ADAPTER] = self._empty_slots()
            if config.compile_first:
                self.load_adapter(1, self._zero_factors(), 1.0)
            for slot, adapter in enumerate(model.source.adapters.values(), 1):
                self.load_adapter(slot, self.read_adapter(adapter), adapter.lora.scale)
        wanted = config.pages or self._least(self._pages_that_fit())
        self.pages = self._addressable(wanted)
        if config.pages and self.pages < config.pages:
            raise MeshwrightError(
                f"pages={config.pages}: the kernel of an 8-bit cache cannot address so many; give "
                f"at most {self.pages}"
            )
        most = self.widths.pages + self.widths.encoder_pages
        if self.pages <= most:
            raise MeshwrightError(
                f"{self.pages} pages of {config.page_size} tokens cannot hold one sequence of "
                f"{max_length}: give at least {most + 1} pages, or a smaller max_length"
            )
        self.pools = self._new_pools()
        self.last_tokens = self.put(np.zeros(config.max_batch + 1, np.int32))

    def update_weights(self, params: Any, adapter_scale: float | None) -> None:
        """Take the parameters of a trainer in place of the weights, which are freed first."""
        check_params(params, self._source.config)
        source = dataclasses.replace(self._source, read=trained_weights(params, adapter_scale))
        slots = {name: tree for name, tree in self.weights.items() if name == ADAPTER}
        self.weights = slots  # others are freed once the steps that were dispatched have read them
        model = load_weights(source, self.mesh, self.dtype)
        with jax.set_mesh(self.mesh):
            weights = self.serving.weights(
                model.params, model.config, self.config.weights, release=True
            )
        self.weights = weights | slots

    def _empty_slots(self) -> AdapterSlots:
        factors = self._abstract_factors()
        with jax.set_mesh(self.mesh):
            one = jax.eval_shape(self._slot_factors, factors, jnp.float32(1))
            empty = functools.partial(AdapterSlots.empty, one, self.config.max_adapters)
            slots: AdapterSlots = jax.jit(empty)()
        return slots

    def _abstract_factors(self) -> Any:
        every = LoraConfig(self.config.adapter_rank)
        return adapter_targets(self.model_config, every, self.mesh)[ADAPTER]

    def _zero_factors(self) -> Any:
        def zeros(one: jax.ShapeDtypeStruct) -> jax.Array:
            return jnp.zeros(one.shape, one.dtype, device=one.sharding)

        return jax.tree.map(zeros, self._abstract_factors())

    def _slot_factors(self, factors: Any, scale: jax.Array) -> list[Any]:
        """The factors of an adapter as steps read them."""
        assert self.serving.adapter is not None

        def scaled(path: Any, factor: jax.Array) -> jax.Array:
            return (factor * scale if path[-1].key == "b" else factor).astype(self.dtype)

        return self.serving.adapter(jax.tree.map_with_path(scaled, factors))

    def read_adapter(self, adapter: Adapter) -> Any:
        """The factors of an adapter on the devices; takes long, in any thread."""
        return load_factors(self._source, adapter, self.mesh, self.config.adapter_rank)

    def load_adapter(self, slot: int, factors: Any, scale: float) -> None:
        """Write what `read_adapter` gave into a slot, after the steps that were dispatched."""

        def write(slots: AdapterSlots, factors: Any, scale: jax.Array, slot: jax.Array) -> Any:
            return slots.written(self._slot_factors(factors, scale), slot)

        numbers = self.put(np.float32(scale)), self.put(np.int32(slot))
        held = self.weights[ADAPTER]
        self.weights[ADAPTER] = self.run("adapter", write, 0, held, factors, *numbers)

    def put(self, array: Any) -> jax.Array:
        """A host array on all devices, with the sharding that programs give their results."""
        place = NamedSharding(self.mesh, P(*(None,) * np.ndim(array)))
        if self.mesh.is_multi_process:  # device_put would compare the arrays of all processes
            return jax.make_array_from_callback(np.shape(array), place, lambda _: array)
        return jax.device_put(array, place)

    def step(self, shape: Shape, inputs: Ints) -> Any:
        """Dispatch a step: logits [decode + chunk places, vocab], tokens, and scores if wanted."""
        step = functools.partial(self.run_step, shape)
        arguments = self.weights, self.pools, self.last_tokens, self.put(inputs)
        results = self.run(("step", shape), step, (1, 2), *arguments)
        self.pools, self.last_tokens, logits, tokens, scores = results
        return logits, tokens, scores

    def fill(self, shape: PromptShape, inputs: Ints) -> None:
        """Dispatch the program for whole prompts."""
        fill = functools.partial(self.run_prompts, shape)
        arguments = self.weights, self.pools, self.put(inputs)
        self.pools = self.run(("prompts", shape), fill, 1, *arguments)

    def prepare(self, shape: Shape | PromptShape) -> None:
        """Compile the program of a shape, by running it on page 0, which no sequence has."""
        if isinstance(shape, PromptShape):
            self.fill(shape, PromptInputs.empty(shape, self.widths)[1])
        else:
            self.step(shape, StepInputs.empty(shape, self.widths)[1])

    def run(
        self,
        key: Any,
        function: Callable[..., Any],
        donated: int | tuple[int, ...] | None,
        *arguments: Any,
    ) -> Any:
        """Run a function on the mesh; the first run with a key compiles it.

        It is called through jax.jit: that takes half a millisecond less than a program that was
        compiled ahead of time, for the hundred and more arrays of a step.
        """
        if key not in self._functions:
            if self.is_ready and self.config.strict:
                raise MeshwrightError(f"strict: {key} would be compiled while serving")
            on_gpu = self._platform in ("gpu", "cuda")
            options = _GPU_OPTIONS if on_gpu else None
            self._functions[key] = jax.jit(
                function, donate_argnums=donated, compiler_options=options
            )
        run = self._functions[key]
        known = run._cache_size()
        with jax.set_mesh(self.mesh):
            results = run(*arguments)
        if self.is_ready and (new := run._cache_size() - known):
            self.compilations += new
            if self.config.strict:
                raise MeshwrightError(f"strict: {key} was compiled again while serving")
        return results

    def shapes(self) -> list[Shape | PromptShape]:
        """All shapes that programs have."""
        full = self.config.max_batch
        found: list[Shape | PromptShape] = [*self.prompt_shapes]
        found += [Shape(decode) for decode in self.batches]
        for chunks, length in self.config.chunks:
            found += [Shape(full, chunks, length, first) for first in (True, False)]
        if not self.config.prompt_logprobs:
            return found
        chunks, length = scoring_shape(self.config)
        return found + [Shape(full, chunks, length, first, True) for first in (True, False)]

    @property
    def _platform(self) -> str:
        return str(self.mesh.devices.flat[0].platform)

    @property
    def batches(self) -> tuple[int, ...]:
        """The batch sizes of decode programs."""
        return tuple(sorted({decode_batch(size, self._platform) for size in self.config.batches}))

    def fastest_batches(self) -> tuple[int, ...]:
        """The sizes of decode batches without those that take as long as a larger one.

        A GPU's matmuls of one to eight tokens can be slower than those of sixteen.
        """
        sizes = self.batches
        if self._platform == "cpu":
            return sizes
        times = [self._seconds(Shape(size)) for size in sizes]
        return tuple(
            size for i, size in enumerate(sizes) if times[i] < min(times[i + 1 :], default=math.inf)
        )

    def _seconds(self, shape: Shape) -> float:
        """Of a step, the best of some."""
        inputs, flat = StepInputs.empty(shape, self.widths)
        inputs.tables[:, :1] = 1  # tokens of page 0 are nobody's, and choose no experts

        def run(steps: int) -> float:
            start = time.perf_counter()
            for _ in range(steps):
                self.step(shape, flat)
            self.last_tokens.block_until_ready()
            return (time.perf_counter() - start) / steps

        run(3)
        return min(run(10) for _ in range(3))

    def _new_pools(self) -> Any:
        layers = self._abstract_pools(self.pages)

        @jax.jit
        def zeros() -> Any:
            pool = layers[0]
            return jnp.zeros(pool.shape, pool.dtype, out_sharding=pool.sharding.spec)

        with jax.set_mesh(self.mesh):
            return [zeros() for _ in layers]

    def _least(self, number: int) -> int:
        """The smallest number of all processes of the mesh."""
        if not self.mesh.is_multi_process:
            return number
        place = NamedSharding(self.mesh, P(self.mesh.axis_names))
        numbers = jax.make_array_from_callback(
            (self.mesh.size,), place, lambda _: np.array([number], np.int32)
        )
        with jax.set_mesh(self.mesh):
            return int(np.asarray(jax.jit(jnp.min)(numbers)))

    def _chunk_bytes(self, tensor: int) -> int:
        """Of chunks that continue: copies of the keys before them, and scores in float32."""
        config, length = self.model_config, self.width * self.config.page_size
        numbers = self.chunk_places * length * config.kv_heads * config.head_dim // tensor
        copied = 4 * numbers * self.dtype.itemsize
        if self.kernel != "plain" and self.serving.window(config) is None:
            return copied
        return copied + 8 * self.config.chunk * length * config.heads // tensor

    def _addressable(self, pages: int) -> int:
        config, size = self.model_config, self.config.page_size
        page = size * config.kv_heads * config.head_dim // self.mesh.shape.get("tp", 1)
        return most_pages(self.kernel, pages, page, self.cache_dtype.itemsize)

    @property
    def _most_pages(self) -> int:
        """Pages for as many sequences as are decoded together, all of the greatest length."""
        return self.config.max_batch * (self.widths.pages + self.widths.encoder_pages) + 1

    def _pages_that_fit(self) -> int:
        config, most = self.model_config, self._most_pages
        device = self.mesh.local_devices[0]
        memory = device.memory_stats() if device.platform != "cpu" else None
        if not memory:
            return most
        tensor = self.mesh.shape.get("tp", 1)
        numbers = 2 * self.serving.layers(config) * config.kv_heads * config.head_dim // tensor
        page = numbers * self.config.page_size * self.cache_dtype.itemsize
        left = memory["bytes_limit"] * self.config.memory_fraction - memory["bytes_in_use"]
        # logits in float32, and activations of a step
        whole = max((shape.prompts * shape.length for shape in self.prompt_shapes), default=0)
        if not encodes_prompts(config):  # devices share them
            whole //= math.prod(self.mesh.shape.get(axis, 1) for axis in ("fsdp", "sp"))
        tokens = self.config.max_batch + max(self.config.chunk, whole)
        left -= 3 * 4 * (self.config.max_batch + self.chunk_places) * config.vocab
        left -= 16 * tokens * (config.embed + config.mlp)
        left -= 2 * 4 * (self.config.max_batch + 1) * config.vocab  # counts for penalties
        left -= self._chunk_bytes(tensor)
        return min(most, max(int(left // page), 0))


def _take(x: jax.Array, indices: jax.Array) -> jax.Array:
    """x [1, tokens, embed] at some tokens."""
    spec = spec_of(x)
    return jax.shard_map(
        lambda x, indices: x[:, indices], in_specs=(spec, P(None)), out_specs=spec
    )(x, indices)


def _scores(logits_at: Callable[[jax.Array], jax.Array], shape: Shape, targets: jax.Array) -> Any:
    """Log-probabilities of the tokens after those of the chunks, some at a time."""
    size = min(_SCORED_AT_ONCE, targets.shape[0])
    parts = -(-targets.shape[0] // size)
    padded = jnp.pad(targets, (0, parts * size - targets.shape[0])).reshape(parts, size)
    indices = shape.decode + jnp.minimum(jnp.arange(parts * size), targets.shape[0] - 1)

    def score(part: tuple[jax.Array, jax.Array]) -> Any:
        at, tokens = part
        return top_logprobs(logits_at(at), tokens, TOP)

    scores = lax.map(score, (indices.reshape(parts, size), padded))
    return jax.tree.map(lambda x: x.reshape(parts * size, *x.shape[2:]), scores)
