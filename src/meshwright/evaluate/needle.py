"""Needle in a haystack, evaluated with the forward pass of training.

    model = load(look_into("runs/needle"), generation_mesh("sp=4"), rules=RULES)
    result = retrieve(model, needle_sequences(Needles(), sequences=32, seq=256, fresh=True))
    result.share

One forward pass over sequences that contain the answers (teacher forcing): an answer is correct if
each of its tokens is the most probable one. There is no KV cache, so this tests the attention that
training uses on the mesh.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax
from jax.sharding import Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

from meshwright.data import ByteTokenizer, NeedleSequences
from meshwright.errors import MeshwrightError
from meshwright.layouts import Rules, axes_of
from meshwright.models import Compute, activation_layouts, family_of
from meshwright.ops import nontrivial_axes, spec_of
from meshwright.ops.attention import choose_strategy
from meshwright.serve import Model, Source

_TOKENS = 65536  # per forward pass and per group of devices that share sequences


def needle_rules(config: Any) -> Rules:
    """Where the weights of a model lie while it is asked."""
    return family_of(config).rules(sp=True)


@dataclass(frozen=True, eq=False)
class Retrieval:
    """Which answers were correct, and where their needles are."""

    right: npt.NDArray[np.bool_]  # [sequences, questions]
    sequences: NeedleSequences

    @property
    def share(self) -> float:
        return float(self.right.mean())

    def by_depth(self, parts: int = 10) -> "list[Group]":
        """Grouped by the needle's position, in equal ranges of the sequence."""
        return self._groups(self.sequences.told, parts)

    def by_distance(self, parts: int = 10) -> "list[Group]":
        """Grouped by the distance from the needle to its answer."""
        return self._groups(self.sequences.asked - self.sequences.told, parts)

    def _groups(self, values: npt.NDArray[np.int32], parts: int) -> "list[Group]":
        seq = self.sequences.tokens.shape[1]
        edges = [number * seq // parts for number in range(parts + 1)]
        groups = []
        for start, stop in itertools.pairwise(edges):
            right = self.right[(values >= start) & (values < stop)]
            groups.append(Group(start, stop, right.size, int(right.sum())))
        return [group for group in groups if group.asked]


@dataclass(frozen=True)
class Group:
    """Answers whose needle position (or distance) is in [start, stop)."""

    start: int
    stop: int
    asked: int
    right: int


def retrieve(
    model: Model,
    sequences: NeedleSequences,
    *,
    context_parallel: str = "auto",
    segments: npt.NDArray[np.int32] | None = None,
) -> Retrieval:
    """Evaluate all questions of the sequences. The model must be loaded with `needle_rules`.

    `context_parallel` is the attention method where sp splits sequences. `segments`
    [sequences, seq] are segment ids of packed documents; by default a sequence is one document.
    """
    predicted = answers(model, sequences, context_parallel=context_parallel, segments=segments)
    return Retrieval((predicted == sequences.answers).all(-1), sequences)


def answers(
    model: Model,
    sequences: NeedleSequences,
    *,
    context_parallel: str = "auto",
    segments: npt.NDArray[np.int32] | None = None,
) -> npt.NDArray[np.int32]:
    """The most probable token at every position of every answer.

    Returns [sequences, questions, value_length].
    """
    number, seq = sequences.tokens.shape
    dtype = model.params["embedding"].dtype
    compute = Compute(needle_rules(model.config), dtype, context_parallel=context_parallel)
    program = _program(model.config, compute, model.mesh)
    groups = model.mesh.shape["dp"] * model.mesh.shape["fsdp"]
    batch = min(max(1, _TOKENS // seq), -(-number // groups)) * groups
    positions = sequences.positions.reshape(number, -1) - 1  # which predict the answers' tokens
    predicted = []
    for start in range(0, number, batch):
        # the first sequences fill up the last batch
        chosen = np.arange(start, start + batch) % number
        ids = None if segments is None else segments[chosen]
        tokens = program(model.params, sequences.tokens[chosen], positions[chosen], ids)
        predicted.append(np.asarray(tokens)[: number - start])
    return np.concatenate(predicted).reshape(sequences.positions.shape)


def check_needle(
    source: Source, mesh: Mesh, seq: int, context_parallel: str = "auto"
) -> str | None:
    """The context-parallel method for sequences of `seq` bytes on this mesh; None without one.

    Raises a MeshwrightError if the model cannot be evaluated.
    """
    config = source.config
    if "encoder_tokens" in family_of(config).batch_fields:
        raise MeshwrightError(
            f"{source.name} is an encoder-decoder model; needles are for models that read one "
            "sequence"
        )
    if source.tokenizer.kind != ByteTokenizer.kind:
        raise MeshwrightError(
            f"{source.name} has a tokenizer of kind {source.tokenizer.kind!r}, but needle "
            "sequences are bytes; train a model on the output of 'meshwright data needle', or give "
            "--tokenizer bytes if the model reads bytes"
        )
    if config.vocab < ByteTokenizer.vocab:
        raise MeshwrightError(
            f"{source.name} has a vocabulary of {config.vocab}; needle sequences need "
            f"{ByteTokenizer.vocab} tokens, the bytes and an end of document"
        )
    if seq > config.max_seq:
        raise MeshwrightError(
            f"seq={seq} is longer than the model allows; use {config.max_seq} or less"
        )
    layouts = activation_layouts(needle_rules(config), nontrivial_axes(mesh.shape))
    split = family_of(config).sequence_split(config, layouts, dict(mesh.shape), seq)
    return choose_strategy(split, context_parallel) if split.ways > 1 else None


Program = Callable[[Any, Any, Any, Any], jax.Array]


@functools.lru_cache(maxsize=16)
def _program(config: Any, compute: Compute, mesh: Mesh) -> Program:
    """(params, tokens, positions, segments) → the most probable token after each position."""
    family = family_of(config)

    def most_probable(
        params: Any, tokens: jax.Array, positions: jax.Array, segments: jax.Array | None
    ) -> jax.Array:
        batch = {"tokens": tokens} | ({} if segments is None else {"segments": segments})
        x, _ = family.forward(params, batch, config, compute)
        vocab = compute.layouts.logits.partitions[2]
        # LM head only at the requested positions: logits of full sequences would not fit
        x = _at(x, positions)
        stored = family.lm_head(params, config)
        dims = "ve" if stored.tied else "ev"
        spec = P(*(vocab if dim == "v" else None for dim in dims))
        head = reshard(stored.weight.astype(compute.dtype), spec)
        batch = spec_of(x)[0]
        logits = jnp.einsum(
            f"bpe,{dims}->bpv", x, head,
            preferred_element_type=jnp.float32, out_sharding=P(batch, None, vocab),
        )  # fmt: skip
        logits = reshard(logits, P(batch, None, None))[..., : config.vocab]  # without padding
        chosen = jnp.argmax(logits, axis=-1)
        return reshard(chosen.astype(jnp.int32), P(None, None))

    jitted = jax.jit(most_probable)

    def run(params: Any, tokens: Any, positions: Any, segments: Any) -> jax.Array:
        with jax.set_mesh(mesh):
            by_token = NamedSharding(mesh, compute.layouts.tokens)
            by_sequence = NamedSharding(mesh, P(compute.layouts.tokens.partitions[0], None))
            inputs = (tokens, by_token), (positions, by_sequence), (segments, by_token)
            return jitted(params, *(x if x is None else jax.device_put(x, s) for x, s in inputs))

    return run


def _at(x: jax.Array, positions: jax.Array) -> jax.Array:
    """x [batch, length, embed] at positions [batch, n], also where mesh axes split the length."""
    spec = spec_of(x)
    batch, length, embed = spec.partitions
    over = axes_of(length, spec)

    def take(x: jax.Array, positions: jax.Array) -> jax.Array:
        shard_length = x.shape[1]
        positions = positions - (lax.axis_index(over) * shard_length if over else 0)
        local = (positions >= 0) & (positions < shard_length)
        states = jnp.take_along_axis(x, jnp.where(local, positions, 0)[..., None], axis=1)
        states = jnp.where(local[..., None], states, jnp.zeros((), x.dtype))
        return lax.psum(states, over) if over else states  # zeros on all devices but one

    return jax.shard_map(take, in_specs=(spec, P(batch, None)), out_specs=P(batch, None, embed))(
        x, positions
    )
