"""What a layer of a decoder is: kinds of attention, MLP and norm, as data.

A stack of layers repeats a pattern of layer kinds. Each setting of a kind also has a name of its
own (`FIELDS`), by which configs, `--override` and Hugging Face tables speak of it:

>>> kind = layer_kind(heads=8, kv_heads=4, head_dim=16, mlp=512, sliding_window=64)
>>> kind.attention.window, field_of(kind, "sliding_window")
(64, 64)
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.models.blocks import ACTIVATIONS
from meshwright.ops import LongRopeScaling, NormKind, Rope

NORM_PLACES = ("before", "after", "both")
ROUTER_SCORES = ("softmax", "sigmoid")
_PLAIN_ROPE = Rope()


@dataclasses.dataclass(frozen=True)
class AttentionKind:
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None = _PLAIN_ROPE  # None: no rotary positions
    window: int | None = None  # a token sees itself and window - 1 before it
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False  # each head's query and key through a norm
    joint_qk_norm: bool = False  # that norm is over all heads together
    scale: float | None = None  # of scores; None: head_dim^-0.5
    softcap: float | None = None  # scores s become softcap · tanh(s / softcap)
    sinks: bool = False  # each head sees one more key, of a learned score and the value zero
    # latent attention: the size of the vector that keys and values are made of, and of queries
    kv_rank: int | None = None
    q_rank: int | None = None
    rope_dim: int | None = None  # of head_dim, the last: rotated, and of keys shared by all heads
    value_dim: int | None = None

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads", "head_dim"):
            check_size(name, getattr(self, name))
        if self.heads % self.kv_heads:
            raise MeshwrightError(
                f"heads={self.heads} cannot share kv_heads={self.kv_heads} evenly; heads must be a "
                "multiple of kv_heads"
            )
        if self.kv_rank is not None:
            self._check_latent()
        if self.rope is not None and self.rotated_dim % 2:
            raise MeshwrightError(
                f"head_dim={self.rotated_dim} is odd; it must be even: rotary embedding rotates "
                "pairs"
            )
        if self.rope is not None and isinstance(self.rope.scaling, LongRopeScaling):
            pairs = (self.rope.dims or self.rotated_dim) // 2
            self.rope.scaling.check_pairs(pairs)
        if self.window is not None and self.window < 1:
            raise MeshwrightError(f"sliding_window={self.window} must be at least 1")

    def _check_latent(self) -> None:
        for name in ("kv_rank", "rope_dim", "value_dim"):
            check_size(name, getattr(self, name))
        if max(self.rotated_dim + 1, self.values_dim) > self.head_dim or self.rope is None:
            raise MeshwrightError(
                f"latent attention with head_dim={self.head_dim} needs a smaller rope_dim, a "
                f"value_dim of at most that and rotary positions, not rope_dim={self.rope_dim} and "
                f"value_dim={self.value_dim}"
            )
        if self.heads != self.kv_heads:
            raise MeshwrightError(
                f"latent attention has keys for each head: kv_heads={self.kv_heads} must be "
                f"heads={self.heads}"
            )

    @property
    def rotated_dim(self) -> int:
        """Of a head, what rotary positions are told is its size."""
        return self.head_dim if self.rope_dim is None else self.rope_dim

    @property
    def values_dim(self) -> int:
        return self.head_dim if self.value_dim is None else self.value_dim

    def matmul_params(self, embed: int) -> int:
        """Weights that a token is multiplied with."""
        if self.kv_rank is None or self.rope_dim is None:
            return 2 * embed * self.head_dim * (self.heads + self.kv_heads)
        queries = self.heads * self.head_dim
        of_q = embed * queries if self.q_rank is None else self.q_rank * (embed + queries)
        keys = self.heads * (self.head_dim - self.rope_dim + self.values_dim)
        of_kv = embed * (self.kv_rank + self.rope_dim) + self.kv_rank * keys
        return of_q + of_kv + self.heads * self.values_dim * embed

    def keys_seen(self, seq: int) -> float:
        """Keys that a query sees, on average: half of the sequence, fewer within a window."""
        window = min(self.window or seq, seq)
        return window * (2 * seq - window) / seq / 2


@dataclasses.dataclass(frozen=True)
class MlpKind:
    size: int  # of the activations inside it
    gated: bool = True  # the activation of one projection multiplies another
    activation: str = "silu"
    bias: bool = False
    clamp: float | None = None  # of what the gate and its activation are of, see `activate`

    def __post_init__(self) -> None:
        check_size("mlp", self.size)
        if self.activation not in ACTIVATIONS:
            raise MeshwrightError(
                f"activation={self.activation!r} is not an activation"
                f"{did_you_mean(self.activation, ACTIVATIONS)}"
            )

    @property
    def matrices(self) -> int:
        return 3 if self.gated else 2


@dataclasses.dataclass(frozen=True)
class ExpertsKind:
    """A mixture of experts: how many there are, and how a router chooses. Each is an mlp."""

    count: int = 0  # 0: one mlp for all tokens
    per_token: int = 1
    scores: str = "softmax"  # of the router's logits: softmax or sigmoid
    normalized: bool = True  # the weights of a token's experts are divided by their sum
    scale: float = 1.0  # of these weights
    router_bias: bool = False
    selection_bias: bool = False  # added to the scores for the choice alone
    groups: int = 1  # of experts; a token chooses in the best of them
    groups_per_token: int = 1
    shared: int = 0  # the size of an mlp that every token goes through beside its experts

    def __post_init__(self) -> None:
        if not self.count:
            return
        for name in ("count", "per_token", "groups", "groups_per_token"):
            check_size({"count": "experts"}.get(name, f"experts_{name}"), getattr(self, name))
        if self.scores not in ROUTER_SCORES:
            raise MeshwrightError(
                f"router_scores={self.scores!r} is not known"
                f"{did_you_mean(self.scores, ROUTER_SCORES)}"
            )
        if self.count % self.groups or self.groups_per_token > self.groups:
            raise MeshwrightError(
                f"experts={self.count} cannot be in expert_groups={self.groups} of which a token "
                f"has {self.groups_per_token}; give groups that divide the experts"
            )
        most = self.count // self.groups * self.groups_per_token
        if self.per_token > most:
            raise MeshwrightError(
                f"experts_per_token={self.per_token} is more than the {most} that a token can "
                "choose from"
            )


@dataclasses.dataclass(frozen=True)
class LayerKind:
    attention: AttentionKind
    mlp: MlpKind
    norm: NormKind
    experts: ExpertsKind = ExpertsKind()
    norm_places: str = "before"  # each block, after it, or both
    parallel: bool = False  # attention and mlp read the same residual stream
    shared_norm: bool = False  # and the same norm of it
    residual_scale: float = 1.0  # of what attention and mlp add

    def __post_init__(self) -> None:
        if self.norm_places not in NORM_PLACES:
            raise MeshwrightError(
                f"norm_places={self.norm_places!r} is not one of them"
                f"{did_you_mean(self.norm_places, NORM_PLACES)}"
            )
        if self.shared_norm and not self.parallel:
            raise MeshwrightError("shared_norm=True is for parallel layers; set parallel=True")


# the name of each setting, and where a layer kind has it
FIELDS: Mapping[str, tuple[str, str]] = {
    "heads": ("attention", "heads"),
    "kv_heads": ("attention", "kv_heads"),
    "head_dim": ("attention", "head_dim"),
    "mlp": ("mlp", "size"),
    "rope": ("attention", "rope"),
    "norm_eps": ("norm", "eps"),
    "qkv_bias": ("attention", "qkv_bias"),
    "output_bias": ("attention", "output_bias"),
    "qk_norm": ("attention", "qk_norm"),
    "sliding_window": ("attention", "window"),
    "gated": ("mlp", "gated"),
    "activation": ("mlp", "activation"),
    "mlp_bias": ("mlp", "bias"),
    "mlp_clamp": ("mlp", "clamp"),
    "norm": ("norm", "kind"),
    "norm_bias": ("norm", "bias"),
    "joint_qk_norm": ("attention", "joint_qk_norm"),
    "score_scale": ("attention", "scale"),
    "score_softcap": ("attention", "softcap"),
    "sinks": ("attention", "sinks"),
    "kv_rank": ("attention", "kv_rank"),
    "q_rank": ("attention", "q_rank"),
    "rope_dim": ("attention", "rope_dim"),
    "value_dim": ("attention", "value_dim"),
    "norm_places": ("", "norm_places"),
    "parallel": ("", "parallel"),
    "shared_norm": ("", "shared_norm"),
    "residual_scale": ("", "residual_scale"),
    "experts": ("experts", "count"),
    "experts_per_token": ("experts", "per_token"),
    "router_scores": ("experts", "scores"),
    "router_normalized": ("experts", "normalized"),
    "router_scale": ("experts", "scale"),
    "router_bias": ("experts", "router_bias"),
    "selection_bias": ("experts", "selection_bias"),
    "expert_groups": ("experts", "groups"),
    "expert_groups_per_token": ("experts", "groups_per_token"),
    "shared_mlp": ("experts", "shared"),
}
_PARTS: Mapping[str, Any] = {
    "attention": AttentionKind, "mlp": MlpKind, "norm": NormKind, "experts": ExpertsKind,
    "": LayerKind,
}  # fmt: skip


def layer_kind(**fields: Any) -> LayerKind:
    """The layer kind with these fields, by their names."""
    parts: dict[str, dict[str, Any]] = {part: {} for part in _PARTS}
    for name, value in fields.items():
        part, field = _place(name)
        parts[part][field] = value
    own = parts.pop("")
    return LayerKind(**{part: _PARTS[part](**values) for part, values in parts.items()}, **own)


def with_fields(kind: LayerKind, fields: Mapping[str, Any]) -> LayerKind:
    """The layer kind with these fields changed."""
    return layer_kind(**{name: field_of(kind, name) for name in FIELDS} | dict(fields))


def field_of(kind: LayerKind, name: str) -> Any:
    """A field of a layer kind, by its name."""
    part, field = _place(name)
    return getattr(getattr(kind, part) if part else kind, field)


def field_types() -> dict[str, Any]:
    """The type of each field."""
    types = {part: {f.name: f.type for f in dataclasses.fields(_PARTS[part])} for part in _PARTS}
    return {name: types[part][field] for name, (part, field) in FIELDS.items()}


def field_defaults() -> dict[str, Any]:
    """The value that a field has where nothing is said; of a size there is none."""
    parts = {part: {f.name: f for f in dataclasses.fields(_PARTS[part])} for part in _PARTS}
    fields = {name: parts[part][field] for name, (part, field) in FIELDS.items()}
    return {
        name: field.default
        for name, field in fields.items()
        if field.default is not dataclasses.MISSING
    }


def check_size(name: str, value: Any) -> None:
    if not isinstance(value, int) or value < 1:
        raise MeshwrightError(f"{name}={value!r} of a model must be a whole number from 1")


def _place(name: str) -> tuple[str, str]:
    if name not in FIELDS:
        raise TypeError(f"{name!r} is not a field of a model")
    return FIELDS[name]
