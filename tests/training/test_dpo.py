"""DPO: loss, metrics and gradients are trl's on any mesh; a run learns, resumes and refuses."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file
from tests.training.conftest import TrainCommand
from tests.training.test_loop import losses

import meshwright as mw
from meshwright.checkpoint import Checkpoints
from meshwright.data import ByteTokenizer, Encoding, Mixture, TokenStore, pack
from meshwright.data.loader import Loader
from meshwright.data.samples import AllSamples
from meshwright.layouts import fit, stored
from meshwright.models import ADAPTER, LoraConfig, load_adapter, load_hf, save_adapter, save_hf
from meshwright.training import TrainConfig, abstract_step
from meshwright.training.dpo import DpoConfig, copied_arrays
from meshwright.training.run import read_metrics
from meshwright.training.state import abstract_state, new_state, with_reference
from meshwright.training.step import step_functions

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

REFERENCE = Path(__file__).parent / "dpo_reference"  # made by tools/make_dpo_reference.py
BASE = REFERENCE / "base"
EXPECTED = json.loads((REFERENCE / "expected.json").read_text())["cases"]
SEQ, MICRO_BATCHES = 32, 2

# an optimizer that changes nothing: its state is the last gradient
KEPT = optax.GradientTransformation(
    lambda params: jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), params),
    lambda gradient, _, params=None: (jax.tree.map(jnp.zeros_like, gradient), gradient),
)


def all_pairs(packed: bool) -> Loader:
    """The pairs of trl's batch, in one batch of two micro-batches that ends with padding."""
    columns = json.loads((REFERENCE / "pairs.json").read_text())
    examples = [
        (prompt + answer, [0] * len(prompt) + [1] * len(answer))
        for prompt, *both in zip(*columns.values(), strict=True)
        for answer in both
    ]
    store = TokenStore.of_examples(examples, ByteTokenizer(), name="pairs")
    store = dataclasses.replace(store, meta={**store.meta, "examples": {"pairs": True}})
    mixture = Mixture.parse("pairs", lambda _: store)
    samples = AllSamples(mixture, SEQ, packed)
    batch = 8 if packed else 16
    assert batch / 2 < samples.count < batch
    return Loader(mixture, samples, batch, SEQ, MICRO_BATCHES, packed=packed)


def run_step(case: str, mesh: str, packed: bool) -> tuple[Any, Any, Any, Any]:
    """The abstract step, its report, the gradients and the evaluation of all pairs."""
    settings = DpoConfig(**EXPECTED[case]["settings"])
    lora = LoraConfig(2, 4.0, targets=("q_proj", "down_proj")) if case == "lora" else LoraConfig()
    loader = all_pairs(packed)
    config = TrainConfig(
        str(BASE), batch=loader.batch, seq=SEQ, accumulation=MICRO_BATCHES, objective="dpo",
        dpo=settings, lora=lora,
    )  # fmt: skip
    spec = mw.MeshSpec.parse(mesh).with_standard_axes()
    devices = jax.devices()[: int(np.prod(spec.sizes))]
    step = abstract_step(config, mw.mesh(spec, devices=devices, axis_types="explicit"))
    functions = step_functions(
        step.model, step.compute, KEPT, lambda _: 0.0, step.mesh,
        loss=config.loss, clip_norm=None, arrays=step.arrays, dpo=settings,
    )  # fmt: skip
    copied = copied_arrays(step.arrays, step.compute.dtype)
    assert (copied is None) == (case == "lora")
    target = abstract_state(step.arrays, step.rules, KEPT, step.mesh, copied)

    def read(folder: Path) -> Any:
        targets = {name: leaf for name, leaf in target.params.items() if name != ADAPTER}
        specs = {name: step.arrays[name] for name in targets}
        on_disk = jax.tree.map(lambda t, s: stored(t, s.unpadded_shape), targets, specs)
        places = jax.tree.map(lambda leaf: leaf.sharding, on_disk)
        return fit(load_hf(folder, step.model, places), targets)

    base = read(BASE)
    if case == "lora":
        places = jax.tree.map(lambda leaf: leaf.sharding, target.params[ADAPTER])
        policy = base | load_adapter(REFERENCE / "adapter", step.model, {ADAPTER: places})[0]
    else:
        policy = read(REFERENCE / "policy")
    state = new_state(step.arrays, target, KEPT, step.mesh, params=policy)
    state = with_reference(step.arrays, target, state, base)
    batch = loader.device_batch(0, functions.batch_sharding)
    evaluated = jax.device_get(functions.evaluate(state.params, batch, state.reference))
    state, report = functions.train(state, batch)
    return step, jax.device_get(report), state.optimizer, evaluated


