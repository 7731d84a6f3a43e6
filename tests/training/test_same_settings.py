"""Processes that were started differently do not train together."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from tests.patience import PATIENCE_S
from tests.processes import free_port

import meshwright
from meshwright.data import ByteTokenizer, TokenStore, pack
from meshwright.launch import flat_settings
from meshwright.launch.agreement import differing
from meshwright.training.config import TrainConfig, config_from_dict
from meshwright.training.same_settings import FILES, MAY_DIFFER, settings_facts

CONFIG = TrainConfig("tiny", seq=64, batch=8, steps=20)


def differences(one: TrainConfig, other: TrainConfig) -> list[str]:
    """The names of what differs."""
    told = differing({0: settings_facts(one), 1: settings_facts(other)})
    return [text.partition(":")[0] for text in told]


OTHERS: dict[str, Any] = {
    "run": Path("elsewhere"), "mesh": "dp=-1", "steps": 30, "stop_at": 3, "batch": 16, "seq": 32,
    "context_parallel": "ring", "accumulation": 2, "seed": 1, "max_skipped": 3, "hang_timeout": 5.0,
    "cpu_devices": 2, "override": ("rope.theta=1e5",), "num_partitions": 2, "optimizer.name": "lion", "optimizer.learning_rate": 1e-3,
    "optimizer.schedule": "linear", "optimizer.warmup_steps": 3, "optimizer.final_fraction": 0.5,
    "optimizer.decay_fraction": 0.5, "optimizer.b1": 0.5, "optimizer.b2": 0.5, "optimizer.eps": 1e-6,
    "optimizer.weight_decay": 0.2, "optimizer.clip_norm": None, "optimizer.moments": "int8", "loss.z_loss": 0.1, "loss.chunk": 8,
    "compute.dtype": "bfloat16", "compute.param_dtype": "bfloat16", "compute.remat": "full",
    "compute.layers": "unroll", "compute.attention": "dense", "compute.sequence_parallel": True,
    "compute.mlp_chunk": 8, "compute.overlap": "on", "checkpoint.every": 5, "checkpoint.keep_last": 1,
    "checkpoint.keep_every": 5, "eval.every": 5, "eval.sequences": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_another_value_of_any_setting_is_found_by_its_flag(name: str) -> None:
    def changed(config: Any, name: str, value: Any) -> Any:
        head, _, rest = name.partition(".")
        value = changed(getattr(config, head), rest, value) if rest else value
        return dataclasses.replace(config, **{head: value})

    found = differences(CONFIG, changed(CONFIG, name, OTHERS[name]))
    assert f"--{name.replace('_', '-')}" in found
    assert len(found) == 1 + (name == "compute.sequence_parallel")  # which changes the rules too


def test_every_setting_is_compared_or_listed_as_free_to_differ() -> None:
    facts = settings_facts(CONFIG)
    for name in flat_settings(CONFIG):
        assert (f"--{name.replace('_', '-')}" in facts) or name in MAY_DIFFER | FILES, name
    one = config_from_dict({"model": "tiny", "process_id": 0, "coordinator": "localhost:1"}, "test")
    other = {
        "model": "tiny",
        "process_id": 1,
        "coordinator": "host:1",
        "log": {"tensorboard": True},
    }
    assert differences(one, config_from_dict(other, "test")) == []


def store(folder: Path, seed: int) -> TokenStore:
    file = folder.with_suffix(".txt")
    file.write_text(f"A story, number {seed}. " * 60)
    pack([file], folder, ByteTokenizer())
    return TokenStore.open(folder)


def test_data_is_compared_by_content_not_by_path(tmp_path: Path) -> None:
    for name, seed in (("here", 0), ("copy", 0), ("other", 1)):
        store(tmp_path / name, seed)
    here, copy, other = (
        dataclasses.replace(CONFIG, data=str(tmp_path / name)) for name in ("here", "copy", "other")
    )
    assert differences(here, copy) == []
    assert differences(here, other) == ["--data"]
    both = [f"{tmp_path / 'here'}:{a},{tmp_path / 'other'}:{b}" for a, b in ((1, 2), (2, 1))]
    assert differences(*(dataclasses.replace(CONFIG, data=text) for text in both)) == ["--data"]


def test_models_rules_and_weights_are_compared_by_content(tmp_path: Path) -> None:
    fields = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 320,
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "tie_word_embeddings": False, "rope_theta": 10000.0,
    }  # fmt: skip
    configs = []
    for i, layers in enumerate((2, 2, 3)):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(fields | {"num_hidden_layers": layers}))
        (folder / "model.safetensors").write_bytes(bytes(100_000) + bytes([layers]))
        configs.append(dataclasses.replace(CONFIG, model=str(folder), init_from=folder))
    assert differences(configs[0], configs[1]) == []
    assert differences(configs[0], configs[2]) == ["MODEL", "--init-from", "MODEL's layers"]


def test_versions_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    here = settings_facts(CONFIG)
    monkeypatch.setattr(meshwright, "__version__", "9.9")
    monkeypatch.setattr(jax, "__version__", "8.8")
    told = "; ".join(differing({0: here, 1: settings_facts(CONFIG)}))
    assert "version of jax: " in told
    assert "8.8 in process 1" in told
    assert "9.9 (source " in told


def test_two_processes_with_other_settings_both_end_before_anything_is_compiled(
    tmp_path: Path,
) -> None:
    common = [
        "tiny",
        "--run",
        str(tmp_path / "run"),
        "--cpu-devices",
        "2",
        "--steps",
        "2",
        "--seq",
        "64",
    ]
    own = [
        ["--batch", "8", "--mesh", "fsdp=4"],
        ["--batch", "16", "--mesh", "dp=3", "--optimizer.learning-rate", "0.5", "--seed", "7"],
    ]
    joined = ["--coordinator", f"localhost:{free_port()}", "--processes", "2", "--process-id"]
    both = [
        subprocess.Popen(
            [sys.executable, "-m", "meshwright.cli.main", "train", *common, *own[i], *joined, str(i)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for i in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=PATIENCE_S)[0] for process in both]
    assert [process.returncode for process in both] == [2, 2], "\n".join(outputs)
    output = "".join(outputs)
    assert "--batch: 8 in process 0, 16 in process 1" in output
    assert "--mesh: fsdp=4 in process 0, dp=3 in process 1" in output
    assert "--optimizer.learning-rate: 0.0003 in process 0, 0.5 in process 1" in output
    assert "--seed: 0 in process 0, 7 in process 1" in output
    assert "Traceback" not in output
    assert output.count("error:") == 1  # one process of the host says it
    assert not (tmp_path / "run").exists()
