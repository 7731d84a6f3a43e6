"""Does a model find what it read far back? Rows with needles through the forward pass of training.

    model = load(look_into("runs/needle"), generation_mesh("sp=4"), rules=RULES)
    found = retrieve(model, needle_sequences(Needles(), rows=32, seq=256, fresh=True))
    found.share

One forward pass with the answers standing in the row: at each of an answer's tokens the likeliest
must be the right one. No cache: what is tested is attention over the mesh, as training does it.
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

_TOKENS = 65536  # of the rows that go through together, a group of devices that share a row


def needle_rules(config: Any) -> Rules:
    """Where the weights of a model lie while it is asked."""
    return family_of(config).rules(sp=True)


@dataclass(frozen=True, eq=False)
class Retrieval:
    """Which answers were right, and where their needles are."""

    right: npt.NDArray[np.bool_]  # [rows, questions]
    rows: NeedleSequences

    @property
    def share(self) -> float:
        return float(self.right.mean())

    def by_depth(self, parts: int = 10) -> "list[Group]":
        """By where in the row the needle is, the row cut into equal parts."""
        return self._groups(self.rows.told, parts)

    def by_distance(self, parts: int = 10) -> "list[Group]":
        """By how far before the answer the needle is."""
        return self._groups(self.rows.asked - self.rows.told, parts)

    def _groups(self, places: npt.NDArray[np.int32], parts: int) -> "list[Group]":
        seq = self.rows.tokens.shape[1]
        edges = [number * seq // parts for number in range(parts + 1)]
        groups = []
        for start, stop in itertools.pairwise(edges):
            here = self.right[(places >= start) & (places < stop)]
            groups.append(Group(start, stop, here.size, int(here.sum())))
        return [group for group in groups if group.asked]


@dataclass(frozen=True)
class Group:
    """Answers whose needle is from `start` to before `stop`."""

    start: int
    stop: int
    asked: int
    right: int


def retrieve(
    model: Model,
    rows: NeedleSequences,
    *,
    context_parallel: str = "auto",
    segments: npt.NDArray[np.int32] | None = None,
) -> Retrieval:
    """Ask everything that the rows ask. The model's weights lie by `needle_rules`.

    `context_parallel` is the method of attention where sp splits sequences. `segments` [batch, seq]
    cuts sequences into documents that do not see each other; by default each is one.
    """
    said = answers(model, rows, context_parallel=context_parallel, segments=segments)
    return Retrieval((said == rows.answers).all(-1), rows)


def answers(
    model: Model,
    rows: NeedleSequences,
    *,
    context_parallel: str = "auto",
    segments: npt.NDArray[np.int32] | None = None,
) -> npt.NDArray[np.int32]:
    """The likeliest token at every place of every answer, [rows, questions, value_length]."""
    number, seq = rows.tokens.shape
    dtype = model.params["embedding"].dtype
    compute = Compute(needle_rules(model.config), dtype, context_parallel=context_parallel)
    program = _program(model.config, compute, model.mesh)
    groups = model.mesh.shape["dp"] * model.mesh.shape["fsdp"]
    together = min(max(1, _TOKENS // seq), -(-number // groups)) * groups
    before = rows.places.reshape(number, -1) - 1  # whose next token is the answer's
    found = []
    for start in range(0, number, together):
        # the last rows are filled up with the first again
        some = np.arange(start, start + together) % number
        documents = None if segments is None else segments[some]
        said = program(model.params, rows.tokens[some], before[some], documents)
        found.append(np.asarray(said)[: number - start])
    return np.concatenate(found).reshape(rows.places.shape)


def check_needle(
    source: Source, mesh: Mesh, seq: int, context_parallel: str = "auto"
) -> str | None:
    """How rows of `seq` bytes would attend on this mesh, None where they are not split.

    A MeshwrightError says why the model cannot be asked them.
    """
    config = source.config
    if source.tokenizer.kind != ByteTokenizer.kind:
        raise MeshwrightError(
            f"{source.name} has a tokenizer of kind {source.tokenizer.kind!r}, and needle rows are "
            "bytes; train a model on rows of 'meshwright data needle', or say --tokenizer bytes "
            "if it reads bytes"
        )
    if config.vocab < ByteTokenizer.vocab:
        raise MeshwrightError(
            f"{source.name} has a vocabulary of {config.vocab}; needle rows need "
            f"{ByteTokenizer.vocab}, the bytes and an end of document"
        )
    if seq > config.max_seq:
        raise MeshwrightError(
            f"seq={seq} is longer than the model allows; {config.max_seq} or less would fit"
        )
    layouts = activation_layouts(needle_rules(config), nontrivial_axes(mesh.shape))
    split = family_of(config).sequence_split(config, layouts, dict(mesh.shape), seq)
    return choose_strategy(split, context_parallel) if split.ways > 1 else None


Program = Callable[[Any, Any, Any, Any], jax.Array]


@functools.lru_cache(maxsize=16)
def _program(config: Any, compute: Compute, mesh: Mesh) -> Program:
    """(params, tokens, places, segments) to the likeliest token after each place [rows, places]."""
    family = family_of(config)

    def likeliest(
        params: Any, tokens: jax.Array, places: jax.Array, segments: jax.Array | None
    ) -> jax.Array:
        x = family.hidden_states(params, tokens, config, compute, segments=segments)
        vocab = compute.layouts.logits.partitions[2]
        # only the places asked for meet the head: logits of whole rows would not fit
        x = _at(x, places)
        stored = family.lm_head(params, config)
        dims = "ve" if stored.tied else "ev"
        spec = P(*(vocab if dim == "v" else None for dim in dims))
        head = reshard(stored.weight.astype(compute.dtype), spec)
        rows = spec_of(x)[0]
        logits = jnp.einsum(
            f"bpe,{dims}->bpv", x, head,
            preferred_element_type=jnp.float32, out_sharding=P(rows, None, vocab),
        )  # fmt: skip
        whole = reshard(logits, P(rows, None, None))[..., : config.vocab]  # without padding
        chosen = jnp.argmax(whole, axis=-1)
        return reshard(chosen.astype(jnp.int32), P(None, None))

    jitted = jax.jit(likeliest)

    def run(params: Any, tokens: Any, places: Any, segments: Any) -> jax.Array:
        with jax.set_mesh(mesh):
            along = NamedSharding(mesh, compute.layouts.tokens)
            by_row = NamedSharding(mesh, P(compute.layouts.tokens.partitions[0], None))
            given = (tokens, along), (places, by_row), (segments, along)
            return jitted(params, *(x if x is None else jax.device_put(x, s) for x, s in given))

    return run


def _at(x: jax.Array, places: jax.Array) -> jax.Array:
    """[rows, length, embed] at places [rows, places] of the row, wherever the length is split."""
    spec = spec_of(x)
    rows, length, embed = spec.partitions
    over = axes_of(length, spec)

    def local(x: jax.Array, places: jax.Array) -> jax.Array:
        part = x.shape[1]
        places = places - (lax.axis_index(over) * part if over else 0)
        here = (places >= 0) & (places < part)
        found = jnp.take_along_axis(x, jnp.where(here, places, 0)[..., None], axis=1)
        found = jnp.where(here[..., None], found, jnp.zeros((), x.dtype))
        return lax.psum(found, over) if over else found  # one device has it, the others zeros

    return jax.shard_map(local, in_specs=(spec, P(rows, None)), out_specs=P(rows, None, embed))(
        x, places
    )
