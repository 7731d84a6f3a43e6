"""Prompts in, tokens out as they come, on any mesh.

model = load_for_generation("runs/first", generation_mesh("tp=2"))
for row, token in stream(model, [source.encode("Once"), source.encode("The end of")]):
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
from meshwright.models import family_of
from meshwright.present import count
from meshwright.serve.load import Model
from meshwright.serve.sampling import Sampling, sample

_BLOCK = 64  # prompts and caches grow by this much, so that few lengths are compiled


@dataclasses.dataclass(frozen=True)
class Continuation:
    tokens: tuple[int, ...]
    """Without the one that ended it."""
    ended: bool
    """By an end-of-document token; else it is as long as was asked for."""


def generate(
    model: Model,
    prompts: Sequence[Sequence[int]],
    max_new: int = 100,
    sampling: Sampling | None = None,
) -> list[Continuation]:
    """A continuation of each prompt."""
    tokens: list[list[int]] = [[] for _ in prompts]
    for row, token in stream(model, prompts, max_new, sampling):
        tokens[row].append(token)
    return [_continuation(row, model.source.ends) for row in tokens]


def _continuation(tokens: list[int], ends: Collection[int]) -> Continuation:
    ended = bool(tokens) and tokens[-1] in ends
    return Continuation(tuple(tokens[:-1] if ended else tokens), ended)


def stream(
    model: Model,
    prompts: Sequence[Sequence[int]],
    max_new: int = 100,
    sampling: Sampling | None = None,
) -> Iterator[tuple[int, int]]:
    """(row, token) as each comes, rows in order within a step; a row's last may be its end token.

    Prompts are token ids, of any lengths. All mistakes are raised by the call itself.
    """
    check_prompts(prompts, max_new, model.config)
    room = _in_blocks(max(map(len, prompts)) + max_new)
    _check_cache(model, len(prompts), room)
    start, advance = model_functions(model.config, model.mesh, room)
    vocab = min(model.source.tokenizer.vocab, model.config.vocab)
    choose = chooser(model.mesh, sampling or Sampling(), vocab)

    def steps() -> Iterator[tuple[int, int]]:
        live = set(range(len(prompts)))
        logits, cache = start(model.params, *padded(prompts, model.config, model.mesh))
        tokens = choose(logits, cache.lengths)
        for _ in range(max_new - 1):
            # the next step is on its way before this one's tokens are looked at
            logits, cache = advance(model.params, cache, tokens)
            following = choose(logits, cache.lengths)
            yield from _live_ones(tokens, live, model.source.ends)
            if not live:
                return
            tokens = following
        yield from _live_ones(tokens, live, model.source.ends)

    return steps()


def _check_cache(model: Model, rows: int, room: int) -> None:
    """On CPUs, whether the host's memory can hold the cache."""
    per_token = family_of(model.config).generation.cached_numbers(model.config)
    itemsize = model.params["embedding"].dtype.itemsize
    if model.mesh.devices.flat[0].platform == "cpu":
        check_host_memory(
            rows * room * per_token * itemsize,
            f"a cache of {count(rows, 'prompt')} of up to {room} tokens",
            "give fewer prompts, or a smaller max_new",
        )


def _live_ones(
    tokens: jax.Array, live: set[int], ends: Collection[int]
) -> Iterator[tuple[int, int]]:
    """The tokens of rows that have not ended; those that end now leave `live`."""
    came = np.asarray(tokens)
    for row in sorted(live):
        token = int(came[row])
        if token in ends:
            live.remove(row)
        yield row, token


def check_prompts(prompts: Sequence[Sequence[int]], max_new: int, config: Any) -> None:
    """There are prompts, of tokens the model has, and room for what is to come."""
    if whole_number(max_new, "max_new") < 1:
        raise MeshwrightError("max_new=0 asks for no token; give 1 or more")
    if not prompts:
        raise MeshwrightError("there is no prompt; give at least one")
    for number, prompt in enumerate(prompts, start=1):
        if not len(prompt):
            raise MeshwrightError(f"prompt {number} is empty; a model continues at least one token")
        wrong = [token for token in prompt if not 0 <= token < config.vocab]
        if wrong:
            raise MeshwrightError(
                f"prompt {number} has token {wrong[0]}; the model has 0 to {config.vocab - 1}"
            )
        left = config.max_seq - len(prompt)
        if max_new > left:
            fits = f"max_new={left} would fit" if left > 0 else "give a shorter prompt"
            raise MeshwrightError(
                f"prompt {number} has {count(len(prompt), 'token')}; with max_new={max_new} that "
                f"is more than the model's {config.max_seq}; {fits}"
            )


def padded(
    prompts: Sequence[Sequence[int]], config: Any, mesh: Mesh
) -> tuple[jax.Array, jax.Array]:
    """Tokens [batch, length] and lengths [batch]: as many rows and places as the mesh divides.

    A prompt starts at its row's first place. Rows that are only there to fill up hold one token.
    """
    multiple = family_of(config).generation.batch_multiple(mesh.shape)
    rows = -(-len(prompts) // multiple) * multiple
    places = math.lcm(_BLOCK, 2 * mesh.shape.get("sp", 1))  # two chunks for each part of a row
    longest = max(map(len, prompts))
    tokens = np.zeros((rows, round_up(longest, places)), np.int32)
    lengths = np.ones(rows, np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
        lengths[row] = len(prompt)
    whole = NamedSharding(mesh, P())
    return jax.device_put(tokens, whole), jax.device_put(lengths, whole)


Start = Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, Any]]
Advance = Callable[[Any, Any, jax.Array], tuple[jax.Array, Any]]
Choose = Callable[[jax.Array, jax.Array], jax.Array]


@functools.lru_cache(maxsize=16)
def model_functions(config: Any, mesh: Mesh, room: int) -> tuple[Start, Advance]:
    """Two programs that give logits [batch, vocab] and a cache; they compile on first use.

    The first takes prompts and their lengths, the second the cache (which it uses up) and the next
    tokens [batch].
    """

    generation = family_of(config).generation

    def start(params: Any, tokens: jax.Array, lengths: jax.Array) -> Any:
        return generation.prefill(params, tokens, lengths, config, room)

    def advance(params: Any, cache: Any, tokens: jax.Array) -> Any:
        return generation.step(params, cache, tokens, config)

    return _on(mesh, jax.jit(start)), _on(mesh, jax.jit(advance, donate_argnums=1))


@functools.lru_cache(maxsize=64)
def chooser(mesh: Mesh, sampling: Sampling, vocab: int) -> Choose:
    """The program that takes a token [batch] for each row of logits, at its position [batch].

    A program of its own, so that another temperature does not compile the model again. Tokens are
    given back whole on every device.
    """

    def choose(logits: jax.Array, positions: jax.Array) -> jax.Array:
        rows = jnp.arange(logits.shape[0])
        return reshard(sample(logits, rows, positions, sampling, vocab), P(None))

    return _on(mesh, jax.jit(choose))


def _on(mesh: Mesh, jitted: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(jitted)
    def call(*arguments: Any) -> Any:
        with jax.set_mesh(mesh):
            return jitted(*arguments)

    return call


def _in_blocks(length: int) -> int:
    return round_up(length, _BLOCK)
