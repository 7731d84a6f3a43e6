"""Generate tokens from prompts, streamed, on any mesh.

model = load_for_generation("runs/first", generation_mesh("tp=2"))
for prompt, token in stream(model, [source.encode("Once"), source.encode("The end of")]):
    …
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

from meshwright.arithmetic import round_up, whole_number
from meshwright.errors import MeshwrightError
from meshwright.machines import check_host_memory
from meshwright.models import batch_multiple, decode, generation_of, prefill
from meshwright.present import count
from meshwright.serve.load import Model, has_encoder
from meshwright.serve.sampling import KnownTokens, Sampling, sample

_BLOCK = 64  # lengths are multiples of this, so that few programs are compiled


@dataclasses.dataclass(frozen=True)
class Continuation:
    tokens: tuple[int, ...]
    """Generated tokens, without the end token."""
    ended: bool
    """Whether an end-of-document token ended it; otherwise it has max_new tokens."""


def generate(
    model: Model,
    prompts: Sequence[Sequence[int]],
    max_new: int = 100,
    sampling: Sampling | None = None,
) -> list[Continuation]:
    """Generate a continuation of each prompt."""
    tokens: list[list[int]] = [[] for _ in prompts]
    for index, token in stream(model, prompts, max_new, sampling):
        tokens[index].append(token)
    return [_continuation(generated, model.source.ends) for generated in tokens]


def _continuation(tokens: list[int], ends: Collection[int]) -> Continuation:
    ended = bool(tokens) and tokens[-1] in ends
    return Continuation(tuple(tokens[:-1] if ended else tokens), ended)


def stream(
    model: Model,
    prompts: Sequence[Sequence[int]],
    max_new: int = 100,
    sampling: Sampling | None = None,
) -> Iterator[tuple[int, int]]:
    """Yield (prompt index, token) as tokens are generated; a prompt's last may be its end token.

    Prompts are token ids, of any lengths. Within a step, prompts come in order. The call itself
    raises all errors.
    """
    check_prompts(prompts, max_new, model.config)
    if sampling is not None and sampling.is_adjusted:
        raise MeshwrightError(
            "generate has no penalties and no logit_bias; an engine (start_engine) has them"
        )
    room = _in_blocks(max(map(len, prompts)) + max_new)
    _check_cache(model, len(prompts), room)
    start, advance = model_functions(model.config, model.mesh, room)
    known = KnownTokens.of(model.source.tokenizer, model.config.vocab)
    choose = chooser(model.mesh, sampling or Sampling(), known)

    def steps() -> Iterator[tuple[int, int]]:
        live = set(range(len(prompts)))
        logits, cache = start(model.params, *padded(prompts, model.config, model.mesh))
        tokens = choose(logits, cache.lengths)
        for _ in range(max_new - 1):
            # dispatch the next step before reading the tokens of this one
            logits, cache = advance(model.params, cache, tokens)
            following = choose(logits, cache.lengths)
            yield from _live_ones(tokens, live, model.source.ends)
            if not live:
                return
            tokens = following
        yield from _live_ones(tokens, live, model.source.ends)

    return steps()


def _check_cache(model: Model, batch: int, room: int) -> None:
    """On CPUs, check that the cache fits into the host's memory."""
    per_token = generation_of(model.config).cached_numbers(model.config)
    itemsize = model.params["embedding"].dtype.itemsize
    if model.mesh.devices.flat[0].platform == "cpu":
        check_host_memory(
            batch * room * per_token * itemsize,
            f"a KV cache for {count(batch, 'prompt')} of up to {room} tokens",
            "give fewer prompts, or a smaller max_new",
        )


def _live_ones(
    tokens: jax.Array, live: set[int], ends: Collection[int]
) -> Iterator[tuple[int, int]]:
    """The tokens of prompts that have not ended; those that end now leave `live`."""
    generated = np.asarray(tokens)
    for index in sorted(live):
        token = int(generated[index])
        if token in ends:
            live.remove(index)
        yield index, token


