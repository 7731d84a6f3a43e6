"""Settings outside their range are refused when they are given, with a value that would do."""

import dataclasses
import math
import typing
from pathlib import Path
from typing import Any

import pytest

from meshwright import MeshwrightError
from meshwright.cli.train import settings as command_line_settings
from meshwright.launch import HANG_TIMEOUT_S, flat_settings
from meshwright.launch.cpu import MOST_DEVICES, simulate_devices
from meshwright.models import LoraConfig, LossConfig, preset
from meshwright.serving import ServeConfig
from meshwright.training.config import (
    TrainConfig,
    config_from_dict,
    config_to_dict,
    settings_flags,
    with_settings,
)
from meshwright.training.optimizer import OptimizerConfig
from meshwright.training.setup import choose_rules


def nested(name: str, value: Any) -> dict[str, Any]:
    """`{"optimizer": {"eps": value}}` for "optimizer.eps"."""
    head, _, rest = name.partition(".")
    return {head: nested(rest, value) if rest else value}


def given(name: str, value: Any) -> TrainConfig:
    return config_from_dict({"model": "tiny"} | nested(name, value), "test")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("optimizer.weight_decay", -0.1, "at least 0"),
        ("optimizer.eps", -1e-8, "above 0, such as 1e-8"),
        ("optimizer.eps", 1e-50, "would be 0 in float32"),
        ("optimizer.learning_rate", 1e39, "would be infinite in float32"),
        ("optimizer.warmup_steps", 1001, "longer than the run, steps=1000.*at most 1000"),
        ("loss.z_loss", -1e-4, "at least 0"),
        ("loss.chunk", 0, "at least 1"),
        ("stop_at", 1001, "beyond the end of the run, steps=1000; give at most 1000"),
        ("stop_at", 0, "at least 1"),
        ("steps", 2**31, "at most 2147483647"),
        ("seed", -1, "from 0 to 4294967295"),
        ("seed", 2**32, "from 0 to 4294967295"),
        ("seed", 2**70, "from 0 to 4294967295"),
        ("batch", 2**31, "at most 2147483647"),
        ("checkpoint.every", 2**63, "fit in 64 bits"),
        ("batch", 0, "at least 1"),
        ("seq", -5, "at least 1"),
        ("accumulation", 0, "at least 1"),
        ("max_skipped", 0, "at least 1"),
        ("hang_timeout", 0.0, "above 0, such as 600"),
        ("cpu_devices", 100_000, "at most 1,024 devices"),
        ("eval.sequences", -1, "at least 0"),
        ("eval.every", 0, "at least 1"),
        ("log.every", 0, "at least 1"),
        ("checkpoint.every", 0, "at least 1"),
        ("checkpoint.keep_last", 0, "at least 1"),
        ("checkpoint.keep_every", -2, "at least 1"),
        ("compute.mlp_chunk", -1, "at least 0"),
    ],
)
def test_a_value_outside_its_range_is_named_with_one_that_would_do(
    name: str, value: Any, words: str
) -> None:
    with pytest.raises(MeshwrightError, match=words) as mistake:
        given(name, value)
    assert name in str(mistake.value).replace("--cpu-devices", "cpu_devices")
    assert "\n" not in str(mistake.value)


@pytest.mark.parametrize("value", ["layers/-1/", ["norm"], (3,)])
@pytest.mark.parametrize("name", ["trainable", "lora.targets"])
def test_a_setting_of_several_texts_is_a_tuple_of_them(name: str, value: Any) -> None:
    given = {name: value} if name == "trainable" else {"lora": LoraConfig(rank=2, targets=value)}
    with pytest.raises(MeshwrightError, match=rf"{name} is .*; it must be a tuple: \("):
        TrainConfig("tiny", **given)


NUMBERS = [
    name for name, value in flat_settings(TrainConfig("tiny")).items() if type(value) is float
]


