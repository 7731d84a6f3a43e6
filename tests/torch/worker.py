"""Cases that need six processes: `python worker.py OUT short|long NAMES`.

Each case gives plain data; process 0 writes all of them to OUT. Starting processes takes long, so
one start runs many cases, in processes forked from one that has imported what they need. Of the
cases that repeat one thing for many models, `short` takes NAMES and `long` the others.
"""

import faulthandler
import functools
import gc
import importlib.util
import json
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
import backend_cases
import tree_worker

import meshwright as mw
import meshwright.torch as mt
from meshwright.models import BY_TRANSFORMERS
from meshwright.torch.parallelize import parallelized
from models import EXPERTS, SIZES, batches, optimizer_of, tiny, train

MESHES = ("dp=1,tp=6", "dp=2,tp=3", "dp=3,tp=2", "dp=6,tp=1")
MODELS = [(kind, tied) for kind in ("llama", "qwen3", "mistral") for tied in (False, True)]
ARCHITECTURES = (
    "apertus", "arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2",
    "gemma3_text", "glm", "glm4", "gpt_neox", "granite", "helium", "ministral", "nemotron", "olmo",
    "olmo2", "olmo3", "phi", "phi3", "qwen2", "seed_oss", "smollm3", "starcoder2",
)  # fmt: skip
STEPS = 20
RANKS = 6


def cases() -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {}
    for kind, tied in MODELS:
        for text in MESHES:
            found[f"train {kind}{' tied' if tied else ''} {text}"] = lambda k=kind, t=tied, m=text: (
                against_one(k, t, m, STEPS, exact=True)
            )
    for kind in EXPERTS:
        found[f"train experts {kind}"] = lambda k=kind: against_one(k, False, "dp=6,tp=1")
    found["experts over tp"] = lambda: message(
        lambda: mt.parallelize(tiny("qwen3_moe"), mt.mesh("dp=3,tp=2", device="cpu"))
    )
    for options in (
        {"sequence_parallel": True},
        {"loss_parallel": True},
        {"activation_checkpointing": True, "reshard_after_forward": False},
    ):
        found[f"option {'+'.join(options)}"] = lambda o=options: with_options(o)
    found["mixed precision"] = mixed_precision
    found["hybrid sharding"] = lambda: against_one("llama", False, "dp=2,fsdp=3,tp=1")
    found["tensor axis first"] = lambda: against_one("llama", True, "tp=3,dp=2")
    found["padding and eager attention"] = padded
    found["resume"] = resumed
    found["slices"] = sliced
    found["load"] = loaded
    found["errors"] = refused
    found["audit"] = audited
    found["skipped steps"] = lambda: backend_cases.skipped(shared_folder())
    found["own rules"] = lambda: backend_cases.own_rules(shared_folder())
    if importlib.util.find_spec("peft") is not None:
        found["lora"] = lambda: backend_cases.lora(shared_folder())
    found["full disk"] = lambda: backend_cases.full_disk(shared_folder())
    for name, case in RULES.items():
        found[f"rules {name}"] = lambda c=case: by_rules(*c)
    for name in ("bert", "opt mlp"):
        found[f"dropout {name}"] = lambda c=RULES[name]: by_rules(*c, is_training=True)
    for options in ({}, {"activation_checkpointing": True}):
        found[f"dropout{' '.join(['', *options])}"] = lambda o=options: dropout(**o)
    found["random trees"] = lambda: [
        tree_worker.compared(seed, mt.mesh("dp=2,tp=3", device="cpu")) for seed in (*range(12), 17)
    ]
    found["random decoders"] = lambda: [
        tree_worker.compared_decoder(seed, mt.mesh("dp=2,tp=3", device="cpu")) for seed in range(7)
    ]
    for kind in BY_TRANSFORMERS:
        found[f"train by command {kind}"] = lambda k=kind: backend_cases.of_transformers(
            k, shared_folder()
        )
    for kind in ARCHITECTURES:
        found[f"architecture {kind}"] = lambda k=kind: own_plan(k)
    return found


def made(kind: str, tied: bool, exact: bool) -> Any:
    """`exact`: in float64."""
    return tiny(kind, tied, num_hidden_layers=1).double() if exact else tiny(kind, tied)


