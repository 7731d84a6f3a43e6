"""What the plan says of the PyTorch backend, against real steps on a fake process group."""

import collections
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.machines import Machine
from meshwright.models import DecoderConfig
from meshwright.planner import Choice, Workload, memory
from meshwright.planner.schedules.fsdp2_memory import Fsdp2Device
from meshwright.planner.step import StepModel
from meshwright.training import TrainConfig, with_settings

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.planner.workloads import workload  # noqa: E402
from tests.torch.live import Live  # noqa: E402

import meshwright.torch as mt  # noqa: E402
from meshwright.torch.train.backend import TorchBackend  # noqa: E402

# PyTorch's own: of CPUs without bfloat16, and of what torch.compile looks at
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

WORLD = 12
CPU = Machine.parse("cpu:12")
MODEL = DecoderConfig(
    vocab=504, layers=3, embed=60, heads=12, kv_heads=6, head_dim=4, mlp=186, max_seq=64
)
KINDS = {
    "llama": MODEL,
    "tied llama": dataclasses.replace(MODEL, tied_embeddings=True),
    "qwen2": dataclasses.replace(MODEL, qkv_bias=True),
    "qwen3": dataclasses.replace(MODEL, qk_norm=True),
}


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    yield
    dist.destroy_process_group()


def hf_config(kind: str) -> Any:
    model = KINDS[kind]
    return transformers.AutoConfig.for_model(
        kind.split()[-1], vocab_size=model.vocab, hidden_size=model.embed,
        intermediate_size=model.mlp, num_hidden_layers=model.layers,
        num_attention_heads=model.heads, num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim, max_position_embeddings=model.max_seq, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, tie_word_embeddings=model.tied_embeddings,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, a mesh, and what else is not as usual in the settings of a run."""

    kind: str
    mesh: str
    changes: Mapping[str, Any]

    def config(self, folder: Path) -> TrainConfig:
        hf_config(self.kind).save_pretrained(folder / "model")
        usual = TrainConfig(
            str(folder / "model"), folder / "run", "torch", self.mesh, batch=12, seq=24
        )
        return with_settings(usual, {"compute.dtype": "bfloat16", **self.changes})

    def batch(self, config: TrainConfig) -> dict[str, Any]:
        """A rank's part, one document a sequence, as the plan counts it."""
        sizes = dict(part.split("=") for part in self.mesh.split(","))
        ranks = int(sizes["dp"]) * int(sizes["fsdp"])
        shape = (config.accumulation, config.batch // ranks // config.accumulation, config.seq)
        ones = np.ones(shape, np.int32)
        positions = np.broadcast_to(np.arange(config.seq, dtype=np.int32), shape)
        return {"tokens": ones, "targets": ones, "segments": ones, "positions": positions}


def case(kind: str, mesh: str, **changes: Any) -> Case:
    groups = {"remat": "compute", "sequence_parallel": "compute"}
    groups |= {"loss_parallel": "torch", "reshard_after_forward": "torch"}
    named = {f"{groups[k]}.{k}" if k in groups else k: value for k, value in changes.items()}
    return Case(kind, mesh, named)


CASES = [
    case("llama", "dp=3,fsdp=4,tp=1", batch=24, accumulation=2),
    case("qwen3", "dp=1,fsdp=4,tp=3", sequence_parallel=True, batch=48),
    case("tied llama", "dp=2,fsdp=2,tp=3", remat="full"),
]
MORE = [
    case("llama", "dp=1,fsdp=12,tp=1"),
    case("llama", "dp=12,fsdp=1,tp=1"),
    case("tied llama", "dp=2,fsdp=6,tp=1", batch=96),
    case("qwen2", "dp=1,fsdp=4,tp=3", loss_parallel=False),
    case(
        "llama", "dp=1,fsdp=6,tp=2",
        sequence_parallel=True, remat="full", batch=48, loss_parallel=False,
    ),
    case("qwen3", "dp=1,fsdp=2,tp=6", reshard_after_forward=False, batch=24),
]  # fmt: skip


@pytest.mark.parametrize(
    "one",
    [*CASES, *(pytest.param(one, marks=pytest.mark.slow) for one in MORE)],
    ids=lambda one: f"{one.kind} {one.mesh}",
)
def test_a_step_sends_and_holds_what_the_plan_says(one: Case, tmp_path: Path) -> None:
    """The step that the backend of `meshwright train` runs."""
    step, backend, batch = sends_as_planned(one, tmp_path)
    # the fake group sends nothing, so the step may be skipped: make the moments
    backend._optimizer.step()
    with Live() as live:
        for param in backend.network.parameters():
            live.add(param)
            moments = backend._optimizer.state[param]
            live.add(moments["exp_avg"])
            live.add(moments["exp_avg_sq"])
        backend.step(batch)
    assert memory(step).total == pytest.approx(live.most, rel=0.03)


def test_the_loss_of_every_micro_batch_is_of_the_forward_pass(tmp_path: Path) -> None:
    sends_as_planned(case("llama", "dp=1,fsdp=4,tp=3", batch=24, accumulation=2), tmp_path)


def sends_as_planned(one: Case, tmp_path: Path) -> Any:
    """Compare what a step sends, by operation, axes, phase and size, with the plan."""
    config = one.config(tmp_path)
    step = StepModel(Workload.of(config, CPU))
    backend = TorchBackend(config, mt.mesh(config.mesh, device="cpu"))
    backend.start(None)
    batch = one.batch(config)
    found = mt.audit(lambda: backend.step(batch), model=backend.network)
    sent: collections.Counter[Any] = collections.Counter()
    for row in found.rows:
        sent[row.operation, row.axes, row.phase, row.bytes] += row.times
    planned: collections.Counter[Any] = collections.Counter()
    for send in step.collectives:
        planned[send.operation, send.axes, send.phase, send.bytes] += send.times
    assert sent == planned
    return step, backend, batch


@pytest.mark.parametrize(
    ("kind", "compiled"), [("llama", False), ("qwen3", False), ("qwen3", True)]
)
def test_a_block_saves_what_the_plan_says(kind: str, compiled: bool) -> None:
    """Without kernels: the partitioner of torch.compile alone decides what is saved."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(hf_config(kind)).to(torch.bfloat16)
    block = model.model.layers[1]
    if compiled:
        torch._dynamo.reset()
        block.compile(backend="aot_eager_decomp_partition")
    given = {param.untyped_storage().data_ptr() for param in model.parameters()}
    saved: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            saved[storage.data_ptr()] = storage
        return tensor

    stream = torch.ones(2, 24, MODEL.embed, dtype=torch.bfloat16, requires_grad=True)
    positions = torch.arange(24)[None]
    rotation = model.model.rotary_emb(stream, positions)
    given |= {one.untyped_storage().data_ptr() for one in rotation}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = block(stream * 1, position_embeddings=rotation)
    bytes_ = sum(storage.nbytes() for storage in saved.values())
    del out
    run = workload(
        KINDS[kind], CPU, 2, 24, backend="torch", torch_compile="on" if compiled else "off"
    )
    assert bytes_ == Fsdp2Device(StepModel(run, Choice.of())).saved_block
