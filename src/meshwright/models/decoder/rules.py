"""The rules that place the arrays of a dense decoder on a mesh of (dp, fsdp, tp, sp)."""

from meshwright.layouts import Rules, standard_rules

# of latent attention
_RANK = "latent_rank"  # the input of matrices, as embed is of others
LATENT = (_RANK, "latent", "head_part")
OPTIONAL = ("batch", "length", "positions", "experts", "shared_mlp", *LATENT)


def decoder_rules(sp: bool = False, sequence_parallel: bool = False, ep: bool = False) -> Rules:
    """Weights: input dims over fsdp, heads, mlp and vocabulary over tp; batch over dp and fsdp.

    With `sp` the sequence is split over sp, and weights over fsdp and sp jointly. With
    `sequence_parallel` activations between blocks are split over tp too, along the sequence: each
    all-reduce of tensor parallelism becomes a reduce-scatter and an all-gather, and norms and
    residuals are stored once instead of tp times. With `ep` it splits experts, and like fsdp the
    batch and the weights that are no expert's.
    """
    embed = ("fsdp", "sp") if sp else ("fsdp",)
    along_ep = ("ep",) if ep else ()
    between = ("sp", "tp") if sp else ("tp",)
    return Rules(
        [
            ("batch", ("dp", "fsdp", *along_ep)),
            ("experts", along_ep or None),
            ("vocab", "tp"),
            ("heads", "tp"),
            ("kv_heads", "tp"),
            ("mlp", "tp"),
            ("shared_mlp", "tp"),
            # inside a block tp splits heads or mlp, so this loses there and the next one holds
            *([("length", between)] if sequence_parallel else []),
            ("length", "sp" if sp else None),
            *([("embed", (*embed, "ep"))] if ep else []),
            ("embed", embed),
            *((dim, (*embed, *along_ep) if dim == _RANK else None) for dim in LATENT),
            ("head_dim", None),
            ("layers", None),
            ("norm", None),
            ("positions", None),
        ],
        optional=OPTIONAL,
    )


def t5x_rules(activation_dims: int = 1, parameter_dims: int = 1) -> Rules:
    """T5X's standard sets for this model: data is (dp, fsdp), model is tp.

    Its set names `kv` what is `head_dim` here; key heads go with the heads, norms stay whole.
    """
    own = [
        ("kv_heads", "model"), ("head_dim", None), ("norm", None), ("positions", None),
        ("experts", None), ("shared_mlp", "model"), *((dim, None) for dim in LATENT),
    ]  # fmt: skip
    standard = standard_rules(activation_dims, parameter_dims)
    heads = next(i for i, rule in enumerate(standard.rules) if rule.dim == "heads")
    rules = Rules(
        [*standard.rules[: heads + 1], *own, *standard.rules[heads + 1 :]],
        optional={*standard.optional, *OPTIONAL},
    )
    return rules.rename_axes(data=("dp", "fsdp"), model="tp")


def serving_rules(ep: bool = False) -> Rules:
    """Weights as in training with sp; the tokens of a step are not split."""
    return Rules(
        [
            *((dim, "tp") for dim in ("vocab", "heads", "kv_heads", "mlp", "shared_mlp")),
            ("experts", "ep" if ep else None),
            ("embed", ("fsdp", "sp")),
            *(
                (dim, None)
                for dim in ("batch", "length", "head_dim", "layers", "norm", "positions")
            ),
            *((dim, None) for dim in LATENT),
        ],
        optional=OPTIONAL,
    )