def saved_gradients(step: Any, gradients: Any, folder: Path) -> dict[str, np.ndarray]:
    """By the names of transformers, or of PEFT."""
    if ADAPTER in gradients:
        factors = {ADAPTER: gradients[ADAPTER]}
        out = save_adapter(folder, factors, step.model, step.config.lora, "")
        return load_file(out / "adapter_model.safetensors")
    unpadded = jax.tree.map(lambda g, s: stored(g, s.unpadded_shape), gradients, step.arrays)
    save_hf(folder, fit(gradients, unpadded), step.model, dtype="float32")
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("case", "mesh", "packed"),
    [
        ("sigmoid", "dp=1", True),
        pytest.param("sigmoid_norm", "fsdp=2,tp=2,sp=2", True, marks=pytest.mark.slow),
        pytest.param("lora", "dp=2,fsdp=2,tp=2", True, marks=pytest.mark.slow),
        pytest.param("sigmoid", "dp=1", False, marks=pytest.mark.slow),
        pytest.param("sigmoid", "dp=2,fsdp=2,tp=2", True, marks=pytest.mark.slow),
        pytest.param("sigmoid", "dp=2,sp=4", True, marks=pytest.mark.slow),
        pytest.param("sigmoid_norm", "dp=1", True, marks=pytest.mark.slow),
        pytest.param("lora", "fsdp=2,tp=2,sp=2", True, marks=pytest.mark.slow),
    ],
)
def test_loss_metrics_and_gradients_are_those_of_trl(
    case: str, mesh: str, packed: bool, tmp_path: Path
) -> None:
    step, report, gradients, evaluated = run_step(case, mesh, packed)
    for name, value in EXPECTED[case]["metrics"].items():
        found = evaluated[name].sum / evaluated[name].count
        np.testing.assert_allclose([report[name], found], value, rtol=1e-4, err_msg=name)
        assert evaluated[name].count == 12
    ours = saved_gradients(step, gradients, tmp_path / "gradients")
    theirs = load_file(REFERENCE / f"gradients-{case}.safetensors")
    assert {name.replace(".default", "") for name in theirs} == ours.keys()
    for name, gradient in theirs.items():
        off = np.abs(ours[name.replace(".default", "")] - gradient).max()
        assert off < 1e-4 * np.abs(gradient).max(), name


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of random weights that read bytes."""
    config = transformers.LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("base") / "llama"
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions with a right and a rude answer."""
    file = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    with file.open("w") as out:
        for i in range(160):
            a, b = i % 10, i % 7
            record = {"prompt": f"{a}+{b}?", "chosen": f" {a + b}", "rejected": " no" * (i % 3 + 1)}
            print(json.dumps(record), file=out)
    return file


SETTINGS = ["--objective", "dpo", "--batch", "8", "--seq", "32", "--steps", "20"]
SETTINGS += ["--optimizer.learning-rate", "3e-3", "--eval.sequences", "8"]


