"""Plans of the PyTorch backend; PyTorch need not be installed. tests/torch has it run steps."""

import json
import subprocess
import sys
from typing import Any

import pytest
from tests.planner.workloads import workload

from meshwright.errors import MeshwrightError
from meshwright.models import preset
from meshwright.planner import Choice, memory, plan
from meshwright.planner.constraints import parse
from meshwright.planner.report import find_mesh, plan_data, plan_from_data
from meshwright.planner.report.phrases import next_commands
from meshwright.planner.schedules.fsdp2 import group_of, meshes, narrowed, refusal
from meshwright.planner.step import StepModel

LLAMA = preset("llama-3.1-8b")
RUN = workload(LLAMA, "h100:8", 8, 8192, backend="torch")


def test_groups_are_the_parameters_of_a_block_and_of_the_root() -> None:
    block, root = group_of(LLAMA, True, 1, 1), group_of(LLAMA, False, 1, 1)
    assert 32 * block.whole + root.whole == 8_030_261_248
    tied = preset("llama-3.2-1b")
    assert group_of(tied, False, 2, 1) == (128256 * 2048 // 2 + 2048,) * 2
    # 4,096 rows over 3: two shards of 1,366 and one of 1,364, sent as three of 1,366
    assert group_of(LLAMA, False, 1, 3).whole - group_of(LLAMA, False, 1, 1).whole == 2
    assert group_of(LLAMA, True, 1, 3).shard == group_of(LLAMA, True, 1, 3).whole // 3


def test_meshes_have_no_sp_and_a_data_axis_alone_shards_weights() -> None:
    found = {choice.mesh for choice in meshes(8)}
    assert len(found) == 7
    assert {choice.size("sp") for choice in meshes(64)} == {1}
    assert "dp=2,fsdp=4,tp=1,sp=1" in found
    assert "dp=8,fsdp=1,tp=1,sp=1" not in found
    assert narrowed(RUN, parse("dp=4,tp<=2")).limits == (
        ("dp", "=", 1),
        ("fsdp", "=", 4),
        ("tp", "<=", 2),
    )
    assert narrowed(RUN, parse("dp=2,fsdp=4")) == parse("dp=2,fsdp=4")
    best = plan("llama-3.1-8b", "h100:8", 64, 4096, backend="torch", mesh="dp=4")
    assert [one.choice.mesh for one in best.ranked] == ["dp=1,fsdp=4,tp=2,sp=1"]
    assert find_mesh(best, "dp=4,tp=2") is best.best


def test_what_tp_cannot_split_is_refused_and_what_fsdp_cannot_is_padded() -> None:
    assert refusal(RUN, Choice.of(tp=16)) == "kv_heads=8 cannot be split in tp=16, but in 2, 4 or 8"
    assert "batch=8 is not divisible by dp·fsdp=3" in (refusal(RUN, Choice.of(fsdp=3)) or "")
    assert refusal(RUN.resized(3), Choice.of(fsdp=3)) is None


def test_memory_of_8b_by_hand() -> None:
    choice = Choice.of(fsdp=8)
    kinds = memory(StepModel(RUN, choice)).kinds
    weights = 8_030_261_248 // 8
    assert kinds["parameters"] == 4 * weights
    assert kinds["optimizer"] == 8 * weights
    # block input and the norms' outputs, attention, three arrays of the mlp, in bfloat16
    token = 2 * (4 * 4096 + 2 * 4096 + 2 * 1024 + 3 * 14336) + 4 * (2 + 32)
    last = 6 * 4096 + 4 + 2 * 4096
    assert kinds["saved activations"] == 8192 * (32 * token + last)
    assert kinds["all-gathered weights"] == 2 * group_of(LLAMA, False, 1, 8).whole
    assert kinds["loss"] == 2 * 2 * 8192 * 128256


def sent(choice: Choice, axis: str) -> int:
    """Bytes of a step over an axis, without single numbers."""
    sent = StepModel(RUN, choice).collectives
    own = [one for one in sent if one.axes == (axis,) and one.bytes > 2000]
    return sum(one.bytes * one.times for one in own)


def test_bytes_of_a_step_by_hand() -> None:
    blocks, root = 6_979_584_000, 1_050_677_248
    # gathered in bfloat16, blocks twice; gradients summed in float32
    assert sent(Choice.of(fsdp=8), "fsdp") == (2 + 2 + 4) * blocks + (2 + 4) * root
    assert sent(Choice.of(dp=2, fsdp=4), "dp") == 4 * (blocks + root) // 4
    # the embedding's sum, the gradient of the LM head's input, four of each block; and of each token
    # a maximum and two sums for the loss
    stream, tokens = 2 * 8 * 8192 * 4096, 8 * 8192
    assert sent(Choice.of(tp=8), "tp") == (2 + 4 * 32) * stream + (4 + 8) * tokens


def test_it_overlaps_what_fsdp2_does_and_nothing_of_tp() -> None:
    ranking = plan("llama-3.1-8b", "h100:8", 64, 4096, backend="torch")
    mixed = next(
        one for one in ranking.ranked if one.choice.size("tp") > 1 and one.choice.size("fsdp") > 1
    )
    by_what = {one.what: one for one in mixed.collectives}
    assert by_what["weights of a block"].hidden > 0
    assert by_what["gradients of a block"].hidden > 0
    assert by_what["weights of the root"].hidden == 0
    assert all(one.hidden == 0 for one in mixed.collectives if one.axes == ("tp",))


def test_published_steps_of_fsdp2_lie_between_no_remat_and_full() -> None:
    # torchtitan, docs/performance.md: 8B on 8 H100 limited to 500 W at 8,192 tokens, FSDP2 with some
    # operators recomputed: 6,667 tokens a second and GPU compiled, 5,762 not
    speeds = {}
    for compile_ in ("on", "off"):
        for remat in ("none", "full"):
            one = plan(
                "llama-3.1-8b", "h100-500w:8", 8, 8192,
                backend="torch", compile=compile_, remat=remat, mesh="fsdp=8",
            )  # fmt: skip
            speeds[compile_, remat] = one.tokens_per_second(one.best) / 8
    assert speeds["on", "full"] < 6667 < speeds["on", "none"]
    assert speeds["off", "full"] < 5762 < speeds["off", "none"]
    assert speeds["off", "none"] / speeds["on", "none"] == pytest.approx(5762 / 6667, rel=0.03)


def test_the_command_starts_a_process_for_each_gpu() -> None:
    one_host = plan("llama-3.1-8b", "h100:8", 64, 4096, backend="torch", mesh="fsdp=4,tp=2")
    (command,) = next_commands(one_host, one_host.best.choice)
    assert command.startswith("meshwright train llama-3.1-8b --backend torch --mesh fsdp=4,tp=2")
    assert "--processes 8" in command


def test_on_several_hosts_the_command_is_one_of_torchrun() -> None:
    ranking = plan("llama-3.1-8b", "h100:2x8", 64, 4096, backend="torch", mesh="dp=2,fsdp=4,tp=2")
    (command,) = next_commands(ranking, ranking.best.choice)
    assert command.startswith("torchrun --nproc-per-node 8 --nnodes 2 ")
    assert "--no-python -- meshwright train llama-3.1-8b" in command
    assert "--backend torch --mesh dp=2,fsdp=4,tp=2 --batch 64 --seq 4096" in command
    assert plan_from_data(json.loads(json.dumps(plan_data(ranking)))) == ranking


def test_bfloat16_parameters_take_one_micro_batch_as_in_train() -> None:
    sizes = ("llama-3.1-8b", "h100:8", 256, 4096)
    assert plan(*sizes, backend="torch").best.choice.accumulation > 1
    with pytest.raises(MeshwrightError, match="fits on no mesh"):
        plan(*sizes, backend="torch", param_dtype="bfloat16")
    fits = plan("llama-3.1-8b", "h100:8", 64, 4096, backend="torch", param_dtype="bfloat16")
    assert {one.choice.accumulation for one in fits.ranked} == {1}


@pytest.mark.parametrize(("model", "on", "how", "words"), [
    ("llama-3.1-8b", "v5p:2x2x2", {}, "is a TPU machine, and the PyTorch backend runs on GPUs"),
    ("t5-small", "h100:8", {}, "is a t5 model, and plans of the PyTorch backend"),
    ("llama-3.1-8b", "h100:8", {"kind": "serve"}, "is of training, and serving is planned"),
    ("llama-3.1-8b", "h100:8", {"mesh": "sp=2"}, "the PyTorch backend has no sp axis"),
    ("llama-3.1-8b", "h100:8", {"remat": "mlp"}, "known: none, full"),
    ("llama-3.1-8b", "h100:8", {"optimizer": "lion"}, "optimizer=lion is a setting of the JAX"),
    ("llama-3.1-8b", "h100:8", {"accumulation": 2, "param_dtype": "bfloat16"}, "leave one out"),
])  # fmt: skip
def test_what_pytorch_does_not_have_is_an_error(
    model: str, on: str, how: dict[str, Any], words: str
) -> None:
    with pytest.raises(MeshwrightError) as error:
        plan(model, on, 64, 512, backend="torch", **how)
    assert words in str(error.value)


def test_pytorch_need_not_be_installed() -> None:
    code = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
from meshwright.planner import plan
print(plan("llama-3.1-8b", "h100:8", 64, 4096, backend="torch").mesh)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
