"""Cases of worker.py that run the backend of `meshwright train --backend torch`."""

import contextlib
import dataclasses
import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import meshwright.torch as mt
from meshwright.checkpoint import folders
from meshwright.data import NO_TARGET
from meshwright.errors import MeshwrightError
from meshwright.torch import checkpoint
from meshwright.torch.lora import peft_name, saved_parameters
from meshwright.torch.parallelize import parallelized
from meshwright.torch.train.backend import TorchBackend
from meshwright.torch.train.command import machine_of_run
from meshwright.training import TrainConfig, with_settings
from models import tiny

MESH = "dp=2,tp=-1"
RARE = 383  # no byte
# as JAX's backend takes them, with batch, length and layers, which no weight here has
RULES = """
batch -> dp+fsdp
length -> none
heads -> tp
kv_heads -> tp
embed -> fsdp
vocab -> none
mlp -> none
head_dim -> none
layers -> none
norm -> none
"""


def backend_of(config: TrainConfig) -> TorchBackend:
    return TorchBackend(config, mt.mesh(config.mesh, device="cpu"))


def config_in(folder: Path) -> TrainConfig:
    """A tiny Llama's config, and the settings of a run of it."""
    if dist.get_rank() == 0:
        tiny("llama", vocab_size=384, num_hidden_layers=1).config.save_pretrained(folder / "model")
    dist.barrier()
    return TrainConfig(
        str(folder / "model"), folder / "run", "torch", MESH,
        steps=20, batch=8, seq=32, accumulation=2,
    )  # fmt: skip


def skipped(folder: Path) -> dict[str, Any]:
    """Good, bad, good, saved and resumed; one data rank alone has the bad token."""
    backend = backend_of(config_in(folder))
    backend.start(None)
    name = "model.embed_tokens.weight"
    rows = parallelized(backend.network).slices(name)[0]
    if rows.start <= RARE < rows.stop:
        with torch.no_grad():
            table = dict(backend.network.named_parameters())[name].to_local()
            table[RARE - rows.start] = torch.nan
    _, good = next(iter(backend.batches(0)))
    bad = {key: array.copy() for key, array in good.items()}
    if mt.data_shard(mt.mesh(MESH, device="cpu"))[0] == 1:
        bad["tokens"][1, 0, 3] = RARE
    states, reports = [], []
    for batch in (good, bad, good):
        reports.append(backend.values(backend.step(batch)))
        states.append(bits(backend))
    finite = backend.is_finite()  # the poisoned row is not
    backend.save(3, {})
    again = backend_of(backend.config)
    again.start(3)
    same = bits(again) == states[2]
    reports += [one.values(one.step(good)) for one in (backend, again)]
    everyone: list[Any] = [None] * dist.get_world_size()
    kept = [states[0] == states[1], states[1] != states[2], same, finite]
    dist.all_gather_object(everyone, (kept, reports))
    return {"ranks": everyone}


def bits(backend: TorchBackend) -> list[bytes]:
    """This rank's weights and moments."""
    params = list(backend.network.parameters())
    moments = [
        value
        for param in params
        for key, value in sorted(backend._optimizer.state[param].items())
        if key != "step"
    ]
    steps = [backend._optimizer.state[param]["step"] for param in params]
    local = [tensor.to_local().detach().numpy().tobytes() for tensor in (*params, *moments)]
    return [*local, *(np.float32(step).tobytes() for step in steps)]


def own_rules(folder: Path) -> dict[str, Any]:
    """Losses with a file of rules and with the standard ones, and where weights are."""
    plain = dataclasses.replace(config_in(folder), mesh="dp=1,fsdp=2,tp=-1")
    file = folder / "rules.txt"
    if dist.get_rank() == 0:
        file.write_text(RULES)
    dist.barrier()
    found: dict[str, Any] = {"machine": str(machine_of_run())}
    for name, config in (
        ("standard", plain),
        ("file", dataclasses.replace(plain, rules=str(file))),
    ):
        backend = backend_of(config)
        backend.start(None)
        losses = []
        for (_, batch), _ in zip(backend.batches(0), range(2), strict=False):
            losses.append(backend.values(backend.step(batch))["loss"])
        shards = {
            key: list(param.to_local().shape) for key, param in backend.network.named_parameters()
        }
        found[name] = {"losses": losses, "shards": shards}
    return found


