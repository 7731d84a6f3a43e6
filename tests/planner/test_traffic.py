"""What the planner says a step sends is what the compiled step sends."""

from collections import Counter

import pytest
from tests.planner.compiled import Case, sums

from meshwright.audits import Collective
from meshwright.planner.step import StepModel

FAST = [
    Case("llama", "fsdp=8"),
    Case("qwen2.5", "dp=2,fsdp=2,tp=2"),
    Case("tied", "fsdp=4,tp=2", remat="full", sequence_parallel=True),
    Case("llama", "fsdp=2,sp=4", context_parallel="ring", remat="full"),
    Case("norms after", "fsdp=4,tp=2", remat="full"),
    Case("llama", "fsdp=4,tp=2", accumulation=2, trainable=("norm",)),
    Case("llama", "dp=2,fsdp=4", trainable=("layers/-1/",)),
    Case("tied", "fsdp=2,tp=2,sp=2", dpo=True, context_parallel="ring", accumulation=2),
    Case("experts", "fsdp=2,ep=4", experts="all-to-all"),
]
SLOW = [
    Case("experts", "dp=2,fsdp=2,ep=2", experts="ring", accumulation=2),
    Case("deepseek", "fsdp=2,tp=2,ep=2", experts="ring", sequence_parallel=True, layers=4),
    Case("llama", "dp=2,fsdp=4", dpo=True, remat="full"),
    Case("qwen3", "fsdp=4,tp=2", dpo=True, sequence_parallel=True, trainable=("layers/-1/",)),
    Case("llama", "fsdp=4,sp=2", dpo=True, context_parallel="allgather"),
    Case("llama", "dp=2,sp=4", dpo=True, context_parallel="ulysses"),
    Case("norms after", "dp=2,fsdp=2,tp=2", remat="mlp", sequence_parallel=True),
    Case("tied", "dp=2,fsdp=2,tp=2", trainable=("embedding", "wq")),
    Case("qwen3", "fsdp=4,tp=2", trainable=("output", "q_norm"), sequence_parallel=True),
    Case("llama", "fsdp=4,tp=2", trainable=("layers/[01]/",), optimizer="muon"),
    Case("grouped", "fsdp=2,sp=4", context_parallel="ulysses", accumulation=2),
    Case("qwen3", "fsdp=2,tp=2,sp=2", context_parallel="ring"),
    Case("llama", "fsdp=4,sp=2", context_parallel="allgather", remat="mlp"),
    Case("biases", "fsdp=4,tp=2", mlp_chunk=8, sequence_parallel=True),
    Case("llama", "dp=8"),
    Case("llama", "tp=8"),
    Case("llama", "sp=8", context_parallel="ring"),
    Case("llama", "sp=8", context_parallel="allgather", remat="full"),
    Case("grouped", "tp=2,sp=4", context_parallel="ring", remat="elementwise"),
    Case("llama", "dp=2,fsdp=4", accumulation=2, remat="full"),
    Case("llama", "dp=4,fsdp=2", optimizer="muon"),
    Case("llama", "dp=2,fsdp=2,tp=2", optimizer="muon"),
    Case("llama", "fsdp=2,tp=2,sp=2", optimizer="muon", context_parallel="ring"),
    Case("qwen2.5", "fsdp=8", remat="elementwise"),
    Case("qwen2.5", "fsdp=4,tp=2", remat="full", accumulation=2, sequence_parallel=True),
    Case("qwen2.5", "fsdp=2,tp=2,sp=2", remat="mlp", context_parallel="ring"),
    Case("biases", "fsdp=2,tp=4", mlp_chunk=8, accumulation=2),
    Case(
        "biases",
        "dp=2,tp=2,sp=2",
        remat="full",
        context_parallel="allgather",
        sequence_parallel=True,
    ),
    Case("qwen3", "fsdp=4,tp=2", remat="mlp", sequence_parallel=True),
    Case("qwen3", "dp=2,fsdp=2,sp=2", remat="full", accumulation=2, context_parallel="ring"),
    Case("tied", "fsdp=8"),
    Case("tied", "dp=2,fsdp=2,tp=2", accumulation=2, remat="mlp"),
    Case("tied", "dp=2,fsdp=2,sp=2", remat="full", context_parallel="ring"),
    Case("window", "fsdp=8", remat="full"),
    Case("window", "fsdp=2,sp=4", context_parallel="ring", remat="full"),
    Case("window", "fsdp=2,tp=2,sp=2", context_parallel="ring", sequence_parallel=True),
    Case("window", "fsdp=4,sp=2", context_parallel="allgather"),
    Case(
        "llama",
        "fsdp=2,tp=2,sp=2",
        context_parallel="ulysses",
        sequence_parallel=True,
        remat="full",
    ),
    Case("llama", "dp=2,fsdp=2,sp=2", context_parallel="ulysses"),
    Case("llama", "fsdp=2,tp=4", remat="full"),
    Case("llama", "fsdp=4,tp=2", mlp_chunk=8, sequence_parallel=True, remat="full"),
    Case("grouped", "fsdp=2,sp=4", context_parallel="auto", accumulation=4, layers=2),
    Case("llama", "fsdp=8", accumulation=4, layers=5),
    Case("llama", "dp=2,fsdp=2,sp=2", mlp_chunk=4, context_parallel="ring", accumulation=2),
    Case("experts", "fsdp=2,ep=4", experts="ring"),
    Case("experts", "dp=2,fsdp=2,tp=2"),
    Case("experts", "dp=2,fsdp=2,tp=2", sequence_parallel=True),
    Case("experts", "fsdp=2,tp=2,ep=2", experts="ring", remat="full"),
    Case("experts", "fsdp=2,tp=2,ep=2", experts="ring", sequence_parallel=True),
    Case("experts", "dp=2,ep=4", experts="all-to-all", remat="full"),
    Case("experts", "ep=8", experts="all-to-all", remat="elementwise"),
    Case("experts", "ep=8", experts="ring", accumulation=2),
    Case("experts", "dp=2,ep=4", experts="all-to-all", capacity=1.25),
    Case("experts", "fsdp=4,ep=2", experts="ring", capacity=1.25),
    Case(
        "experts",
        "fsdp=2,sp=2,ep=2",
        experts="all-to-all",
        context_parallel="allgather",
        remat="full",
    ),
    Case("experts", "fsdp=2,ep=4", optimizer="muon"),
    Case("experts", "fsdp=2,ep=4", experts="ring", trainable=("gate",)),
    Case("shared", "fsdp=4,tp=2"),
    Case("shared", "fsdp=4,tp=2", remat="full"),
    Case("shared", "fsdp=2,sp=2,ep=2", experts="ring", context_parallel="ring"),
    Case("shared", "tp=2,ep=4", experts="all-to-all", sequence_parallel=True),
    Case("shared", "fsdp=2,tp=2,ep=2", experts="all-to-all", accumulation=2, remat="mlp"),
    Case("latent", "fsdp=8"),
    Case("latent", "fsdp=4,tp=2"),
    Case("latent", "dp=2,fsdp=2,tp=2", remat="full", sequence_parallel=True),
    Case("latent", "tp=8", accumulation=2),
    Case("latent", "fsdp=2,tp=2,sp=2", context_parallel="ring", sequence_parallel=True),
    Case("latent", "fsdp=2,sp=4", context_parallel="allgather", remat="elementwise"),
    Case("latent keys", "fsdp=4,tp=2", remat="full"),
    Case("latent keys", "fsdp=4,tp=2", sequence_parallel=True),
    Case("deepseek", "dp=2,fsdp=2,tp=2", layers=4),
    Case("deepseek", "dp=2,fsdp=2,ep=2", remat="mlp", accumulation=2, layers=4),
    Case("deepseek", "fsdp=2,sp=2,ep=2", experts="ring", context_parallel="ring", layers=4),
    Case(
        "deepseek",
        "tp=2,ep=4",
        experts="all-to-all",
        remat="full",
        sequence_parallel=True,
        layers=4,
    ),
]


