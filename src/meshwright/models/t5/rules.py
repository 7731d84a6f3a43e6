"""The rules that place the arrays of a T5: those of a decoder, and its own dims."""

from meshwright.layouts import Rules
from meshwright.models.decoder.rules import decoder_rules
from meshwright.models.decoder.rules import serving_rules as decoder_serving_rules
from meshwright.models.decoder.rules import t5x_rules as decoder_t5x_rules


def t5_rules(sp: bool = False, sequence_parallel: bool = False, ep: bool = False) -> Rules:
    """The rules of a decoder; the tables of relative positions are split over heads alone."""
    return with_encoder(decoder_rules(sp, sequence_parallel, ep), ("relpos_buckets", None))


def t5x_rules(activation_dims: int = 1, parameter_dims: int = 1) -> Rules:
    """T5X's standard sets: data is (dp, fsdp), model is tp."""
    return with_encoder(decoder_t5x_rules(activation_dims, parameter_dims))


def serving_rules(ep: bool = False) -> Rules:
    """Those of a decoder that is served."""
    return with_encoder(decoder_serving_rules(ep), ("relpos_buckets", None))


def with_encoder(rules: Rules, *more: tuple[str, None]) -> Rules:
    """The encoder's length is sharded as the decoder's."""
    along = [("encoder_length", rule.axes) for rule in rules.rules if rule.dim == "length"]
    return Rules([*rules.rules, *along, *more], optional=(*rules.optional, "encoder_length"))
