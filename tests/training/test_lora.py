"""A run with LoRA: only the adapter is trained and saved; it resumes, generates and is exported."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tests.training.conftest import TrainCommand
from tests.training.test_loop import losses

import meshwright as mw
from meshwright.checkpoint import Checkpoints

peft = pytest.importorskip("peft")

SETTINGS = ["--batch", "8", "--seq", "32", "--steps", "6", "--optimizer.learning-rate", "1e-2"]
LORA = ["--lora.rank", "4", "--lora.targets", "q_proj", "down_proj", "--lora.dropout", "0.1"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=261, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("base") / "llama"
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_a_run_is_stopped_resumed_on_another_mesh_and_exported(
    base: Path, train_command: TrainCommand, tmp_path: Path
) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    first = ["--cpu-devices", "4", "--mesh", "fsdp=2,tp=2", "--stop-at", "3", "--run", str(run)]
    said = train_command(str(base), *SETTINGS, *LORA, *first)
    trained = 2 * 4 * (32 + 32 + 48 + 32)
    assert f"trains {trained:,} of " in said
    again = ["--cpu-devices", "2", "--mesh", "dp=2", "--run", str(run)]
    assert "resuming from step 3" in train_command(str(base), *SETTINGS, *LORA, *again)
    train_command(str(base), *SETTINGS, *LORA, "--cpu-devices", "1", "--run", str(whole))
    np.testing.assert_allclose(losses(run), losses(whole), rtol=1e-5)
    saved = Checkpoints(run / "checkpoints").arrays(6)
    assert {name.split("/")[1] for name in saved if name.startswith("params/")} == {"adapter"}

    out = mw.export(run, tmp_path / "adapter", dtype="float32")
    factors = load_file(out / "adapter_model.safetensors")
    assert sum(factor.size for factor in factors.values()) == trained
    merged = mw.export(run, tmp_path / "merged", dtype="float32", merge=True)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokens = torch.tensor([list(b"Once upon a time")])
    start, model = (AutoModelForCausalLM.from_pretrained(folder) for folder in (base, merged))
    before = start(input_ids=tokens).logits
    adapted = peft.PeftModel.from_pretrained(start, out)(input_ids=tokens).logits
    assert (adapted - before).abs().max() > 0.05
    assert (adapted - model(input_ids=tokens).logits).abs().max() < 1e-4
    tokenizer = AutoTokenizer.from_pretrained(merged)  # of bytes, as the run's
    assert tokenizer("né<|endoftext|>").input_ids == [*"né".encode(), 256]
    with mw.load(run, "tp=2") as ours:
        [done] = [ours.generate("Once upon a time", max_new=8, temperature=0)]
    greedy = model.generate(tokens, max_new_tokens=8, do_sample=False)[0, 16:].tolist()
    assert list(done.tokens) == greedy[: len(done.tokens)]
    (base / "tokenizer.json").write_bytes((merged / "tokenizer.json").read_bytes())
    with mw.load(base, adapters={"run": run, "peft": out}) as beside:
        for name in ("run", "peft"):
            again_done = beside.generate("Once upon a time", max_new=8, adapter=name, temperature=0)
            assert again_done.tokens == done.tokens
    (run / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with_template = mw.export(run, tmp_path / "with_template")
    assert (with_template / "chat_template.jinja").read_text() == "{{ messages[0].content }}"
    file = run / "config.json"
    settings = file.read_text()
    file.write_text(settings.replace(str(base), "gone"))
    with pytest.raises(mw.MeshwrightError, match="adapter of the weights in gone, and that folder"):
        mw.load(run)
    merged_again = mw.export(base, tmp_path / "again", dtype="float32", merge=True, adapter=run)
    weights = "model.safetensors"
    assert (merged_again / weights).read_bytes() == (merged / weights).read_bytes()
    with pytest.raises(mw.MeshwrightError, match="is exported merged into the model: add --merge"):
        mw.export(base, tmp_path / "not", adapter=run)
    other = shutil.copytree(base, tmp_path / "other")
    weights = other / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"abcd")
    file.write_text(settings.replace(str(base), str(other)))
    with pytest.raises(mw.MeshwrightError, match="are others; it needs the same weights"):
        mw.load(run)
    with pytest.raises(mw.MeshwrightError, match="are others; it needs the same weights"):
        mw.load(other, tokenizer="bytes", adapters={"run": run})
    resumed = train_command(str(other), *SETTINGS, *LORA, *again, expect=2)
    assert "is an adapter of the weights that were in" in resumed


def test_the_loss_falls_beside_weights_of_8_bits(
    base: Path, train_command: TrainCommand, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = [*SETTINGS, "--lora.rank", "4", "--run", str(run), "--lora.base"]
    said = train_command(str(base), *words, "int8", "--cpu-devices", "4", "--mesh", "fsdp=2,tp=2")
    every = 2 * 4 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48))
    assert f"trains {every:,} of {2 * 261 * 32 + 5 * 32 + 2 * 7680 + every:,} " in said
    found = losses(run)
    assert found[-1] < found[0] - 0.1
    said = train_command(str(base), *words, "nf4", expect=2)
    assert "lora.base nf4 needs inputs in blocks of 64, and layers/attention/wk has 32" in said


def test_mistakes_are_told(base: Path, train_command: TrainCommand, tmp_path: Path) -> None:
    run = ["--run", str(tmp_path / "run")]
    said = train_command("tiny", *SETTINGS, "--lora.rank", "4", *run, expect=2)
    assert "LoRA adapts weights that are trained, and no folder of weights is named" in said
    said = train_command(str(base), *SETTINGS, *LORA, "--trainable", "norm", *run, expect=2)
    assert "lora.rank and trainable both say what is trained" in said
