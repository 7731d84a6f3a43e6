"""What the plan says of the PyTorch backend, against real steps on a fake process group."""

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from meshwright.machines import Machine
from meshwright.models import DecoderConfig
from meshwright.planner import Choice, Job, memory
from meshwright.planner.fsdp2 import saved_by_block, sends

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.torch.live import Live  # noqa: E402

import meshwright.torch as mt  # noqa: E402

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


def network(kind: str) -> Any:
    model = KINDS[kind]
    config = transformers.AutoConfig.for_model(
        kind.split()[-1], vocab_size=model.vocab, hidden_size=model.embed,
        intermediate_size=model.mlp, num_hidden_layers=model.layers,
        num_attention_heads=model.heads, num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim, max_position_embeddings=model.max_seq, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, tie_word_embeddings=model.tied_embeddings,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


@dataclasses.dataclass
class Case:
    """A job, how it is run, and the same in PyTorch."""

    kind: str
    choice: Choice
    job: Job

    def parallelized(self) -> Any:
        choice = self.choice
        mesh = mt.mesh(f"dp={choice.dp},fsdp={choice.fsdp},tp={choice.tp}", device="cpu")
        return mt.parallelize(
            network(self.kind), mesh, mixed_precision="bf16",
            sequence_parallel=choice.sequence_parallel, loss_parallel=self.job.loss_parallel,
            activation_checkpointing=choice.remat == "full",
            reshard_after_forward=None if choice.fsdp > 1 and self.job.reshard_after_forward else False,
        )  # fmt: skip

    def step(self, model: Any) -> None:
        """As meshwright.torch.train does it, up to the update."""
        rows = self.job.batch // (self.choice.dp * self.choice.fsdp * self.choice.accumulation)
        one = torch.ones(1, dtype=torch.float64)
        torch.distributed.all_reduce(one)
        for _ in range(self.choice.accumulation):
            tokens = torch.ones(rows, self.job.seq, dtype=torch.int64)
            logits = model(input_ids=tokens, use_cache=False).logits
            loss = mt.cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens.reshape(-1))
            del logits
            loss.backward()
        torch.distributed.all_reduce(torch.cat([one, one, one]))


def case(kind: str = "llama", batch: int = 12, **how: Any) -> Case:
    own = {"loss_parallel": False, "reshard_after_forward": True}
    own = {name: how.pop(name, usual) for name, usual in own.items()}
    job = Job(
        KINDS[kind], batch, 24, dtype="bfloat16", backend="torch", compiled=False, scan=False, **own
    )
    return Case(kind, Choice(**how), job)


CASES = [
    case(dp=3, fsdp=4, batch=24, accumulation=2),
    case("qwen3", fsdp=4, tp=3, sequence_parallel=True, loss_parallel=True, batch=48),
    case("tied llama", dp=2, fsdp=2, tp=3, loss_parallel=True, remat="full"),
]
MORE = [
    case(fsdp=12),
    case(dp=12),
    case("tied llama", dp=2, fsdp=6, batch=96),
    case("qwen2", fsdp=4, tp=3),
    case(fsdp=6, tp=2, sequence_parallel=True, remat="full", batch=48),
    case("qwen3", fsdp=2, tp=6, loss_parallel=True, reshard_after_forward=False, batch=24),
]


@pytest.mark.parametrize(
    "one",
    [*CASES, *(pytest.param(one, marks=pytest.mark.slow) for one in MORE)],
    ids=lambda one: f"{one.kind} {one.choice.mesh}",
)
def test_a_step_sends_and_holds_what_the_plan_says(one: Case) -> None:
    model = one.parallelized()
    found = mt.audit(lambda: one.step(model), model=model)
    sent: collections.Counter[Any] = collections.Counter()
    for row in found.rows:
        sent[row.operation, row.axes, row.phase, row.bytes] += row.times
    planned: collections.Counter[Any] = collections.Counter()
    for send in sends(one.job, one.choice):
        planned[send.operation, send.axes, send.phase, send.bytes] += send.times
    assert sent == planned

    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    optimizer.zero_grad()
    with Live() as live:
        for param in model.parameters():
            live.add(param)
            for moment in ("exp_avg", "exp_avg_sq"):
                live.add(optimizer.state[param][moment])
        one.step(model)
    assert memory(one.job, one.choice, CPU).total == pytest.approx(live.most, rel=0.03)


@pytest.mark.parametrize(
    ("kind", "compiled"), [("llama", False), ("qwen3", False), ("qwen3", True)]
)
def test_a_block_saves_what_the_plan_says(kind: str, compiled: bool) -> None:
    """Without kernels: the partitioner of torch.compile alone decides what is saved."""
    model = network(kind).to(torch.bfloat16)
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
    one = case(kind, batch=2)
    job = dataclasses.replace(one.job, compiled=compiled)
    assert bytes_ == saved_by_block(job, one.choice)
