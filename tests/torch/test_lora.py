"""LoRA with `--backend torch`: PEFT's gradients, the losses of JAX, and runs that change it."""

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
from tests.forked import Commands
from tests.torch.conftest import SixProcesses
from tests.torch.models import batches, loss_of, tiny
from tests.torch.test_six_processes import result
from tests.torch.test_train import QUIET, losses

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

import meshwright as mw  # noqa: E402
from meshwright.checkpoint import Checkpoints  # noqa: E402
from meshwright.planner import plan  # noqa: E402
from meshwright.torch.lora import LoraLinear, add_factors, peft_name, saved_parameters  # noqa: E402
from meshwright.torch.train.settings import check_settings  # noqa: E402
from meshwright.training import TrainConfig, with_settings  # noqa: E402

TARGETS = ["q_proj", "o_proj", "up_proj", "down_proj"]
SIZES = ["--batch", "8", "--seq", "32", "--accumulation", "2", "--optimizer.learning-rate", "1e-2"]


def test_gradients_are_those_of_peft() -> None:
    model = tiny("qwen2")  # whose projections have biases
    layers = [path for path, _ in model.named_modules() if path.endswith(tuple(TARGETS))]
    add_factors(model, layers, rank=4, scale=6 / 4, base=torch.float32)
    chosen = peft.LoraConfig(r=4, lora_alpha=6, target_modules=TARGETS, init_lora_weights=False)
    theirs = peft.get_peft_model(tiny("qwen2"), chosen)
    named = {name.replace(".default", ""): one for name, one in theirs.named_parameters()}
    factors = dict(saved_parameters(model))
    with torch.no_grad():
        for name, param in factors.items():
            param.copy_(named[peft_name(name)])
    batch = batches(1)[0]
    own, wanted = loss_of(model, batch), loss_of(theirs, batch)
    torch.testing.assert_close(own, wanted)
    own.backward()
    wanted.backward()
    assert {name for name, param in model.named_parameters() if param.grad is not None} == {
        *factors
    }
    assert len(factors) == 2 * len(layers) == 2 * len(TARGETS) * 2
    for name, param in factors.items():
        torch.testing.assert_close(param.grad, named[peft_name(name)].grad)


def test_gradients_on_a_mesh_are_those_of_peft(on_six: SixProcesses) -> None:
    for way, found in result(on_six, "lora").items():
        assert found["frozen"], f"{way}: a frozen weight has a gradient, or changed"
        assert found["loss"] < 1e-5, way
        assert found["gradients"] < 1e-5, way


def folder_of(folder: Path, kind: str = "llama") -> str:
    # that of the tokenizer of bytes, which tp does not divide
    tiny(kind, vocab_size=261).save_pretrained(folder / "base")
    return str(folder / "base")


def trained(parts: list[tuple[Path, list[str]]], start: list[str]) -> None:
    """Run commands one after another."""
    with contextlib.closing(Commands(os.environ | QUIET)) as commands:
        for run, flags in parts:
            said = run.with_suffix(".said")
            code = commands.run(["train", *start, "--run", str(run), *flags], said)
            assert code == 0, said.read_text()[-3000:]


def test_a_run_goes_from_torch_to_jax_and_back(tmp_path: Path) -> None:
    base, plain, mixed = folder_of(tmp_path), tmp_path / "plain", tmp_path / "mixed"
    start = [base, *SIZES, "--steps", "6", "--lora.rank", "4", "--lora.targets", "q_proj", "mlp"]
    torch_on_two = ["--backend", "torch", "--processes", "2", "--mesh", "dp=1,tp=2"]
    parts = [
        (plain, []),
        (mixed, [*torch_on_two, "--stop-at", "2"]),
        (mixed, ["--cpu-devices", "2", "--mesh", "fsdp=2", "--stop-at", "4"]),
        (mixed, ["--backend", "torch"]),
    ]
    trained(parts, start)
    wanted, found = losses(plain), losses(mixed)
    for key, value in wanted.items():
        assert found[key] == pytest.approx(value, rel=1e-5), key
    saved = Checkpoints(mixed / "checkpoints").arrays(6)
    factors = [name for name in saved if name.startswith("params/")]
    assert len(factors) == 2 * 2 * 4  # of two layers
    assert all("lora_" in name for name in saved if not name.startswith("random/"))
    _check_exports(Path(base), mixed, tmp_path)


