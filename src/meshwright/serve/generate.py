"""Prompts in, tokens out as they come, on any mesh.

model = load_for_generation("runs/first", generation_mesh("tp=2"))
for row, token in stream(model, [model.encode("Once"), model.encode("The end of")]):
    …
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from meshwright.errors import MeshwrightError, whole_number
from meshwright.models.decoder import decode
from meshwright.models.decoder.config import DecoderConfig
from meshwright.serve.cache import Cache, appended, filled
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
    return [_continuation(row, model.ends) for row in tokens]


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
    start, next_token = functions(
        model.config,
        model.mesh,
        sampling or Sampling(),
        room=_in_blocks(max(map(len, prompts)) + max_new),
        vocab=min(model.tokenizer.vocab, model.config.vocab),
    )

    def steps() -> Iterator[tuple[int, int]]:
        live = set(range(len(prompts)))
        tokens, cache = start(model.params, *padded(prompts, model.mesh))
        for i in range(max_new):
            # the next step is on its way before this one's tokens are looked at
            following = next_token(model.params, cache, tokens) if i + 1 < max_new else None
            came = np.asarray(tokens)
            for row in sorted(live):
                token = int(came[row])
                yield row, token
                if token in model.ends:
                    live.remove(row)
            if not live or following is None:
                return
            tokens, cache = following

    return steps()


def check_prompts(prompts: Sequence[Sequence[int]], max_new: int, config: DecoderConfig) -> None:
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
                f"prompt {number} has {len(prompt)} tokens; with max_new={max_new} that is more "
                f"than the model's {config.max_seq}; {fits}"
            )


def padded(prompts: Sequence[Sequence[int]], mesh: Mesh) -> tuple[jax.Array, jax.Array]:
    """Tokens [batch, length] and lengths [batch]: as many rows and places as the mesh divides.

    A prompt starts at its row's first place. Rows that are only there to fill up hold one token.
    """
    multiple = decode.row_multiple(mesh.shape)
    rows = -(-len(prompts) // multiple) * multiple
    tokens = np.zeros((rows, _in_blocks(max(map(len, prompts)))), np.int32)
    lengths = np.ones(rows, np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
        lengths[row] = len(prompt)
    whole = NamedSharding(mesh, P())
    return jax.device_put(tokens, whole), jax.device_put(lengths, whole)


Start = Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, Cache]]
Next = Callable[[Any, Cache, jax.Array], tuple[jax.Array, Cache]]


@functools.lru_cache(maxsize=16)
def functions(
    config: DecoderConfig, mesh: Mesh, sampling: Sampling, room: int, vocab: int
) -> tuple[Start, Next]:
    """Two compiled programs: prompts to first tokens and a cache, and one token more of each row.

    Tokens [batch] are given back whole on every device. The second takes the cache it is given.
    """

    def choose(params: Any, hidden: jax.Array, cache: Cache) -> jax.Array:
        logits = decode.next_logits(params, hidden, config)
        rows = jnp.arange(logits.shape[0])
        return reshard(sample(logits, rows, cache.lengths, sampling, vocab), P(None))

    def start(params: Any, tokens: jax.Array, lengths: jax.Array) -> tuple[jax.Array, Cache]:
        hidden, keys, values = decode.prefill(params, tokens, lengths, config)
        cache = filled(keys, values, lengths, max(room, tokens.shape[1]))
        return choose(params, hidden, cache), cache

    def next_token(params: Any, cache: Cache, tokens: jax.Array) -> tuple[jax.Array, Cache]:
        hidden, keys, values = decode.step(
            params, tokens, cache.lengths, cache.keys, cache.values, config
        )
        cache = appended(cache, keys, values)
        return choose(params, hidden, cache), cache

    def on_mesh(jitted: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(jitted)
        def call(*arguments: Any) -> Any:
            with jax.set_mesh(mesh):
                return jitted(*arguments)

        return call

    return on_mesh(jax.jit(start)), on_mesh(jax.jit(next_token, donate_argnums=1))


def _in_blocks(length: int) -> int:
    return -(-length // _BLOCK) * _BLOCK
