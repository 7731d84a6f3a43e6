"""A run resumes from the checkpoint that is asked for; where it cannot, the message says why."""

import dataclasses
import json
import re
import shlex
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from tests.processes import Ended, run_commands
from tests.training.test_loop import MODEL

from meshwright.checkpoint import Checkpoints
from meshwright.errors import MeshwrightError
from meshwright.launch import StoreAgreement
from meshwright.training.config import TrainConfig
from meshwright.training.resume import _check_data, resume_step
from meshwright.training.run import read_metrics

TREE = {"w": jnp.ones((4, 4))}


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    with Checkpoints(tmp_path) as made:
        for step in (2, 4):
            made.save(step, TREE, {}, wait=True)
    return made


def test_the_step_that_is_asked_for_is_resumed_from(checkpoints: Checkpoints) -> None:
    agreement = StoreAgreement("test")
    for wanted, step in (("latest", 4), ("2", 2), ("00004", 4), ("none", None)):
        assert resume_step(checkpoints, wanted, agreement.from_first) == step
    with pytest.raises(MeshwrightError, match=r"resume_from=3: .* it has steps 2, 4$"):
        resume_step(checkpoints, "3", agreement.from_first)
    for mistake in ("-2", "1.5", "two", "lastest", ""):
        with pytest.raises(MeshwrightError, match="neither a step nor 'latest' nor 'none'"):
            TrainConfig("tiny", resume_from=mistake)


def test_an_empty_folder_starts_anew_and_has_no_step(tmp_path: Path) -> None:
    empty, agreement = Checkpoints(tmp_path / "new"), StoreAgreement("test")
    assert resume_step(empty, "latest", agreement.from_first) is None
    assert resume_step(empty, "none", agreement.from_first) is None
    with pytest.raises(MeshwrightError, match="it has none; start with --resume-from none"):
        resume_step(empty, "2", agreement.from_first)


def test_a_run_whose_checkpoints_were_all_renamed_does_not_start_anew_in_silence(
    checkpoints: Checkpoints,
) -> None:
    for step, name in ((2, "step-2"), (4, "best")):
        (checkpoints.folder / f"step-{step:08d}").rename(checkpoints.folder / name)
    with pytest.raises(MeshwrightError, match=r"under other names \(best, step-2\).*Rename them"):
        resume_step(checkpoints, "latest", StoreAgreement("test").from_first)
    assert resume_step(checkpoints, "none", StoreAgreement("test").from_first) is None


def test_other_data_is_told_by_what_differs() -> None:
    def described(**changed: Any) -> dict[str, Any]:
        stories = {"name": "stories", "identity": "11112222aaaa", "share": 3}
        news = {"name": "news", "identity": "33334444bbbb", "share": 1}
        same = {"tokenizer": "bytes", "vocab": 257, "sources": [stories, news]}
        return {**same, "batch": 8, "seq": 32, "held_out": 0, "seed": 0} | changed

    before = described()
    _check_data(before, described(), "step 4 of run")
    moved = [{**source, "name": f"/moved/{source['name']}"} for source in before["sources"]]
    _check_data(before, described(sources=moved), "step 4 of run")
    packed_anew = [{**before["sources"][0], "identity": "99998888cccc"}, before["sources"][1]]
    with pytest.raises(MeshwrightError) as error:
        _check_data(before, described(sources=packed_anew, tokenizer="other"), "step 4 of run")
    assert str(error.value) == (
        "step 4 of run cannot be resumed with other data: --data was stories (share 0.75, content "
        "11112222) + news (share 0.25, content 33334444), is now stories (share 0.75, content "
        "99998888) + news (share 0.25, content 33334444). The run would repeat or miss tokens. "
        "Give the old value again, or start a new run: --run with another folder"
    )
    with pytest.raises(MeshwrightError, match=r"--eval\.sequences was 0, is now 4\. "):
        _check_data(before, described(held_out=4), "step 4 of run")


def test_another_objective_is_told_by_name_or_by_what_differs() -> None:
    same = {"sources": [], "batch": 8}
    span = {"name": "span-corruption", "seq": 32, "noise_density": 0.15}
    for was, now, words in (
        (span, {"name": "prefix-lm", "seq": 32}, "was span-corruption, is now prefix-lm. "),
        (
            span,
            span | {"noise_density": 0.3},
            "was span-corruption (noise_density 0.15), is now span-corruption (noise_density 0.3). ",
        ),
        (None, span, "was next-token, is now span-corruption. "),
        (span, None, "was span-corruption, is now next-token. "),
    ):
        before, after = (same | ({} if one is None else {"objective": one}) for one in (was, now))
        with pytest.raises(MeshwrightError, match=f"--objective {re.escape(words)}"):
            _check_data(before, after, "step 4 of run")


