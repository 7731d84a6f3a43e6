"""Where a dense decoder's arrays go on a mesh of (dp, fsdp, tp, sp)."""

from meshwright.layout import Rules


def decoder_rules(sp: bool = False) -> Rules:
    """Weights: input dims over fsdp, heads, mlp and vocabulary over tp; batch over dp and fsdp.

    With `sp` the sequence is split over sp, and weights over fsdp and sp jointly.
    """
    embed = ("fsdp", "sp") if sp else ("fsdp",)
    return Rules(
        [
            ("batch", ("dp", "fsdp")),
            ("length", "sp" if sp else None),
            ("vocab", "tp"),
            ("heads", "tp"),
            ("kv_heads", "tp"),
            ("mlp", "tp"),
            ("embed", embed),
            ("head_dim", None),
            ("norm", None),
        ],
        optional=("batch", "length"),
    )
