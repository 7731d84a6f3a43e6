"""Processes that were started differently do not serve together."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from meshwright.launch import flat_settings
from meshwright.launch.agreement import differing
from meshwright.serving import ServeConfig, model_source
from meshwright.serving.same_settings import CONTENT, FREE_GROUPS, MAY_DIFFER, settings_facts

REFERENCES = Path(__file__).parents[1] / "models" / "hf_reference"


def differences(one: ServeConfig, other: ServeConfig) -> list[str]:
    facts = [
        settings_facts(
            config, model_source(config.model, tokenizer=config.tokenizer, end_token="</s>")
        )
        for config in (one, other)
    ]
    return differing(dict(enumerate(facts)))


@pytest.fixture
def config(letters: Path) -> ServeConfig:
    return ServeConfig(str(REFERENCES / "llama-mha"), mesh="tp=2", tokenizer=str(letters))


def changed(config: Any, name: str, value: Any) -> Any:
    head, _, rest = name.partition(".")
    value = changed(getattr(config, head), rest, value) if rest else value
    return dataclasses.replace(config, **{head: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("mesh", "fsdp=2"), ("dtype", "bfloat16"), ("cpu_devices", 2), ("engine.max_batch", 3),
     ("engine.weights", "int8"), ("engine.prefix_cache", False)],
)  # fmt: skip
def test_another_setting_is_named(config: ServeConfig, name: str, value: Any) -> None:
    (told,) = differences(config, changed(config, name, value))
    assert told.startswith(f"--{name.replace('_', '-')}: ")
    assert told.endswith(f"{value} in process 1")


def test_what_process_0_alone_acts_on_may_differ(config: ServeConfig) -> None:
    other = changed(config, "limits.requests", 3)
    other = dataclasses.replace(other, port=1, process_id=1, name="other", api_key=("k",))
    assert differences(config, other) == []


def test_every_setting_is_compared_or_listed_as_free_to_differ(config: ServeConfig) -> None:
    facts = settings_facts(config, model_source(config.model, tokenizer=config.tokenizer))
    for name in flat_settings(config):
        compared = f"--{name.replace('_', '-')}" in facts
        free = name in MAY_DIFFER | CONTENT or name.startswith(FREE_GROUPS)
        assert compared != free, name


def test_models_are_compared_by_content(config: ServeConfig, tmp_path: Path) -> None:
    copy = shutil.copytree(config.model, tmp_path / "copy")
    assert differences(config, dataclasses.replace(config, model=str(copy))) == []
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    (told,) = differences(config, dataclasses.replace(config, model=str(copy)))
    assert told == f"MODEL: {config.model} in process 0, {copy} in process 1"
    other = dataclasses.replace(config, model=str(REFERENCES / "llama-biases"))
    assert differences(config, other)[0].startswith("MODEL: ")