def _check_exports(base: Path, run: Path, out: Path) -> None:
    """PEFT's model of the exported adapter computes what the merged model does."""
    from transformers import AutoModelForCausalLM

    adapter = mw.export(run, out / "adapter", dtype="float32")
    merged = mw.export(run, out / "merged", dtype="float32", merge=True)
    tokens = torch.tensor([list(b"Once upon a time")])
    start, model = (AutoModelForCausalLM.from_pretrained(folder) for folder in (base, merged))
    before = start(input_ids=tokens).logits
    adapted = peft.PeftModel.from_pretrained(start, adapter)(input_ids=tokens).logits
    assert (adapted - before).abs().max() > 0.01
    assert (adapted - model(input_ids=tokens).logits).abs().max() < 1e-4
    with mw.load(run) as ours:
        done = ours.generate("Once upon a time", max_new=4, temperature=0)
    greedy = model.generate(tokens, max_new_tokens=4, do_sample=False)[0, 16:].tolist()
    assert list(done.tokens) == greedy[: len(done.tokens)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_losses_are_those_of_jax_on_every_mesh(kind: str, tmp_path: Path) -> None:
    base = folder_of(tmp_path, kind)
    start = [base, *SIZES, "--steps", "10", "--lora.rank", "4", "--lora.rslora"]
    four = ["--backend", "torch", "--processes", "4", "--mesh"]
    flags = {
        "jax": [],
        "one": ["--backend", "torch", "--lora.base", "float32"],
        "both": [*four, "fsdp=2,tp=2"],
        "sequence": [*four, "dp=2,tp=2", "--compute.sequence-parallel", "--compute.remat", "full"],
        "replicas": [*four, "dp=2,fsdp=2"],
    }
    trained([(tmp_path / name, own) for name, own in flags.items()], start)
    wanted = losses(tmp_path / "jax")
    assert wanted[10, "loss"] < wanted[1, "loss"] - 0.05
    for name in flags:
        found = losses(tmp_path / name)
        for key, value in wanted.items():
            tolerance = 1e-4 if key[1] == "grad_norm" else 1e-5
            assert found[key] == pytest.approx(value, rel=tolerance), (name, key)


@pytest.mark.slow
def test_frozen_weights_in_bfloat16_train_in_float32(tmp_path: Path) -> None:
    base = folder_of(tmp_path)
    start = [base, *SIZES, "--steps", "4", "--lora.rank", "4", "--lora.base", "bfloat16"]
    runs = {"jax": [], "torch": ["--backend", "torch", "--processes", "2", "--mesh", "dp=1,tp=2"]}
    trained([(tmp_path / name, own) for name, own in runs.items()], start)
    found = losses(tmp_path / "torch")
    for key, value in losses(tmp_path / "jax").items():
        assert found[key] == pytest.approx(value, rel=1e-5), key


@pytest.mark.slow
def test_matmuls_in_bfloat16_are_about_those_of_jax(tmp_path: Path) -> None:
    start = [folder_of(tmp_path), *SIZES, "--steps", "4", "--lora.rank", "4"]
    start += ["--compute.dtype", "bfloat16"]
    runs = {"jax": [], "torch": ["--backend", "torch", "--processes", "2", "--mesh", "dp=2"]}
    trained([(tmp_path / name, own) for name, own in runs.items()], start)
    found = losses(tmp_path / "torch")
    for key, value in losses(tmp_path / "jax").items():
        tolerance = 0.05 if key[1] == "grad_norm" else 2e-3
        assert found[key] == pytest.approx(value, rel=tolerance), key


@pytest.mark.parametrize("kind", ["gemma2", "phi3"])
def test_models_whose_network_is_transformers_own_are_refused(kind: str, tmp_path: Path) -> None:
    tiny(kind).config.save_pretrained(tmp_path)
    config = TrainConfig(str(tmp_path), backend="torch", init_from=tmp_path)
    with pytest.raises(mw.MeshwrightError, match="LoRA adapts models of llama, mistral, qwen2, qw"):
        check_settings(with_settings(config, {"lora.rank": 4}))


def test_a_plan_says_that_it_does_not_count_lora() -> None:
    settings: dict[str, Any] = {"batch": 8, "seq": 512, "backend": "torch"}
    config = with_settings(TrainConfig("llama-3.1-8b", **settings), {"lora.rank": 16})
    with pytest.raises(mw.MeshwrightError, match="plans of the PyTorch backend do not count LoRA"):
        plan(config, "h100:8")


def test_a_layer_keeps_its_weight_and_bias() -> None:
    linear = torch.nn.Linear(3, 5)
    layer = LoraLinear(linear, rank=2, scale=1.0)
    assert layer.weight is linear.weight
    assert layer.bias is linear.bias
