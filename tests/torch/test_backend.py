"""The backend of `train --backend torch` on six processes: skipped steps, own rules, full disks."""

import math
import re

import pytest
from tests.torch.conftest import SixProcesses
from tests.torch.test_six_processes import result

pytest.importorskip("torch")
pytest.importorskip("transformers")


def test_a_step_that_is_not_finite_on_one_rank_is_left_out_on_all(on_six: SixProcesses) -> None:
    ranks = result(on_six, "skipped steps")["ranks"]
    assert len(ranks) == 6
    for rank, (kept, reports) in enumerate(ranks):
        unchanged, changed, resumed, finite = kept
        assert unchanged, f"rank {rank}: weights or moments changed in a step that is not finite"
        assert changed, f"rank {rank}: the good step after it changed nothing"
        assert resumed, f"rank {rank}: what was saved is not what is restored"
        assert not finite, "one rank alone holds the weights that are not"
        assert [math.isfinite(one["loss"]) for one in reports] == [True, False, True, True, True]
        assert [one["skipped"] for one in reports] == [0, 1, 1, 1, 1]
        assert [one["skipped_in_a_row"] for one in reports] == [0, 1, 0, 0, 0]
        # the schedule counts what was done: three steps, the third in the run that resumed too
        rates = [one["learning_rate"] / reports[0]["learning_rate"] for one in reports]
        assert rates == pytest.approx([1, 2, 2, 3, 3], rel=1e-5)
        assert reports[3] == reports[4] == ranks[0][1][4]


def test_a_file_of_rules_places_weights_and_changes_no_loss(on_six: SixProcesses) -> None:
    found = result(on_six, "own rules")
    assert found["file"]["losses"] == pytest.approx(found["standard"]["losses"], rel=1e-6)
    # on fsdp=2,tp=3: embed is split over fsdp, heads over tp, vocab and mlp not at all
    wanted = {
        "model.embed_tokens.weight": ([384 // 6, 48], [384, 48 // 2]),
        "lm_head.weight": ([384 // 6, 48], [384, 48 // 2]),
        "model.layers.0.self_attn.q_proj.weight": ([48 // 6, 48], [48 // 3, 48 // 2]),
        "model.layers.0.self_attn.o_proj.weight": ([48 // 2, 48 // 3], [48 // 2, 48 // 3]),
        "model.layers.0.mlp.up_proj.weight": ([72 // 6, 48], [72, 48 // 2]),
    }
    for name, (standard, own) in wanted.items():
        assert found["standard"]["shards"][name] == standard, name
        assert found["file"]["shards"][name] == own, name


def test_a_plan_for_six_processes_is_one_for_six_devices(on_six: SixProcesses) -> None:
    assert result(on_six, "own rules")["machine"] == "cpu:6"


def test_a_full_disk_of_one_rank_loses_nothing(on_six: SixProcesses) -> None:
    found = result(on_six, "full disk")
    no_space, too_large = found["errors"]
    assert too_large.startswith("step 2 was not saved: rank 0: ")
    assert "File too large" in too_large
    assert too_large.endswith("; complete checkpoints there: 1")
    said = re.fullmatch(
        r"step 2 was not saved: rank 5: the disk of \S+ is full \(\S+ GB free, up to (\S+) GB "
        r"needed\); free some space or lower keep_last; complete checkpoints there: 1",
        no_space,
    )
    assert said is not None, no_space
    assert 0.8 < float(said[1]) / found["written"] < 1  # of all ranks, without file headers
    assert found["everyone"] == 6 * [found["errors"]]
    assert found["left"] == 2 * [["step-00000001"]]
    assert found["steps"] == [1, 2]  # when there is space again
