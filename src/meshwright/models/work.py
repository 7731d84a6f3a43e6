"""The work of a model, as its family declares it: what the planner counts with.

Sizes are those of the family's arrays. Declared is what arrays do not say: which sequence goes
through which layers, what attends to what, and which activations a remat policy may save.
"""

import dataclasses
from collections.abc import Mapping

from meshwright.ops.attention import Mask


@dataclasses.dataclass(frozen=True)
class Attention:
    """Attention of a block: its mask, and where keys and values come from."""

    mask: Mask
    """Of layers that differ, the one that sees most."""
    keys_from: str = ""
    """The batch field whose sequence gives keys and values; its own if empty."""
    biased: bool = False
    """Whether a bias is added to the scores, which not every kernel can."""
    masks: tuple[tuple[Mask, int], ...] = ()
    """Each mask, and how many layers have it, where they differ."""
    value_dim: int | None = None
    """Numbers of a head's value, where they are fewer than those of its key."""


@dataclasses.dataclass(frozen=True)
class Experts:
    """Experts of a block."""

    count: int
    per_token: int  # how many of them a token goes through
    dims: tuple[int, int]  # of their matrices: embed and mlp


@dataclasses.dataclass(frozen=True)
class Block:
    """A part of a layer that reads the residual stream and adds to it."""

    name: str
    """Of its arrays in a layer."""
    saved: Mapping[str, str]
    """Activations that a remat policy may save: name → dims beside batch and length.

    The dim `chosen` is that of a token's experts."""
    outputs: Mapping[str, str]
    """Matrix → the activation that it makes; "" for one that is saved by every policy."""
    attention: Attention | None = None
    experts: Experts | None = None
    """Of matrices of the kind `expert`: a token meets those of the experts that it chooses."""
    beside: str = ""
    """The block that reads the same input, among whose arrays its own are."""


@dataclasses.dataclass(frozen=True)
class Stack:
    """Layers through which one sequence of a batch goes."""

    path: tuple[str, ...]
    """Of its layers in the tree of arrays."""
    field: str
    """The batch field of the sequence."""
    blocks: tuple[Block, ...]
    layers: int
    """How many there are."""
    period: int = 1
    """Kinds of layers that follow each other: a loop over layers takes so many at a time."""


def attention_block(
    attention: Attention,
    name: str = "attention",
    enters: str = "input",
    norm_places: str = "before",
) -> Block:
    """Attention as `blocks` and the families compute it; `enters` names the residual stream."""
    heads, kv_heads = "heads head_dim", "kv_heads head_dim"
    return Block(
        name,
        saved={
            enters: "embed", **_norms(norm_places), "q": heads, "k": kv_heads, "v": kv_heads,
            "attention": heads,
        },
        outputs={"wq": "q", "wk": "k", "wv": "v", "wo": "middle"},
        attention=attention,
    )  # fmt: skip


def latent_block(attention: Attention, plain_queries: bool, norm_places: str = "before") -> Block:
    """Latent attention, whose values are padded to the size of keys.

    Latents are saved by no policy. With `plain_queries` queries are made without one.
    """
    queries = {"wq": "q"} if plain_queries else {"wq_a": "q latent", "wq_b": "q"}
    keys = {"wkv_a": "kv latent", "wk_rope": "k", "wk_b": "k", "wv_b": "v"}
    block = attention_block(attention, norm_places=norm_places)
    return dataclasses.replace(block, outputs={**queries, **keys, "wo": "middle"})


def expert_blocks(
    gated: bool, norm_places: str, experts: Experts, shared: bool
) -> tuple[Block, ...]:
    """A mixture of experts, and the mlp beside them that all tokens go through, if there is one."""
    dense = mlp_block(gated, norm_places)
    chosen = {name: "chosen mlp" if dims == "mlp" else dims for name, dims in dense.saved.items()}
    outputs = {"router": "logits", **dense.outputs}
    mixture = dataclasses.replace(dense, saved=chosen, outputs=outputs, experts=experts)
    if not shared:
        return (mixture,)
    saved = {name: "shared_mlp" for name, dims in dense.saved.items() if dims == "mlp"}
    outputs = {f"shared_{name}": output for name, output in dense.outputs.items()}
    return mixture, Block("shared_mlp", saved, outputs, beside=dense.name)


def mlp_block(gated: bool = True, norm_places: str = "before") -> Block:
    """The mlp of `blocks`."""
    first = ("gate", "up") if gated else ("up",)
    return Block(
        "mlp",
        saved={
            "middle": "embed",
            **_norms(norm_places),
            **dict.fromkeys((*first, "activated"), "mlp"),
        },
        outputs={**{name: name for name in first}, "down": ""},
    )


def _norms(places: str) -> dict[str, str]:
    """What norms before and after a block save."""
    before = {} if places == "after" else {"normed": "embed"}
    return before | ({} if places == "before" else {"output": "embed"})