@contextlib.contextmanager
def no_space() -> Iterator[None]:
    """A disk that is full, for this process, and small: its message says GB and means bytes."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    told = folders.why_not_saved
    with (
        mock.patch.object(checkpoint, "_write", side_effect=full),
        mock.patch.object(folders, "why_not_saved", lambda f, size, e: told(f, size * 10**9, e)),
    ):
        yield


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Files of this process cannot have more than `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def full_disk(folder: Path) -> dict[str, Any]:
    """The last rank finds no space in the second save, rank 0 cannot write in the third."""
    model = mt.parallelize(tiny("llama"), mt.mesh(MESH, device="cpu"))
    checkpoints = mt.Checkpoints(folder / "checkpoints")
    checkpoints.save(1, model)
    files = (checkpoints.folder / "step-00000001").glob("*.safetensors")
    written = sum(file.stat().st_size for file in files)
    found: dict[str, Any] = {"errors": [], "left": [], "written": written}
    full = {dist.get_world_size() - 1: no_space(), 0: largest_file(4096)}
    for rank, disk in full.items():
        with disk if dist.get_rank() == rank else contextlib.nullcontext():
            try:
                checkpoints.save(2, model)
            except MeshwrightError as error:
                found["errors"].append(str(error))
        found["left"].append(sorted(os.listdir(checkpoints.folder)))
    checkpoints.save(2, model)
    checkpoints.restore(2, model)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found["errors"])
    return found | {"everyone": everyone, "steps": checkpoints.steps()}


def of_transformers(kind: str, folder: Path) -> dict[str, float]:
    """A step on packed documents, against transformers on one document at a time."""
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}
    sizes["sliding_window"] = 8  # shorter than the documents
    if dist.get_rank() == 0:  # tp does not divide the vocabulary
        tiny(kind, vocab_size=385, **sizes).save_pretrained(folder / "model")
    dist.barrier()
    model = folder / "model"
    backend = backend_of(
        TrainConfig(
            str(model),
            folder / "run",
            "torch",
            "dp=2,tp=3",
            steps=20,
            batch=4,
            seq=33,
            init_from=model,
        )
    )
    backend.start(None)
    report = backend.values(backend.step(packed_of_rank()))
    plain = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    loss = loss_of_documents(plain)
    loss.backward()
    norm = torch.nn.utils.get_total_norm([param.grad for param in plain.parameters()])
    backend.save(1, {})
    again = backend_of(backend.config)
    again.start(1)
    same = bits(again) == bits(backend)
    return {
        "loss": abs(report["loss"] - loss.item()),
        "gradient_norm": abs(report["gradient_norm"] / norm.item() - 1),
        "resumed": float(same),
    }


def lora(folder: Path) -> dict[str, Any]:
    """A step with LoRA, against PEFT on one document at a time."""
    import peft

    if dist.get_rank() == 0:  # projections with biases
        sizes = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}
        tiny("qwen2", vocab_size=385, num_hidden_layers=1, **sizes).save_pretrained(
            folder / "model"
        )
        (folder / "rules.txt").write_text(RULES.replace("heads -> tp", "heads -> none"))
    dist.barrier()
    plain = AutoModelForCausalLM.from_pretrained(folder / "model")
    chosen = peft.LoraConfig(r=4, lora_alpha=6, target_modules="all-linear")
    torch.manual_seed(0)
    theirs = peft.get_peft_model(plain, chosen)
    named = {name.replace(".default", ""): one for name, one in theirs.named_parameters()}
    with torch.no_grad():
        for name, param in named.items():
            if "lora_" in name:
                param.copy_(torch.randn(param.shape) / 10)
    loss = loss_of_documents(theirs)
    loss.backward()
    found = {}
    for way, mesh, changes in (
        ("split", "dp=2,tp=3", {}),
        (
            "sequence parallel",
            "dp=2,fsdp=1,tp=3",
            {"compute.sequence_parallel": True, "compute.remat": "full"},
        ),
        ("rules", "dp=1,fsdp=2,tp=3", {"rules": str(folder / "rules.txt")}),
    ):
        config = TrainConfig(
            str(folder / "model"), folder / "run", "torch", mesh, steps=20, batch=4, seq=33
        )
        same = {"lora.rank": 4, "lora.alpha": 6.0, "optimizer.clip_norm": None}
        backend = backend_of(with_settings(config, same | changes))
        backend.start(None)
        network = backend.network
        params = dict(network.named_parameters())
        frozen = [name for name in params if name == peft_name(name)]
        with torch.no_grad():
            for name, param in saved_parameters(network):
                slices = parallelized(network).slices(name)
                param.to_local().copy_(named[peft_name(name)][slices])
        before = [params[name].to_local().clone() for name in frozen]
        report = backend.values(backend.step(packed_of_rank()))
        worst = 0.0
        for name, param in saved_parameters(network):
            wanted = named[peft_name(name)].grad
            difference = (param.grad.full_tensor() - wanted).abs().max() / wanted.abs().max()
            worst = max(worst, difference.item())
        found[way] = {
            "loss": abs(report["loss"] - loss.item()),
            "gradients": worst,
            "frozen": all(
                params[name].grad is None and torch.equal(params[name].to_local(), old)
                for name, old in zip(frozen, before, strict=True)
            ),
        }
    return found


_LENGTHS = (13, 20, 21, 12, 32, 1, 33)


def documents() -> list[Any]:
    """The same in every process."""
    numbers = np.random.default_rng(0)
    return [numbers.integers(3, 385, length) for length in _LENGTHS]


def packed_of_rank() -> dict[str, Any]:
    """The documents in four sequences, half of which each rank of two has."""
    own = documents()
    sequences = [own[0:2], own[2:4], own[4:6], own[6:7]]
    index, _ = mt.data_shard(mt.mesh("dp=2,tp=3", device="cpu"))
    return packed(sequences[2 * index : 2 * index + 2])


def loss_of_documents(model: Any) -> torch.Tensor:
    """The mean loss of a model of transformers, one document at a time."""
    total = torch.zeros(())
    for document in documents():
        tokens = torch.from_numpy(document)[None]
        logits = model(input_ids=tokens).logits[0, :-1]
        total = total + torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum")
    return total / (sum(_LENGTHS) - len(_LENGTHS))


def packed(sequences: list[list[Any]]) -> dict[str, Any]:
    """A batch of one micro-batch, several documents a sequence."""

    def laid(parts: Any) -> Any:
        return np.stack([np.concatenate(own) for own in parts])[None].astype(np.int32)

    ends = [[np.append(d[1:], NO_TARGET) for d in own] for own in sequences]
    return {
        "tokens": laid(sequences),
        "targets": laid(ends),
        "segments": laid(
            [[np.full(len(d), i + 1) for i, d in enumerate(own)] for own in sequences]
        ),
        "positions": laid([[np.arange(len(d)) for d in own] for own in sequences]),
    }
