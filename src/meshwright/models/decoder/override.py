"""Changes to a decoder's config by name: `rope.theta=5e7`, `layers=4`."""

import dataclasses
from collections.abc import Mapping

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.models.decoder.config import DecoderConfig
from meshwright.models.overrides import override_fields, value_of
from meshwright.ops import LinearScaling, Llama3Scaling, Rope, YarnScaling

_ROPE = ("rope.theta", "rope.scaling", "rope.factor")
_SCALINGS = ("linear", "yarn", "llama3")


def override(config: DecoderConfig, changes: Mapping[str, str], seq: int) -> DecoderConfig:
    """The config with these changes; positions that are changed reach sequences of `seq` tokens.

    >>> tiny = DecoderConfig(320, 4, 128, 8, 4, 16, 512)
    >>> override(tiny, {"layers": "2", "rope.theta": "5e7"}, 32768).max_seq
    32768
    """
    return _with_rope(override_fields(config, changes, _ROPE), changes, seq)


def _with_rope(config: DecoderConfig, changes: Mapping[str, str], seq: int) -> DecoderConfig:
    """Rotary positions other than the model's own, for longer contexts."""
    if not set(changes) & set(_ROPE):
        return config
    theta = value_of("rope.theta", changes.get("rope.theta", str(config.rope.theta)), float)
    factor = value_of("rope.factor", changes.get("rope.factor", "1"), float)
    name, scaling = changes.get("rope.scaling"), config.rope.scaling
    if not 1 < theta < 1e30:  # nan too
        raise MeshwrightError(f"override rope.theta={theta} must be above 1, such as 500000")
    if not 1 <= factor < 1e30:
        raise MeshwrightError(f"override rope.factor={factor} must be at least 1, such as 8")
    if name not in (None, *_SCALINGS):
        raise MeshwrightError(
            f"override rope.scaling={name} is not a scaling{did_you_mean(name, _SCALINGS)}"
        )
    if name is not None and factor == 1:
        raise MeshwrightError(
            f"override rope.scaling={name} needs rope.factor: how many times the model's length "
            "sequences may have, such as rope.factor=8"
        )
    if name is None and factor > 1:
        raise MeshwrightError(
            f"override rope.factor={factor:g} belongs to a scaling; add rope.scaling=linear, yarn "
            "or llama3"
        )
    match name:
        case "linear":
            scaling = LinearScaling(factor)
        case "yarn":
            scaling = YarnScaling(factor, config.max_seq)
        case "llama3":
            scaling = Llama3Scaling(factor, 1.0, 4.0, config.max_seq)
    return dataclasses.replace(config, rope=Rope(theta, scaling), max_seq=max(config.max_seq, seq))
