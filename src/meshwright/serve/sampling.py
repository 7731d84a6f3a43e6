"""From logits to a token: greedy, or drawn from what the filters leave.

A draw depends on the seed, the row's number, the position and the logits: not on the mesh, nor on
what else is in the batch.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from meshwright.arithmetic import check_seed, whole_number
from meshwright.errors import MeshwrightError
from meshwright.ops import spec_of


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; filters apply in the order they stand here."""

    temperature: float = 1.0
    """Logits are divided by it; 0 (or as good as 0, below 1e-6) takes the likeliest always."""
    top_k: int | None = None
    """Only the k likeliest."""
    top_p: float | None = None
    """Of these, the likeliest whose probabilities together reach p."""
    min_p: float | None = None
    """Of these, those at least p times as likely as the likeliest."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not _number(self.temperature) or not 0 <= self.temperature < math.inf:
            raise MeshwrightError(
                f"temperature={self.temperature!r} must be a number from 0; 0 takes the likeliest "
                "token, 1 samples as the model predicts"
            )
        if self.top_k is not None and whole_number(self.top_k, "top_k") < 1:
            raise MeshwrightError("top_k=0 would leave no token; give 1 or more, or leave it out")
        for name, value in (("top_p", self.top_p), ("min_p", self.min_p)):
            if value is not None and not (_number(value) and 0 <= value <= 1):
                raise MeshwrightError(f"{name}={value!r} is a probability, from 0 to 1")
        if self.top_p == 0:
            raise MeshwrightError("top_p=0 would leave no token; temperature=0 takes the likeliest")
        check_seed(self.seed)


def sample(
    logits: jax.Array,
    rows: jax.Array,
    positions: jax.Array,
    sampling: Sampling,
    vocab: int | None = None,
) -> jax.Array:
    """A token for each row of logits [batch, vocab], each row whole on its device.

    `rows` and `positions` [batch] number the draws. Of a model's vocabulary only the first `vocab`
    tokens are taken, where its tokenizer has fewer.
    """
    batch = spec_of(logits)[0]

    def local(logits: jax.Array, rows: jax.Array, positions: jax.Array) -> jax.Array:
        logits = logits.astype(jnp.float32)[:, :vocab]
        if sampling.temperature < 1e-6:  # float32 could not divide by much less
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        root = jax.random.key(sampling.seed)

        def draw(logits: jax.Array, row: jax.Array, position: jax.Array) -> jax.Array:
            key = jax.random.fold_in(jax.random.fold_in(root, row), position)
            return jax.random.categorical(key, filtered(logits, sampling)).astype(jnp.int32)

        return jax.vmap(draw)(logits, rows, positions)

    specs = (P(batch, None), P(batch), P(batch))
    return jax.shard_map(local, in_specs=specs, out_specs=P(batch))(
        logits, *(jax.sharding.reshard(x, P(batch)) for x in (rows, positions))
    )


def filtered(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """One row's logits [vocab] over the temperature; -inf where a filter leaves a token out."""
    # the likeliest at 0, so that no temperature makes it infinite
    scaled = (logits - jnp.max(logits)) / sampling.temperature
    kept = jnp.ones(logits.shape, bool)
    vocab = logits.shape[0]
    if sampling.top_k is not None or sampling.top_p is not None:
        # exactly k stay: of equal logits, those with the smaller ids
        k = vocab if sampling.top_k is None else min(sampling.top_k, vocab)
        likeliest, ids = lax.top_k(scaled, k)
        stays = jnp.ones(k, bool)
        if sampling.top_p is not None:
            probabilities = jax.nn.softmax(likeliest)
            before = jnp.cumsum(probabilities) - probabilities
            stays = before < sampling.top_p
        kept = jnp.zeros(logits.shape, bool).at[ids].set(stays, unique_indices=True)
    if sampling.min_p:  # 0 lets every token pass
        kept &= scaled >= math.log(sampling.min_p)  # of the ratio to the likeliest
    return jnp.where(kept, scaled, -jnp.inf)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
