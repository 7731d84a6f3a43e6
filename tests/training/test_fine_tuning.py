"""Fine-tuning on examples with loss masks: losses equal a plain transformers loop, packed or not."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import meshwright as mw
from meshwright.data import ByteTokenizer, Mixture, sequence_table, training_loader
from meshwright.data.packing import new_store
from meshwright.data.store import MASK_DTYPE, WEIGHT_DTYPE
from meshwright.models import (
    ADAPTER,
    LoraConfig,
    abstract_arrays,
    from_hf_config,
    save_adapter,
    with_adapter,
)

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

STEPS, BATCH, SEQ, RATE, HELD_OUT = 20, 8, 48, 1e-3, 4
Example = tuple[np.ndarray, np.ndarray]


def examples() -> list[Example]:
    """Prompts without loss, answers with it that can be learned; two are longer than a sequence."""
    rng = np.random.default_rng(0)
    made = []
    for i in range(60):
        prompt, answer = rng.integers(4, 14), rng.integers(2, 12) + 60 * (i % 30 == 7)
        start = int(rng.integers(0, 200))
        ids = np.concatenate([rng.integers(0, 256, prompt), (start + 3 * np.arange(answer)) % 256])
        made.append((ids.astype(np.int32), (np.arange(len(ids)) >= prompt).astype("f")))
    return made


def weighted_equally(examples: list[Example]) -> list[Example]:
    return [(ids, mask / mask.sum()) for ids, mask in examples]


@pytest.fixture
def model(tmp_path: Path) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=288, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=64,
        tie_word_embeddings=False, eos_token_id=256, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    network = transformers.LlamaForCausalLM(config)
    network.save_pretrained(tmp_path / "model")
    return network


def examples_of_steps(store: Path, packed: bool) -> tuple[list[list[int]], list[int]]:
    """Which examples each step trains on, and which are held out."""
    mixture = Mixture.parse(str(store))
    (opened,) = mixture.stores
    table = sequence_table(opened, SEQ, packed)
    assert table is not None
    loader = training_loader(mixture, batch=BATCH, seq=SEQ, packed=packed, held_out=HELD_OUT)
    _, sequences = loader.samples.locate(np.arange(STEPS * BATCH))

    def documents(sequences: Iterable[int]) -> list[int]:
        return [i for sequence in sequences for i in table.documents_of(sequence).tolist()]

    steps = sequences.reshape(STEPS, BATCH).tolist()
    return [documents(step) for step in steps], documents(range(len(table) - HELD_OUT, len(table)))


def mean_loss(network: Any, numbers: list[int], data: list[Example]) -> Any:
    """One example at a time, without padding or packing: a weighted mean over their targets."""
    total = sum(float(data[i][1][1:SEQ].sum()) for i in numbers)
    loss = torch.zeros(())
    for i in numbers:
        ids, weights = (torch.from_numpy(part[:SEQ]) for part in data[i])
        logits = network(input_ids=ids[None].long()).logits[0, :-1]
        each = torch.nn.functional.cross_entropy(logits, ids[1:].long(), reduction="none")
        loss = loss + (each * weights[1:]).sum() / total
    return loss


def with_our_adapter(network: Any, folder: Path) -> Any:
    """PEFT's model with the factors that a run of ours starts from."""
    peft = pytest.importorskip("peft")
    config, lora = from_hf_config(folder / "model"), LoraConfig(RANK)
    specs = with_adapter(abstract_arrays(config), lora, np.float32)[ADAPTER]
    first = mw.create(specs, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    saved = save_adapter(folder / "adapter", {ADAPTER: first}, config, lora, str(folder / "model"))
    return peft.PeftModel.from_pretrained(network, saved, is_trainable=True)


def plain_loop(
    network: Any, steps: list[list[int]], data: list[Example], rate: float
) -> list[float]:
    trained = [p for p in network.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim > 1]
    others = [p for p in trained if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=rate, betas=(0.9, 0.95), eps=1e-8,
    )  # fmt: skip
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = mean_loss(network, step, data)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


ONE, EIGHT = ("--cpu-devices", "1"), ("--mesh", "fsdp=2,tp=2,sp=2", "--cpu-devices", "8")
MICRO_BATCHES = (*EIGHT, "--accumulation", "2")
TORCH = ("--backend", "torch", "--processes", "1")
RANK = 8
LORA = ("--lora.rank", str(RANK))


@pytest.mark.parametrize(
    ("where", "packed", "weights"),
    [
        pytest.param(ONE, True, "tokens", id="one device, packed"),
        pytest.param(ONE, False, "tokens", id="one device, not packed", marks=pytest.mark.slow),
        pytest.param(EIGHT, True, "tokens", id="eight devices, packed", marks=pytest.mark.slow),
        pytest.param(EIGHT, False, "tokens", id="eight, not packed", marks=pytest.mark.slow),
        pytest.param(MICRO_BATCHES, True, "examples", id="equal examples", marks=pytest.mark.slow),
        pytest.param(TORCH, True, "examples", id="PyTorch", marks=pytest.mark.slow),
        pytest.param((*ONE, *LORA), False, "tokens", id="LoRA", marks=pytest.mark.slow),
        pytest.param((*EIGHT, *LORA), True, "tokens", id="LoRA on eight", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_losses_equal_a_plain_transformers_loop(
    tmp_path: Path, model: Any, train_command: Callable[..., str],
    where: tuple[str, ...], packed: bool, weights: str,
) -> None:  # fmt: skip
    data = examples()
    lora = set(LORA) <= set(where)
    rate = 10 * RATE if lora else RATE
    if weights == "examples":
        data = weighted_equally(data)
    dtype = MASK_DTYPE if weights == "tokens" else WEIGHT_DTYPE
    with new_store(tmp_path / "a.store", ByteTokenizer(), weights=dtype) as writer:
        writer.add_examples(data)
        writer.finish({})
    steps, held_out = examples_of_steps(tmp_path / "a.store", packed)
    assert any(len(data[i][0]) > SEQ for step in steps for i in step), "none is cut"
    assert packed == any(len(step) > BATCH for step in steps)
    train_command(
        str(tmp_path / "model"), "--init-from", str(tmp_path / "model"), *where,
        "--eval.sequences", str(HELD_OUT), "--data", str(tmp_path / "a.store"), *([] if packed else ["--no-pack"]),
        "--steps", str(STEPS), "--batch", str(BATCH), "--seq", str(SEQ),
        "--optimizer.learning-rate", str(rate), "--optimizer.schedule", "constant",
        "--optimizer.warmup-steps", "0", "--compute.dtype", "float32", "--run", str(tmp_path / "run"),
    )  # fmt: skip
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    losses = [entry["loss"] for entry in entries if "loss" in entry]
    (evaluated,) = (entry["eval_loss"] for entry in entries if "eval_loss" in entry)
    if lora:
        model = with_our_adapter(model, tmp_path)
    expected = plain_loop(model, steps, data, rate)
    least = 0.95 if lora else 0.9  # of the first loss; an adapter learns less in so few steps
    assert expected[-1] < least * expected[0], "nothing is learned, so nothing is compared"
    np.testing.assert_allclose(losses, expected, atol=1e-4)
    with torch.no_grad():
        assert evaluated == pytest.approx(mean_loss(model, held_out, data).item(), abs=1e-4)
