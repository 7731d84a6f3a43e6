"""Mistakes of `meshwright train --backend torch`: each is told before a process is started."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.models.tiny_architectures import save

import meshwright.torch as mt
from meshwright.cli.main import main
from meshwright.errors import MeshwrightError
from meshwright.models import LoraConfig, preset, to_hf_config
from meshwright.torch.train import command
from meshwright.torch.train.backend import idle_gpus
from meshwright.torch.train.settings import check_settings
from meshwright.training import TrainConfig
from meshwright.training.resume import check_saved

DIMS = {"vocab": "tp", "heads": "tp", "kv_heads": "tp", "mlp": "tp", "embed": "fsdp"}
DIMS |= {"head_dim": "none", "norm": "none"}


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the mistake was not found before processes were started")

    monkeypatch.setattr(command, "start_processes", refuse)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["train", *words, "--backend", "torch"])
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--processes 2 --mesh dp=3", "2 are in the run (--processes 2); 'dp=2' would fit"),
        ("--processes 3 --mesh dp=1,tp=3", "kv_heads=4 cannot be split in tp=3, but in 1, 2 or 4; mesh 'dp=3,tp=1'"),
        ("--processes 2 --mesh tp=2", "write 'dp=1,tp=2'"),
        ("--processes 2 --mesh dp=1,sp=2", "its axes are dp, fsdp and tp: set sp=1"),
        ("--processes 2 --mesh dp=-1,tp=2 --seq 63 --compute.sequence-parallel",
         "seq=62 or 64 would fit"),
        ("--processes 2 --mesh auto --batch 7 --accumulation 2",
         "would fit, or batch=4 or 8"),
        ("--compute.matmul fp8", "leave it out: PyTorch runs in bfloat16"),
        ("--compute.overlap on", "leave it out: FSDP2 always overlaps"),
        ("--compute.remat offload", "give none, or full"),
        ("--optimizer.name muon", "leave one of the two out"),
    ],
)  # fmt: skip
def test_settings(flags: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in told(capsys, "tiny", *flags.split())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"embed": "fdsp"}, "which mesh 'fsdp=1,tp=2' does not have; did you mean 'fsdp'?"),
        ({"mlp": "model"}, "'mlp -> model' names axis 'model', which mesh 'fsdp=1,tp=2' does not"),
        ({"embed": ""}, "rule 'embed ->' is not 'dim -> axis'"),
        ({"q_proj => out in": "out@tp in"}, "are path rules (regex => layout)"),
    ],
)
def test_rules(
    changes: dict[str, str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "own.rules"
    file.write_text("\n".join(f"{dim} -> {axes}" for dim, axes in (DIMS | changes).items()))
    found = told(capsys, "tiny", "--processes", "2", "--mesh", "fsdp=1,tp=2", "--rules", str(file))
    assert f"rules '{file}'" in found
    assert says in found


@pytest.mark.parametrize(
    ("mesh", "says"),
    [
        ("fsdp=2", "'vocab -> tp' names axis 'tp', which mesh 'fsdp=2' does not have; add tp=1 to"),
        ("dp=2,tp=1", "names axis 'fsdp', which mesh 'dp=2,tp=1' does not have; add fsdp=1 to"),
    ],
)
def test_rules_for_an_axis_that_is_left_out(
    mesh: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "own.rules"
    file.write_text("\n".join(f"{dim} -> {axes}" for dim, axes in DIMS.items()))
    words = ["tiny", "--processes", "2", "--mesh", mesh, "--rules", str(file)]
    assert f"{says} the mesh" in told(capsys, *words)


def test_frozen_weights_in_four_bits() -> None:
    config = TrainConfig("tiny", backend="torch", lora=LoraConfig(4, base="nf4"))
    with pytest.raises(MeshwrightError, match=r"--lora\.base nf4 is of the JAX backend"):
        check_settings(config)


def test_dropout_of_an_adapter() -> None:
    config = TrainConfig("tiny", backend="torch", lora=LoraConfig(4, dropout=0.1))
    with pytest.raises(MeshwrightError, match=r"--lora\.dropout 0\.1 is a setting of the JAX"):
        check_settings(config)


def test_a_preset_of_experts(capsys: pytest.CaptureFixture[str]) -> None:
    assert "tiny-moe is not a model that --backend torch trains" in told(capsys, "tiny-moe")


def test_long_rope_above_its_original_length(tmp_path: Path) -> None:
    save("phi3-longer", tmp_path)  # whose original length is 2
    with pytest.raises(MeshwrightError, match=r"--seq 3: .* other factors above 2 .* --seq 2, or"):
        check_settings(TrainConfig(str(tmp_path), backend="torch", seq=3))


def test_a_model_of_another_family(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model_type": "bloom", "architectures": ["BloomForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "for others call mw.torch.parallelize in a script" in told(capsys, str(tmp_path))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            "--mesh auto",
            "the plan has no figures of gemma2 models; name the mesh, such as --mesh dp=2",
        ),
        ("--mesh dp=1,tp=2", "heads=3 cannot be split in tp=2; tp=1 would fit"),
        ("--mesh dp=2 --override rope.theta=5e5", "for gemma2 models change config.json"),
    ],
)
def test_a_model_with_masks_of_transformers(
    flags: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = transformers.Gemma2Config(
        vocab_size=384, hidden_size=12, num_attention_heads=3, num_key_value_heads=3, head_dim=4,
        num_hidden_layers=1, intermediate_size=12, max_position_embeddings=512,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    assert says in told(capsys, str(tmp_path), "--processes", "2", *flags.split())


def test_a_model_with_quantized_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its scales are tensors beside the weights, which transformers' network does not have."""
    config = transformers.GemmaConfig(
        vocab_size=384, hidden_size=12, num_attention_heads=3, num_key_value_heads=3, head_dim=4,
        num_hidden_layers=1, intermediate_size=12, max_position_embeddings=512,
    )  # fmt: skip
    model = transformers.GemmaForCausalLM(config)
    model.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    found = told(capsys, str(tmp_path), "--processes", "2", "--mesh", "dp=2")
    assert "quantization_config={'quant_method': 'fp8'" in found
    assert "the weights are quantized: take the bfloat16 or float16 model" in found

    name = "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors")
    try:
        mt.parallelize(model, mt.mesh("dp=1,tp=1", device="cpu"))
        with pytest.raises(MeshwrightError, match=rf"'{name}' in .* is F8_E4M3, the model's is to"):
            mt.load_hf(model, tmp_path)
    finally:
        torch.distributed.destroy_process_group()