@pytest.mark.slow
def test_a_run_learns_which_answer_is_chosen_and_resumes_with_the_same_bits(
    llama: Path, pairs: Path, train_command: TrainCommand, tmp_path: Path
) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    command = [str(llama), "--init-from", str(llama), "--data", str(pairs), *SETTINGS]
    said = train_command(*command, "--run", str(whole))
    assert "160 pairs in " in said
    assert ", reference " in said
    assert re.search(r"step 20: eval .* over \d+ pairs", said)
    metrics = read_metrics(whole)
    accuracy, margins, loss = (
        metrics.column(name)[1] for name in ("rewards/accuracies", "rewards/margins", "loss")
    )
    assert accuracy[0] == margins[0] == 0  # the policy is the reference
    assert loss[0] == pytest.approx(np.log(2), rel=1e-6)
    assert accuracy[-1] > 0.9
    assert metrics.column("eval_rewards/accuracies")[1][-1] > 0.9
    train_command(*command, "--run", str(run), "--stop-at", "7")
    again = ["--run", str(run)]
    assert "resuming from step 7" in train_command(*command, *again)
    assert losses(run) == losses(whole)
    assert metrics.column("eval_loss")[1][-1] == read_metrics(run).column("eval_loss")[1][-1]

    saved = Checkpoints(run / "checkpoints").arrays(20)
    assert not any("reference" in name for name in saved)
    without = train_command(
        f"{llama}/config.json", "--data", str(pairs), *SETTINGS, *again, expect=2
    )
    assert f"give them again: --init-from {llama}" in without
    other = shutil.copytree(llama, tmp_path / "other")
    weights = other / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"abcd")
    command[2] = str(other)
    assert "it needs the same weights" in train_command(*command, *again, expect=2)


@pytest.mark.slow
def test_a_run_with_an_adapter_resumes_on_another_mesh(
    llama: Path, pairs: Path, train_command: TrainCommand, tmp_path: Path
) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    command = [str(llama), "--data", str(pairs), *SETTINGS, "--lora.rank", "4"]
    first = ["--cpu-devices", "4", "--mesh", "fsdp=2,tp=2", "--accumulation", "2"]
    said = train_command(*command, *first, "--run", str(run), "--stop-at", "7")
    assert not re.search(r"\breference\b", said)  # no copy
    train_command(*command, "--cpu-devices", "2", "--mesh", "sp=2", "--run", str(run))
    train_command(*command, "--run", str(whole))
    np.testing.assert_allclose(losses(run), losses(whole), rtol=1e-4)
    assert read_metrics(run).column("rewards/accuracies")[1][-1] > 0.9


def test_mistakes_are_told(
    llama: Path, pairs: Path, train_command: TrainCommand, tmp_path: Path
) -> None:
    run = ["--run", str(tmp_path / "run")]

    def mistake(*arguments: str) -> str:
        return train_command(*arguments, *run, expect=2)

    llama_data = [str(llama), "--data", str(pairs), "--batch", "8", "--seq", "32"]
    assert "give --objective dpo to a decoder" in mistake(*llama_data)
    assert "settings dpo.… belong to --objective dpo" in mistake(*llama_data, "--dpo.beta", "1")
    dpo = ["--objective", "dpo"]
    assert "dpo.beta=-1.0 must be above 0" in mistake(*llama_data, *dpo, "--dpo.beta", "-1")
    for name in ("z-loss", "router-z", "load-balance"):
        assert "objective is dpo" in mistake(*llama_data, *dpo, f"--loss.{name}", "1e-4")
    assert "is of the JAX backend" in mistake(*llama_data, *dpo, "--backend", "torch")
    said = mistake("t5-tiny", *llama_data[1:], *dpo)
    assert "objective='dpo' is not one of this model; it trains on 'span" in said
    assert "'embedded' holds texts; pack records that have 'chosen'" in mistake("tiny", *dpo)
    single = tmp_path / "single.jsonl"
    single.write_text('{"prompt": "1+1=", "completion": "2"}\n')
    said = mistake("tiny", "--data", str(single), "--batch", "1", "--seq", "16", *dpo)
    assert "holds single examples" in said
    store = tmp_path / "weighed.store"
    pack([pairs], store, ByteTokenizer(), encoding=Encoding(weigh="examples"))
    assert "counts every pair equally" in mistake(
        str(llama), "--data", str(store), *llama_data[3:], *dpo
    )
