"""Changes to a decoder's config by name: `rope.theta=5e7`, `layers=4`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.models.decoder.config import DecoderConfig
from meshwright.models.decoder.hf_config import unsaid
from meshwright.models.decoder.kinds import field_types
from meshwright.models.overrides import override_fields, value_of
from meshwright.ops import LinearScaling, Llama3Scaling, Rope, Scaling, YarnScaling

_ROPE = ("rope.theta", "rope.scaling", "rope.factor")
_SCALINGS = ("linear", "yarn", "llama3")


def override(config: DecoderConfig, changes: Mapping[str, str], seq: int) -> DecoderConfig:
    """The config with these changes; positions that are changed reach sequences of `seq` tokens.

    >>> tiny = DecoderConfig(320, 4, 128, 8, 4, 16, 512)
    >>> override(tiny, {"layers": "2", "rope.theta": "5e7"}, 32768).max_seq
    32768
    """
    return _with_rope(override_fields(config, changes, _ROPE, field_types()), changes, seq)


def longer(config: DecoderConfig, seq: int) -> tuple[str, ...]:
    """Changes by which positions reach sequences of `seq` tokens.

    None for learned ones, and where the model's config.json could not say them.
    """
    if seq <= config.max_seq or _positions_of_layers(config):
        return ()
    factor = -(-seq // config.max_seq)
    for name in _SCALINGS:
        rope = dataclasses.replace(config.rope, scaling=_scaling(name, factor, config.max_seq))
        if not unsaid(config, _reaching(config, rope, seq)):
            return f"rope.scaling={name}", f"rope.factor={factor}"
    return ()


def _positions_of_layers(config: DecoderConfig) -> str:
    """Why one change of rotary positions does not fit all layers; empty if it does."""
    ropes = {kind.attention.rope for kind in config.pattern}
    if None in ropes and config.learned_positions:
        return f"this model has {config.max_seq:,} learned positions and no rotary ones"
    if None in ropes or len(ropes) > 1:
        return "the layers of this model have different positions; change them in config.json"
    return ""


def _with_rope(config: DecoderConfig, changes: Mapping[str, str], seq: int) -> DecoderConfig:
    """Rotary positions other than the model's own, for longer contexts."""
    given = [name for name in _ROPE if name in changes]
    if not given:
        return config
    if why := _positions_of_layers(config):
        raise MeshwrightError(f"override {given[0]}={changes[given[0]]}: {why}")
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
    if name is not None:
        scaling = _scaling(name, factor, config.max_seq)
    rope = dataclasses.replace(config.rope, theta=theta, scaling=scaling)
    changed = _reaching(config, rope, seq)
    if architecture := unsaid(config, changed):
        settings = " ".join(f"{one}={changes[one]}" for one in given)
        raise MeshwrightError(
            f"override {settings}: the config.json of {architecture} cannot say such rotary "
            "positions, so its weights could be neither read nor exported; "
            f"{_what_is_said(config, seq)}"
        )
    return changed


def _reaching(config: DecoderConfig, rope: Rope, seq: int) -> DecoderConfig:
    changed: dict[str, Any] = {"rope": rope, "max_seq": max(config.max_seq, seq)}
    return dataclasses.replace(config, **changed)


def _scaling(name: str, factor: float, original: int) -> Scaling:
    match name:
        case "yarn":
            return YarnScaling(factor, original)
        case "llama3":
            return Llama3Scaling(factor, 1.0, 4.0, original)
    return LinearScaling(factor)


def _what_is_said(config: DecoderConfig, seq: int) -> str:
    """What would fit instead of positions that an architecture cannot say."""
    if changes := longer(config, seq):
        return f"it can say {' '.join(changes)}"
    other = dataclasses.replace(config.rope, theta=2 * config.rope.theta)
    if not unsaid(config, _reaching(config, other, seq)):
        return "it can say another rope.theta, such as rope.theta=5e7"
    return f"leave it out, and give sequences of at most {config.max_seq:,} tokens"