@pytest.mark.parametrize("name", [*NUMBERS, "optimizer.clip_norm"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_setting_takes_nan_or_infinity(name: str, value: float) -> None:
    with pytest.raises(MeshwrightError, match=name):
        given(name, value)


def test_values_at_the_ends_of_their_ranges_are_taken() -> None:
    config = TrainConfig(
        "tiny", steps=7, stop_at=7, seed=2**32 - 1, cpu_devices=MOST_DEVICES,
        optimizer=OptimizerConfig(warmup_steps=7, weight_decay=0.0), loss=LossConfig(z_loss=0.0),
        override=("rope.theta=1e6", "layers=2"),
    )  # fmt: skip
    assert config_from_dict(config_to_dict(config), "test") == config


@pytest.mark.parametrize("config", [TrainConfig, ServeConfig])
def test_every_path_may_be_text_and_every_text_a_path(config: Any) -> None:
    model = config("tiny")
    hints = typing.get_type_hints(config)
    kinds = {name: (hints[name], *typing.get_args(hints[name])) for name in hints}
    paths = [name for name in kinds if Path in kinds[name]]
    texts = [name for name in ("model", "data", "rules", "tokenizer") if name in kinds]
    assert paths
    for name in paths:
        given = dataclasses.replace(model, **{name: "a/folder"})
        assert given == dataclasses.replace(model, **{name: Path("a/folder")})
        assert getattr(given, name) == Path("a/folder")
        with pytest.raises(MeshwrightError, match=f"{name}=5 is not a path"):
            dataclasses.replace(model, **{name: 5})
    for name in texts:
        given = dataclasses.replace(model, **{name: Path("a/folder")})
        assert getattr(given, name) == "a/folder"


def test_every_setting_has_a_flat_name() -> None:
    flat = flat_settings(TrainConfig("tiny", run=Path("there")))
    assert flat["optimizer.learning_rate"] == 3e-4
    assert flat["run"] == Path("there")
    assert not any(dataclasses.is_dataclass(value) for value in flat.values())


def test_more_devices_than_can_be_simulated_are_refused_in_every_command() -> None:
    with pytest.raises(MeshwrightError, match="at most 1,024 devices can be simulated"):
        simulate_devices(1025)


def test_the_limit_of_the_watchdog_is_one_number() -> None:
    assert TrainConfig("tiny").hang_timeout == HANG_TIMEOUT_S


RULES = """
vocab -> tp
embed -> fsdp
mlp -> tp
heads -> tp
kv_heads -> tp
head_dim -> none
layers -> none
norm -> none
"""


@pytest.mark.parametrize("mark", ["", "?"])
def test_rules_of_activations_in_a_file_need_no_mark(mark: str, tmp_path: Path) -> None:
    file = tmp_path / "own.rules"
    file.write_text(f"batch{mark} -> dp+fsdp\nlength{mark} -> sp\n{RULES}")
    rules = choose_rules(TrainConfig("tiny", rules=str(file)), preset("tiny"))
    assert rules.optional == {"batch", "length"}


def test_a_missing_rule_of_activations_is_named_with_the_line_to_add(tmp_path: Path) -> None:
    file = tmp_path / "own.rules"
    file.write_text(f"length -> sp\n{RULES}")
    with pytest.raises(MeshwrightError, match=r"'batch'.*add a line such as 'batch\? -> dp\+fsdp'"):
        choose_rules(TrainConfig("tiny", rules=str(file)), preset("tiny"))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"batch": 8, "seq": 64, "mesh": "dp=1,fsdp=2,tp=2,sp=1"},
        {"compute.layers": "unroll", "compute.remat": "full", "optimizer.name": "muon"},
        {"override": ("rope.scaling=yarn", "rope.factor=4", "rope.theta=5e7")},
        {"optimizer.clip_norm": None, "init_from": "./a folder"},
    ],
)
def test_the_flags_of_settings_give_the_same_settings(changes: dict[str, Any]) -> None:
    changed = with_settings(TrainConfig("tiny"), changes)
    values = flat_settings(changed)
    assert {name: values[name] for name in changes} == changes
    assert command_line_settings(["tiny", *settings_flags(changed)]) == changed
    assert len([word for word in settings_flags(changed) if word[:2] == "--"]) == len(changes)