def written(case: Case) -> list[Collective]:
    """The collectives of a step, as the plan has them before a compiler changes them."""
    return StepModel(case.workload(f"cpu:{case.choice.devices}"), case.choice).written


@pytest.mark.parametrize(
    "case", [*FAST, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids=str
)
def test_the_bytes_of_each_operation_over_each_axis_are_those_of_the_compiled_step(
    case: Case,
) -> None:
    planned: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for one in written(case):
        planned[one.operation, one.axes] += one.bytes * one.times
    found = {key: size for key, size in sums(case).items() if key[1]}  # a device to itself: nothing
    assert planned.keys() == found.keys()
    assert {key: pytest.approx(size, rel=0.01) for key, size in found.items()} == planned


@pytest.mark.parametrize(
    "case", [one for one in (*FAST, *SLOW) if one.context_parallel != "auto"], ids=str
)
def test_what_is_said_to_be_of_layers_is_sent_as_often_as_there_are_layers(case: Case) -> None:
    found = written(case)
    longer = Case(**{**case.__dict__, "layers": 2 * case.layers})
    twice = {(one.what, one.operation, one.phase, one.stack): one for one in written(longer)}
    assert found
    for send in found:
        if send.layers:
            assert send.times % (send.layers * case.accumulation) == 0
            longer_send = twice[send.what, send.operation, send.phase, send.stack]
            assert longer_send.times == 2 * send.times
