"""The config of a decoder: its sizes, and the layer kinds that its stack repeats."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.models.decoder.kinds import (
    FIELDS,
    LayerKind,
    check_size,
    field_defaults,
    field_of,
    layer_kind,
    with_fields,
)


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class DecoderConfig:
    """A decoder, by the layer kinds of its pattern and by what is not a layer's.

    Layer i is of kind `pattern[i % len(pattern)]`; the layers of the pattern begin after those that
    are `leading`. The fields of layer kinds (`kinds.FIELDS`) can
    be given by name, and are then those of every layer; so they can be read where layers agree.

    >>> config = DecoderConfig(320, 4, 128, heads=8, kv_heads=4, head_dim=16, mlp=512)
    >>> dataclasses.replace(config, sliding_window=64).pattern[0].attention.window
    64
    >>> mixed = DecoderConfig(320, 4, 128, 8, 4, 16, 512, pattern=[{"sliding_window": 64}, {}])
    >>> [kind.attention.window for kind in mixed.pattern], mixed.heads
    ([64, None], 8)
    >>> mixed.max_seq, len(mixed.kinds)
    (4096, 2)
    """

    vocab: int
    layers: int
    embed: int
    pattern: tuple[LayerKind, ...]  # the shortest that repeats
    leading: int = 0  # the first layers, which have one mlp in place of experts
    leading_mlp: int | None = None  # its size
    tied_embeddings: bool = False  # the LM head is the embedding, transposed
    max_seq: int = 4096
    learned_positions: bool = False  # a vector for each position is added to the embedding
    position_offset: int = 0  # of the first position in their table, which has as many more
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    head_bias: bool = False  # of the LM head
    # the Hugging Face config.json it was read from, for writing it again: no part of the model
    hf_config: Mapping[str, Any] | None = dataclasses.field(default=None, compare=False, repr=False)

    def __init__(
        self,
        vocab: int,
        layers: int,
        embed: int,
        heads: int | None = None,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        mlp: int | None = None,
        **fields: Any,
    ) -> None:
        """`fields`: those of this class, and of layer kinds by name.

        The pattern is of layer kinds, or of the fields in which each differs from the others.
        """
        sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "mlp": mlp}
        of_layers = {name: size for name, size in sizes.items() if size is not None}
        of_layers |= {name: value for name, value in fields.items() if name in FIELDS}
        own = {"vocab": vocab, "layers": layers, "embed": embed} | own_defaults() | fields
        for name in ("vocab", "layers", "embed", "max_seq"):
            check_size(name, own[name])
        kinds = _kinds(own.pop("pattern", ({},)), of_layers)
        _check_leading(own, kinds)
        object.__setattr__(self, "pattern", _shortest(kinds, layers - own["leading"]))
        for name, value in own.items():
            if name in type(self).__annotations__:
                object.__setattr__(self, name, value)
            elif name not in FIELDS:
                raise TypeError(f"{name!r} is not a field of a decoder's config")

    def __getattr__(self, name: str) -> Any:
        """A field of the layer kinds, if it is the same in all layers."""
        if name not in FIELDS:
            raise AttributeError(f"{name!r} is not a field of a decoder's config")
        values = list(dict.fromkeys(field_of(kind, name) for kind in self.pattern))
        if len(values) > 1:
            raise MeshwrightError(
                f"the layers of this model differ in {name}: {', '.join(map(str, values))} in "
                "turn; read it of each kind in config.pattern"
            )
        return values[0]

    def __repr__(self) -> str:
        """The call that makes it, without what is the default."""
        own = {name: getattr(self, name) for name in ("vocab", "layers", "embed")}
        kinds = [{name: field_of(kind, name) for name in FIELDS} for kind in self.pattern]
        shared = {n: v for n, v in kinds[0].items() if all(kind[n] == v for kind in kinds)}
        own |= _unusual(shared, field_defaults())
        if len(kinds) > 1:
            others = ({n: v for n, v in kind.items() if n not in shared} for kind in kinds)
            own["pattern"] = [_unusual(kind, field_defaults()) for kind in others]
        usual = own_defaults()
        own |= _unusual({n: getattr(self, n) for n in usual if n != "hf_config"}, usual)
        return f"DecoderConfig({', '.join(f'{name}={value!r}' for name, value in own.items())})"

    @property
    def leading_kind(self) -> LayerKind:
        """That of the leading layers: as the others, with one mlp."""
        defaults = field_defaults()
        dense = {name: defaults[name] for name, (part, _) in FIELDS.items() if part == "experts"}
        return with_fields(self.pattern[0], {**dense, "mlp": self.leading_mlp})

    @functools.cached_property
    def kinds(self) -> dict[LayerKind, int]:
        """The different kinds of layers, and how many are of each."""
        repeated, rest = divmod(self.layers - self.leading, len(self.pattern))
        counts: dict[LayerKind, int] = {self.leading_kind: self.leading} if self.leading else {}
        for i, kind in enumerate(self.pattern):
            counts[kind] = counts.get(kind, 0) + repeated + (i < rest)
        return counts

    @property
    def matmul_params(self) -> int:
        """Weights that a token is multiplied with: matrices, those of its experts, the LM head."""
        total = self.embed * self.vocab
        for kind, layers in self.kinds.items():
            experts = kind.experts
            mlp = kind.mlp.matrices * kind.mlp.size
            if experts.count:
                mlp = mlp * experts.per_token + experts.count
                mlp += kind.mlp.matrices * experts.shared
            total += layers * (kind.attention.matmul_params(self.embed) + self.embed * mlp)
        return total

    def keys_seen(self, seq: int) -> float:
        """Keys that a query sees, on average over the layers."""
        seen = [(kind.attention.keys_seen(seq), layers) for kind, layers in self.kinds.items()]
        return sum(keys * layers for keys, layers in seen) / self.layers

    def flops_per_token(self, seq: int, keys_seen: float | None = None) -> int:
        """Of a training step, forward and backward: 6 per weight, and causal attention.

        Each visible key costs 6 per number of a key and of a value. `keys_seen`: those of a query
        of packed documents, on average; without it, of sequences that are one document each.
        """
        keys = self.keys_seen(seq) if keys_seen is None else keys_seen
        numbers = sum(
            layers * kind.attention.heads * (kind.attention.head_dim + kind.attention.values_dim)
            for kind, layers in self.kinds.items()
        )
        return 6 * self.matmul_params + round(6 * numbers * keys)


def own_defaults() -> dict[str, Any]:
    """The fields of a config that may be left out, and what they are then."""
    fields = dataclasses.fields(DecoderConfig)
    return {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}


def _check_leading(own: Mapping[str, Any], kinds: Sequence[LayerKind]) -> None:
    leading = own["leading"]
    if not leading:
        return
    check_size("leading", leading)
    check_size("leading_mlp", own["leading_mlp"])
    if leading >= own["layers"] or len(set(kinds)) > 1 or not kinds[0].experts.count:
        raise MeshwrightError(
            f"leading={leading} of {own['layers']} layers: it must be fewer than all, and the "
            "others of one kind with experts"
        )


def _unusual(values: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are not the default."""
    return {n: value for n, value in values.items() if n not in usual or value != usual[n]}


def _kinds(
    pattern: Sequence[LayerKind | Mapping[str, Any]], of_layers: Mapping[str, Any]
) -> list[LayerKind]:
    if not pattern:
        raise MeshwrightError("the pattern of a model's layers is empty; give at least one kind")
    return [
        with_fields(kind, of_layers)
        if isinstance(kind, LayerKind)
        else layer_kind(**{**of_layers, **kind})
        for kind in pattern
    ]


def _shortest(kinds: Sequence[LayerKind], layers: int) -> tuple[LayerKind, ...]:
    """The shortest pattern that gives the same layers when it is repeated, the last time in part.

    Two repetitions show whether a shorter one does.
    """
    shown = [kinds[i % len(kinds)] for i in range(min(layers, 2 * len(kinds)))]
    for period in range(1, len(kinds)):
        if all(kind == shown[i % period] for i, kind in enumerate(shown)):
            return tuple(shown[:period])
    return tuple(kinds[:layers])