@functools.cache
def reference(
    kind: str, tied: bool, exact: bool, steps: int
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final weights of one process."""
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        model = made(kind, tied, exact)
        losses = train(model, optimizer_of(model), batches(steps))
        found = [(losses, {name: p.detach() for name, p in model.named_parameters()})]
    dist.broadcast_object_list(found, 0)
    return found[0]


def shard_of_data(mesh: Any, data: list[torch.Tensor]) -> list[torch.Tensor]:
    """The sequences of this data rank."""
    place, number = mt.data_shard(mesh)
    return [batch.chunk(number)[place] for batch in data]


def mean(losses: list[float]) -> list[float]:
    total = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def worst(model: Any, wanted: dict[str, torch.Tensor]) -> float:
    return max(
        (param.full_tensor() - wanted[name]).abs().max().item()
        for name, param in model.named_parameters()
    )


def against_one(
    kind: str, tied: bool, text: str, steps: int = 3, exact: bool = False, **options: Any
) -> dict[str, Any]:
    """The largest differences between a mesh and one process."""
    losses, weights = reference(kind, tied, exact, steps)
    mesh = mt.mesh(text, device="cpu")
    model = mt.parallelize(made(kind, tied, exact), mesh, **options)
    shards = distinct(model)
    found = mean(train(model, optimizer_of(model), shard_of_data(mesh, batches(steps))))
    return {
        "loss": max(abs(a - b) for a, b in zip(found, losses, strict=True)),
        "weights": worst(model, weights),
        "shards": shards,
        "tied": model.lm_head.weight is model.model.embed_tokens.weight,
    }


def distinct(model: Any) -> int:
    """The least number of distinct shards that a matrix has."""
    counts = []
    for _, param in model.named_parameters():
        if param.ndim < 2:
            continue
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, param.to_local().detach().numpy().tobytes())
        counts.append(len(set(everyone)))
    return min(counts)


def with_options(options: dict[str, Any]) -> dict[str, Any]:
    return {
        "llama": against_one("llama", True, "dp=2,tp=3", **options),
        "qwen3": against_one("qwen3", False, "dp=3,tp=2", **options),
    }


def mixed_precision() -> dict[str, Any]:
    mesh = mt.mesh("dp=2,tp=3", device="cpu")
    model = mt.parallelize(tiny("llama"), mesh, mixed_precision="bf16")
    losses = mean(train(model, optimizer_of(model), shard_of_data(mesh, batches(3))))
    wanted, _ = reference("llama", False, False, 3)
    return {
        "loss": max(abs(a - b) for a, b in zip(losses, wanted, strict=True)),
        "dtypes": sorted({str(param.dtype) for param in model.parameters()}),
    }


def padded() -> dict[str, float]:
    """Logits with padding under sequence parallelism, with both attention implementations."""
    found = {}
    tokens = batches(1, 2)[0]
    mask = torch.ones_like(tokens)
    mask[0, 8:] = 0
    for attention in ("eager", "sdpa"):
        plain = tiny("llama", attn_implementation=attention).eval()
        model = tiny("llama", attn_implementation=attention).eval()
        mt.parallelize(model, mt.mesh("dp=2,tp=3", device="cpu"), sequence_parallel=True)
        with torch.no_grad():
            wanted = plain(input_ids=tokens, attention_mask=mask).logits
            logits = model(input_ids=tokens, attention_mask=mask).logits
        found[attention] = (logits - wanted)[mask.bool()].abs().max().item()
    return found


def resumed() -> dict[str, Any]:
    """Save on 2x3 after 3 steps; on every mesh the next step is that of the run that went on."""
    folder = shared_folder()
    data = batches(5)
    mesh = mt.mesh("dp=2,tp=3", device="cpu")
    model = mt.parallelize(tiny("llama", True, num_hidden_layers=1), mesh)
    optimizer = optimizer_of(model)
    train(model, optimizer, shard_of_data(mesh, data[:3]))
    checkpoints = mt.Checkpoints(folder / "checkpoints", keep_last=1)
    checkpoints.save(1, model, optimizer)
    checkpoints.confirm(1)
    checkpoints.save(2, model, optimizer)
    checkpoints.save(3, model, optimizer, {"data": {"position": 18}})
    wanted = mean(train(model, optimizer, shard_of_data(mesh, data[3:])))
    weights = {name: param.full_tensor() for name, param in model.named_parameters()}
    found: dict[str, Any] = {"steps": checkpoints.steps()}
    for text in ("dp=6,tp=1", "dp=3,tp=2", "dp=1,tp=6", "dp=1,fsdp=2,tp=3"):
        mesh = mt.mesh(text, device="cpu")
        with torch.device("meta"):
            model = tiny("llama", True, num_hidden_layers=1)
        mt.parallelize(model, mesh)
        optimizer = optimizer_of(model)
        meta = checkpoints.restore(3, model, optimizer)
        losses = mean(train(model, optimizer, shard_of_data(mesh, data[3:])))
        found[text] = {
            "loss": max(abs(a - b) for a, b in zip(losses, wanted, strict=True)),
            "weights": worst(model, weights),
            "meta": meta,
        }
    files = sorted((folder / "checkpoints" / "step-00000003").glob("*.safetensors"))
    if dist.get_rank() == 0:
        content = bytearray(files[2].read_bytes())
        content[-1] ^= 1
        files[2].write_bytes(content)
    dist.barrier()
    found["damaged"] = message(lambda: checkpoints.restore(3, model, optimizer))
    found["absent"] = message(lambda: checkpoints.restore(7, model, optimizer))
    return found


def sliced() -> list[Any]:
    """The slices that ranks really hold, for random meshes and rules."""
    import random

    chooser = random.Random(5)
    found = []
    for _ in range(8):
        text = chooser.choice(["dp=2,tp=3", "tp=3,dp=2", "dp=3,tp=2", "tp=2,dp=3", "dp=6,tp=1",
                               "dp=1,fsdp=2,tp=3", "fsdp=3,tp=2,dp=1"])  # fmt: skip
        data = "fsdp" if "fsdp" in text else "dp"
        rules = {}
        for name, tensor_dim in (("q_proj|k_proj|v_proj|gate_proj|up_proj", 0), ("lm_head", 0),
                                 ("o_proj|down_proj", 1), ("embed_tokens", 0)):  # fmt: skip
            axes: list[list[str]] = [[], []]
            axes[tensor_dim].append("tp")
            axes[chooser.randrange(2)].append(data)
            rules[name] = tuple(tuple(own) for own in axes)
        rules["norm"] = ((data,),)
        layouts = [(f"({name}).weight".replace(".", "/"), own) for name, own in rules.items()]
        path_rules = mw.PathRules([(pattern, mw.Layout(own)) for pattern, own in layouts])
        model = tiny("llama", num_hidden_layers=1)
        whole = {name: p.detach().clone() for name, p in model.named_parameters()}
        numbers = {
            name: torch.arange(p.numel(), dtype=torch.float32).reshape(p.shape)
            for name, p in whole.items()
        }
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(numbers[name])
        mt.parallelize(model, mt.mesh(text, device="cpu"), path_rules)
        held = {}
        for name, param in model.named_parameters():
            local = param.to_local().detach()
            flat = local.flatten().long()
            shape = whole[name].shape
            corner = [int(i) for i in torch.unravel_index(flat[0], shape)]
            held[name] = [corner, list(local.shape), bool(
                torch.equal(local, numbers[name][tuple(map(slice, corner, (
                    c + s for c, s in zip(corner, local.shape, strict=True)))
                )])
            )]  # fmt: skip
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, held)
        shapes = {name: list(p.shape) for name, p in whole.items()}
        found.append({"mesh": text, "rules": layouts, "shapes": shapes, "ranks": everyone})
    return found


def loaded() -> dict[str, Any]:
    """From and to Hugging Face folders; each rank reads no more than it holds."""
    from transformers import AutoModelForCausalLM

    found: dict[str, Any] = {}
    tokens = batches(1, 2)[0]
    for kind, tied in (("llama", True), ("qwen3", False), ("gemma3_text", True)):
        folder = shared_folder()
        sizes = {"num_key_value_heads": 3, "num_attention_heads": 6, "head_dim": 8}
        plain = tiny(kind, tied, **sizes).eval()
        with torch.no_grad():
            for param in plain.parameters():
                param.add_(torch.randn_like(param) / 10)
        for param in plain.parameters():
            dist.broadcast(param.data, 0)
        if dist.get_rank() == 0:
            plain.save_pretrained(folder / "in", max_shard_size="40KB")
        dist.barrier()
        with torch.device("meta"):
            model = tiny(kind, tied, **sizes).eval()
        mt.parallelize(model, mt.mesh("dp=2,tp=3", device="cpu"))
        mt.load_hf(model, folder / "in")
        mt.save_hf(model, folder / "out")
        with torch.no_grad():
            wanted = plain(input_ids=tokens).logits
            logits = model(input_ids=tokens).logits
            again = AutoModelForCausalLM.from_pretrained(folder / "out").eval()
            written = again(input_ids=tokens).logits
        found[kind] = {
            "logits": (logits - wanted).abs().max().item(),
            "written": (written - wanted).abs().max().item(),
            "tied": model.lm_head.weight is model.model.embed_tokens.weight,
        }
    values = {}
    for text in ("dp=2,tp=3", "dp=6,tp=1"):
        with torch.device("meta"):
            model = tiny("llama", True)
        mt.parallelize(model, mt.mesh(text, device="cpu"))
        mt.initialize(model, seed=3)
        values[text] = {name: p.full_tensor() for name, p in model.named_parameters()}
    first, second = values.values()
    found["initialize"] = {
        "same": all(torch.equal(first[name], second[name]) for name in first),
        "std": first["model.layers.0.mlp.up_proj.weight"].std().item(),
    }
    return found


def refused() -> dict[str, str]:
    mesh = mt.mesh("dp=2,tp=3", device="cpu")
    found = {}
    torch.manual_seed(dist.get_rank())
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("llama", **SIZES)
    found["weights"] = message(
        lambda: mt.parallelize(AutoModelForCausalLM.from_config(config), mesh)
    )
    model = mt.parallelize(tiny("llama"), mesh, sequence_parallel=True)
    found["length"] = message(lambda: model(input_ids=torch.ones(2, 10, dtype=torch.int64)))
    found["generate"] = message(lambda: model.generate(torch.ones(2, 3, dtype=torch.int64)))
    found["twice"] = message(lambda: mt.parallelize(model, mesh))
    found["devices"] = message(lambda: mt.mesh("dp=2,tp=4", device="cpu"))
    model = mt.parallelize(_CallsForward(), mt.mesh("dp=6", device="cpu"))
    found["forward"] = message(lambda: model(torch.ones(2, 8)))
    # 4 and 2 ranks divide the queries' heads, but only 3 those of keys and values
    model = tiny("llama", num_attention_heads=12, num_key_value_heads=3, head_dim=4)
    found["heads"] = message(lambda: mt.parallelize(model, mt.mesh("dp=1,tp=6", device="cpu")))
    return found


class _CallsForward(torch.nn.Module):
    """A model that calls `forward` of its blocks, as SqueezeBERT does: no hook of FSDP runs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [torch.nn.Sequential(torch.nn.Linear(8, 8)) for _ in range(2)]
        self.blocks = torch.nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block.forward(x)
        return x


def audited() -> dict[str, Any]:
    mesh = mt.mesh("dp=2,tp=3", device="cpu")
    model = mt.parallelize(tiny("llama"), mesh)
    optimizer = optimizer_of(model)
    batch = batches(1, 2)[0]

    def step() -> None:
        model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    found = mt.audit(step, model=model)
    expected = {"dp": ["all-gather", "reduce-scatter"], "tp": ["all-reduce", "all-gather"]}
    mt.assert_collectives(step, expected, model=model)
    wrong = message(
        lambda: mt.assert_collectives(step, {"dp": ["all-gather"]}, model=model, bookkeeping=0)
    )
    return {
        "rows": [
            [row.operation, "+".join(row.axes), row.phase, row.scope, row.bytes]
            for row in found.rows
        ],
        "surprises": len(found.surprises),
        "text": str(found),
        "wrong": wrong,
    }


def own_plan(kind: str) -> dict[str, Any]:
    """Logits and gradients of an architecture that is split by its own tp plan."""
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}
    return against_plain(lambda: tiny(kind, **sizes), "dp=2,tp=3")