def test_a_folder_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = to_hf_config(preset("tiny"))
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "pytorch_model.bin").touch()
    words = [str(tmp_path), "--init-from", str(tmp_path), "--processes", "2", "--mesh", "dp=2"]
    found = told(capsys, *words, "--run", str(tmp_path / "run"))
    assert "pytorch_model.bin: pickled weights are not read, save the model as safetensors" in found


def test_a_run_folder_that_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").touch()
    words = ["tiny", "--processes", "2", "--mesh", "dp=2", "--run", str(tmp_path / "run")]
    assert "is a file; give a folder" in told(capsys, *words)


def test_an_optimizer_that_only_jax_has() -> None:
    now = {"backend": "torch", "compute": {"param_dtype": "float32"}, "trainable": []}
    now |= {"optimizer": {"name": "adamw", "moments": "auto"}}
    now |= {"lora": dataclasses.asdict(LoraConfig())}
    before = now | {"backend": "jax", "optimizer": {"name": "muon", "moments": "auto"}}
    with pytest.raises(MeshwrightError, match="Resume it without --backend torch, which has no mu"):
        check_saved(now, before, "step 2")


def test_a_broken_connection_is_named_in_plain_words() -> None:
    text = "[/a/gloo/transport/tcp/pair.cc:543] Connection closed by peer [127.0.0.1]:4242. GLHF! "
    with pytest.raises(ConnectionError) as error, command.connection_errors():
        raise RuntimeError(text + "\nException raised from readBytes")
    assert str(error.value) == "Connection closed by peer [127.0.0.1]:4242"
    with pytest.raises(RuntimeError, match="shapes differ"), command.connection_errors():
        raise RuntimeError("shapes differ")


def test_gpus_that_no_process_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert idle_gpus() is None
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    for run_id, flag in (("meshwright", "--processes"), ("none", "torchrun --nproc-per-node")):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)  # as the launcher sets it
        assert idle_gpus() == f"the run uses 2 of this host's 8 GPUs; {flag} 8 uses all"
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.delenv("RANK")
    assert idle_gpus() == "the run uses 1 of this host's 8 GPUs; --processes 8 uses all"