def check_prompts(prompts: Sequence[Sequence[int]], max_new: int, config: Any) -> None:
    """Raise a MeshwrightError for missing prompts, unknown tokens, or too long sequences."""
    if whole_number(max_new, "max_new") < 1:
        raise MeshwrightError("max_new=0 generates nothing; give 1 or more")
    if not prompts:
        raise MeshwrightError("no prompt; give at least one")
    for number, prompt in enumerate(prompts, start=1):
        if not len(prompt):
            raise MeshwrightError(f"prompt {number} is empty; a model continues at least one token")
        wrong = [token for token in prompt if not 0 <= token < config.vocab]
        if wrong:
            raise MeshwrightError(
                f"prompt {number} has token {wrong[0]}; the model has 0 to {config.vocab - 1}"
            )
        # an encoder reads the prompt; a decoder alone has it in its own sequence
        left = config.max_seq - (0 if has_encoder(config) else len(prompt))
        if max_new > left or len(prompt) > config.max_seq:
            is_shorter = 0 < left < max_new
            fits = f"max_new={left} would fit" if is_shorter else "give a shorter prompt"
            raise MeshwrightError(
                f"prompt {number} has {count(len(prompt), 'token')}; with max_new={max_new} that "
                f"is more than the model's {config.max_seq}; {fits}"
            )


def padded(
    prompts: Sequence[Sequence[int]], config: Any, mesh: Mesh
) -> tuple[jax.Array, jax.Array]:
    """Tokens [batch, length] and lengths [batch], padded to sizes that the mesh divides.

    A prompt starts at position 0. Sequences that only pad the batch have one token.
    """
    multiple = batch_multiple(config, mesh.shape)
    batch = -(-len(prompts) // multiple) * multiple
    block = math.lcm(_BLOCK, 2 * mesh.shape.get("sp", 1))  # two chunks per device of a ring
    longest = max(map(len, prompts))
    tokens = np.zeros((batch, round_up(longest, block)), np.int32)
    lengths = np.ones(batch, np.int32)
    for index, prompt in enumerate(prompts):
        tokens[index, : len(prompt)] = prompt
        lengths[index] = len(prompt)
    replicated = NamedSharding(mesh, P())
    return jax.device_put(tokens, replicated), jax.device_put(lengths, replicated)


Start = Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, Any]]
Advance = Callable[[Any, Any, jax.Array], tuple[jax.Array, Any]]
Choose = Callable[[jax.Array, jax.Array], jax.Array]


@functools.lru_cache(maxsize=16)
def model_functions(config: Any, mesh: Mesh, room: int) -> tuple[Start, Advance]:
    """Prefill and decode programs, which return logits [batch, vocab] and a cache.

    Prefill takes prompts and their lengths; decode takes the cache (donated) and the next tokens
    [batch]. They compile on first use.
    """

    def start(params: Any, tokens: jax.Array, lengths: jax.Array) -> Any:
        return prefill(params, tokens, lengths, config, room)

    def advance(params: Any, cache: Any, tokens: jax.Array) -> Any:
        return decode(params, cache, tokens, config)

    return _on(mesh, jax.jit(start)), _on(mesh, jax.jit(advance, donate_argnums=1))


@functools.lru_cache(maxsize=64)
def chooser(mesh: Mesh, sampling: Sampling, known: KnownTokens) -> Choose:
    """The program that samples a token [batch] from logits [batch, vocab] at positions [batch].

    It is separate, so that another temperature does not recompile the model. Tokens are replicated
    over all devices.
    """

    def choose(logits: jax.Array, positions: jax.Array) -> jax.Array:
        indices = jnp.arange(logits.shape[0])
        return reshard(sample(logits, indices, positions, sampling, known), P(None))

    return _on(mesh, jax.jit(choose))


def _on(mesh: Mesh, jitted: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(jitted)
    def call(*arguments: Any) -> Any:
        with jax.set_mesh(mesh):
            return jitted(*arguments)

    return call


def _in_blocks(length: int) -> int:
    return round_up(length, _BLOCK)