MLP_RULES = [("fc1/weight", "out in -> out@tp in"), ("fc1/bias", "out -> out@tp"),
             ("fc2/weight", "out in -> out in@tp")]  # fmt: skip
RULES: dict[str, tuple[str, str, str, list[tuple[str, Any]]]] = {
    "opt mlp": ("opt", "CausalLM", "dp=2,tp=3", MLP_RULES),
    "opt attention and mlp": ("opt", "CausalLM", "dp=3,tp=2", [
        *MLP_RULES, ("[qkv]_proj/weight", "out in -> out@tp in"), ("[qkv]_proj/bias", "o -> o@tp"),
        ("out_proj/weight", "out in -> out in@tp")]),
    "falcon mlp": ("falcon", "CausalLM", "dp=2,tp=3", [
        ("dense_h_to_4h", "out in -> out@tp in"), ("dense_4h_to_h", "out in -> out in@tp")]),
    "bert": ("bert", "MaskedLM", "dp=3,tp=2", [
        ("(query|key|value|intermediate/dense)/weight", "out in -> out@tp in"),
        ("(query|key|value|intermediate/dense)/bias", "out -> out@tp"),
        ("layer.*output/dense/weight", "out in -> out in@tp")]),
    "bert on dp": ("bert", "MaskedLM", "dp=6,tp=1", []),
    "mamba reads weights of its children": ("mamba", "CausalLM", "dp=2,tp=3", [
        ("in_proj", "out in -> out@tp in")]),
    "fused gate and up": ("phi3", "CausalLM", "dp=2,tp=3", [
        ("gate_up_proj", "out in -> out@tp in"), ("down_proj", "out in -> out in@tp")]),
}  # fmt: skip


