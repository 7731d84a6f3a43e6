"""Attention as its definition says, in float64 with NumPy: what the tests here compare with."""

import dataclasses

import numpy as np

Arrays = tuple[np.ndarray, ...]


@dataclasses.dataclass(frozen=True)
class Sees:
    """Which keys a query sees, with the fields of a Mask."""

    causal: bool = True
    window: int | None = None
    block: int | None = None
    offset: int = 0

    def table(self, queries: int, keys: int) -> np.ndarray:
        """[queries, keys]"""
        query, key = np.arange(queries)[:, None] + self.offset, np.arange(keys)[None]
        if not self.causal:
            return np.ones((queries, keys), bool)
        if self.block is not None:  # up to where the query's block ends
            return key < (query // self.block + 1) * self.block
        nearest = queries + keys + abs(self.offset) if self.window is None else self.window
        return (key <= query) & (key > query - nearest)


def inputs(
    batch: int, length: int, heads: int, kv_heads: int, head_dim: int = 8, seed: int = 0
) -> Arrays:
    """Queries, keys, values, and a gradient of the output.

    Scores are mostly within ±3 and reach ±8: weights are far from equal, yet many keys have a part
    in a query.
    """
    rng = np.random.default_rng(seed)
    sizes = [(heads, 1.25), (kv_heads, 1.25), (kv_heads, 1.0), (heads, 1.0)]
    return tuple(
        rng.normal(size=(batch, length, n, head_dim), scale=scale).astype("f") for n, scale in sizes
    )


def documents(batch: int, length: int) -> np.ndarray:
    """Each row cut elsewhere, with padding (0) at the end."""
    segments = np.zeros((batch, length), "i")
    for row in range(batch):
        cut = 1 + (3 * row + length // 3) % (length - 2)
        segments[row, :cut], segments[row, cut : length - 1 - row % 2] = 1, 2
    return segments


def in_float64(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, given: np.ndarray,
    segments: np.ndarray | tuple[np.ndarray, np.ndarray] | None = None, sees: Sees | None = None,
    bias: np.ndarray | None = None,
) -> tuple[np.ndarray, Arrays]:  # fmt: skip
    """The output, and the gradients of q, k, v and the bias by the rule of the softmax."""
    q, k, v, given = (x.astype("f8") for x in (q, k, v, given))
    heads, kv_heads, scale = q.shape[2], k.shape[2], q.shape[3] ** -0.5
    seen = (sees or Sees()).table(q.shape[1], k.shape[1])[None]
    if segments is not None:
        of_q, of_k = segments if isinstance(segments, tuple) else (segments, segments)
        seen = seen & (of_q[:, :, None] == of_k[:, None, :])
    all_k, all_v = (np.repeat(x, heads // kv_heads, axis=2) for x in (k, v))
    scores = np.einsum("bihd,bjhd->bhij", q, all_k) * scale
    if bias is not None:
        scores = scores + bias
    weights = np.where(seen[:, None], np.exp(scores), 0.0)  # float64 holds e^100 without care
    total = weights.sum(-1, keepdims=True)
    weights /= np.where(total == 0, 1, total)  # a query that sees nothing
    out = np.einsum("bhij,bjhd->bihd", weights, all_v)
    of_weights = np.einsum("bihd,bjhd->bhij", given, all_v)
    of_biased = weights * (of_weights - np.sum(weights * of_weights, -1, keepdims=True))
    of_scores = of_biased * scale

    def shared(x: np.ndarray) -> np.ndarray:
        """Query heads that share a key head, added up."""
        return x.reshape(*x.shape[:2], kv_heads, heads // kv_heads, -1).sum(3)

    gradients = (
        np.einsum("bhij,bjhd->bihd", of_scores, all_k),
        shared(np.einsum("bhij,bihd->bjhd", of_scores, q)),
        shared(np.einsum("bhij,bihd->bjhd", weights, given)),
    )
    return out, gradients if bias is None else (*gradients, of_biased.sum(0))


def zigzag(length: int, ways: int) -> np.ndarray:
    """The places in the text of a row that lies in zig-zag order over so many devices."""
    chunks = np.arange(length).reshape(2 * ways, -1)
    return np.concatenate([chunks[[i, 2 * ways - 1 - i]].reshape(-1) for i in range(ways)])