@dataclasses.dataclass(frozen=True)
class Runs:
    """Commands on one run, of which step 3 was damaged after the first."""

    folder: Path
    first: Ended
    refused: Ended
    not_generated: Ended
    generated: Ended
    resumed: Ended
    anew: Ended


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("resumed")
    run = folder / "run"
    (folder / "config.json").write_text(json.dumps(MODEL))
    train = ["train", str(folder / "config.json"), "--run", str(run), "--batch", "4"]
    train += ["--seq", "32", "--steps", "6", "--checkpoint.every", "1"]
    damage = (
        f"next(__import__('pathlib').Path({str(run)!r}).glob('checkpoints/*3/**/d/*')).unlink()"
    )
    generate = ["generate", str(run), "--prompt", "a", "--max-new", "2"]
    ended = run_commands(
        [*train, "--stop-at", "3"],
        ("[python]", damage),
        train,
        generate,
        [*generate, "--step", "2"],
        [*train, "--resume-from", "2", "--stop-at", "4"],
        [*train, "--resume-from", "none", "--stop-at", "1"],
    )
    return Runs(folder, *ended)


def test_a_damaged_checkpoint_is_told_with_the_intact_ones_and_a_command(runs: Runs) -> None:
    assert runs.first.code == 0, runs.first.err
    assert (runs.refused.code, runs.not_generated.code) == (2, 2)
    run, said = runs.folder / "run", runs.refused.err
    assert re.search(rf"error: checkpoint {run}/\S+03 is damaged: the file \S+ is missing", said)
    intact = "Intact checkpoints (their records and file sizes were checked): 1, 2. To use step 2: "
    printed = said.strip().partition(intact)[2]
    assert shlex.split(printed)[:3] == ["meshwright", "train", str(runs.folder / "config.json")]
    assert printed.endswith(f"--run {run} --resume-from 2")
    assert runs.not_generated.err.endswith(f"{intact}the same command with --step 2\n")


def test_another_checkpoint_is_used_as_the_message_says(runs: Runs) -> None:
    assert runs.generated.code == 0, runs.generated.err
    assert "step 2 of " in runs.generated.err
    assert runs.resumed.code == 0, runs.resumed.err
    assert "resuming from step 2" in runs.resumed.out
    assert f"set aside in {runs.folder}/run/checkpoints/set-aside-1: 1 later" in runs.resumed.out
    assert "saved step 4" in runs.resumed.out


def test_a_run_that_starts_anew_keeps_what_was_there(runs: Runs) -> None:
    assert runs.anew.code == 0, runs.anew.err
    folder = runs.folder / "run" / "checkpoints"
    assert Checkpoints(folder).steps() == [1]
    aside = folder / "set-aside-2"
    assert f"set aside in {aside}: 3 later checkpoints (2, 3, 4)" in runs.anew.out
    assert Checkpoints(aside).steps() == [2, 3, 4]
    assert read_metrics(aside).column("loss")[0] == [1, 2, 3, 4]


def test_a_runs_own_record_says_to_resume_from_its_latest(runs: Runs) -> None:
    """Or `train --config run/config.json` would go back, or start anew, again and again."""
    record = json.loads((runs.folder / "run" / "config.json").read_text())
    assert record["resume_from"] == "latest"


def test_a_file_in_the_place_of_a_run_is_told(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    trained, below, generated, served = run_commands(
        ["train", "tiny", "--run", str(file)],
        ["train", "tiny", "--run", str(file / "below")],
        ["generate", str(file), "--prompt", "a"],
        ["serve", str(file)],
    )
    assert trained.err == f"error: --run {str(file)!r} is a file; give a folder\n"
    assert (
        below.err
        == f"error: --run {str(file / 'below')!r} is inside {file}, which is a file; give a folder\n"
    )
    for ended in (generated, served):
        assert ended.err.startswith(f"error: {file} is a file; give the folder of a run")
    assert {ended.code for ended in (trained, below, generated, served)} == {2}