def by_rules(
    kind: str, head: str, text: str, rules: list[tuple[str, Any]], is_training: bool = False
) -> dict[str, Any]:
    """Logits and gradients of an architecture that is split by rules."""
    import transformers

    sizes = {"vocab_size": 96, "hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 2,
             "intermediate_size": 72, "ffn_dim": 72, "word_embed_proj_dim": 48, "state_size": 8,
             "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
    sizes |= {"num_key_value_heads": 6}

    def make() -> Any:
        usual = transformers.AutoConfig.for_model(kind)
        own = {name: size for name, size in sizes.items() if hasattr(usual, name)}
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(kind, **own)
        return getattr(transformers, f"AutoModelFor{head}").from_config(config).double()

    given = mw.PathRules([*rules, (".*", ())]) if rules else None
    return against_plain(make, text, given, is_training)


def against_plain(
    make: Callable[[], Any], text: str, rules: Any = None, is_training: bool = False
) -> dict[str, Any]:
    """The largest differences of logits and gradients between a mesh and one process.

    In training the ranks have random seeds of their own, but one for each data rank in effect.
    """
    plain, model = (make().train(is_training) for _ in range(2))
    mesh = mt.mesh(text, device="cpu")
    mt.parallelize(model, mesh, rules)
    tokens = batches(1, 2)[0]
    torch.manual_seed(dist.get_rank() - mesh.get_local_rank("tp"))
    wanted = plain(input_ids=tokens).logits
    torch.manual_seed(dist.get_rank())
    logits = model(input_ids=tokens).logits
    wanted.square().sum().backward()
    logits.square().sum().backward()
    for param in plain.parameters():
        if is_training and param.grad is not None:
            dist.all_reduce(param.grad.div_(mesh.size()))
    # some are 0 but for rounding: the bias of keys changes no attention
    largest = max(p.grad.abs().max().item() for p in plain.parameters() if p.grad is not None)
    errors = {}
    for (name, one), (_, other) in zip(
        plain.named_parameters(), model.named_parameters(), strict=True
    ):
        if one.grad is not None:
            scale = max(one.grad.abs().max().item(), 1e-6 * largest)
            errors[name] = (other.grad.full_tensor() - one.grad).abs().max().item() / scale
    inside = [p for name, p in model.named_parameters() if ".layers." in name and p.ndim == 2]
    split = [p for p in inside if any(place.is_shard() for place in p.placements[1:])]
    return {
        "logits": (logits - wanted).abs().max().item(),
        "gradients": max(errors.values()),
        "of": max(errors, key=lambda name: errors[name]),
        "split": len(split) / max(len(inside), 1),
        "layers": sorted(parallelized(model).split.layers),
    }


class _Dropped(torch.nn.Module):
    """Dropout of complete activations, in three blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(_DroppedBlock() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.dropout(x, 0.2, self.training)
        for block in self.blocks:
            x = block(x)
        return x


class _DroppedBlock(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = torch.nn.Linear(8, 24), torch.nn.Linear(24, 8)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.fc2(self.fc1(x).relu()))


def dropout(**options: Any) -> dict[str, Any]:
    """What is dropped on ranks with seeds of their own, and the gradients of one process."""
    mesh = mt.mesh("dp=3,tp=2", device="cpu")
    plain, model = _Dropped().double(), _Dropped().double()
    x = torch.ones(4, 8, dtype=torch.float64)
    given = mw.PathRules([*MLP_RULES, (".*", ())])
    mt.parallelize(model, mesh, given, example=x, **options)
    torch.manual_seed(dist.get_rank() - mesh.get_local_rank("tp"))
    wanted = plain(x)
    torch.manual_seed(dist.get_rank())
    output = model(x)
    outputs = [torch.empty_like(output) for _ in range(RANKS)]
    dist.all_gather(outputs, output.detach())
    wanted.square().sum().backward()
    output.square().sum().backward()
    worst = 0.0
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        dist.all_reduce(one.grad.div_(RANKS))
        worst = max(worst, (other.grad.full_tensor() - one.grad).abs().max().item())
    return {
        "output": (output - wanted).abs().max().item(),
        "gradients": worst,
        "layers": len(parallelized(model).split.layers),
        "same as rank 0": [torch.equal(outputs[0], other) for other in outputs],
    }


def message(act: Callable[[], Any]) -> str:
    try:
        act()
    except (mw.MeshwrightError, AssertionError) as error:
        return str(error)
    return "no error"


def shared_folder() -> Path:
    name = [tempfile.mkdtemp(prefix="meshwright-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(name, 0)
    return Path(name[0])


def main() -> None:
    torch.set_num_threads(1)
    fork_ranks()
    faulthandler.dump_traceback_later(float(os.environ.get("DUMP_AFTER", "900")))
    mt.mesh("dp=-1,tp=1", device="cpu")
    results: dict[str, Any] = {}
    known = cases()
    for name in known:
        repeated = name.startswith(("train ", "architecture ")) and name not in sys.argv[3:]
        if sys.argv[2] == ("short" if repeated else "long"):
            continue
        begin = time.perf_counter()
        try:
            results[name] = known[name]()
        except Exception:
            results[name] = {"failed": traceback.format_exc()}
            print(name, traceback.format_exc(), file=sys.stderr)
        if dist.get_rank() == 0:
            print(f"{time.perf_counter() - begin:6.1f} s  {name}", file=sys.stderr, flush=True)
            Path(sys.argv[1]).write_text(json.dumps(results))
    dist.destroy_process_group()


def fork_ranks() -> None:
    """Become as many processes as torchrun would start here; the first one waits and ends."""
    for kind, _ in MODELS:
        tiny(kind)  # transformers imports a model when it is asked for
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    gc.freeze()
    ranks = []
    for rank in map(str, range(RANKS)):
        child = os.fork()
        if child == 0:
            world = {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
            os.environ.update({"RANK": rank, "LOCAL_RANK": rank} | world | address)
            return
        ranks.append(child)
    while ranks:
        child, status = os.wait()
        ranks.remove(child)
        if status:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            raise SystemExit(f"a process ended with {os.waitstatus_to_exitcode(status)}")
    raise SystemExit(0)


if __name__ == "__main__":
    main()
