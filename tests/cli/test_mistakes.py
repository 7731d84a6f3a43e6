"""A mistaken command line is one sentence that says what to do, and status 2."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.cli.commands import run


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("train", "MODEL is missing; write meshwright train MODEL"),
        ("train tiny --run=", "--run: the path is empty"),
        ("train tiny --stepz 3 --bathc 4", "did you mean '--steps'?; meshwright train has no option --bathc"),
        ("train tiny --port 3", "has no option --port; meshwright train --help lists its options"),
        ("train tiny -steps 3", "has no option -steps; did you mean '--steps'?"),
        ("train tiny --batch 1e99", "must fit in 64 bits"),
        ("train tiny --optimizer.learning-rate fast", "'fast' is not a number"),
        ("train tiny --log.tensorboard yes", "--log.tensorboard takes no value; write --log.tensorboard"),
        ("serve m --access-log=no", "--access-log takes no value; write --no-access-log"),
        ("board --port web", "'web' is not a port: a number from 1 to 65535, or 0 for a free one"),
        ("audit tiny --mesh dp=16 --batch 16 --seq 16 --compute.experts ring", "compute.experts=ring: tiny has no experts"),
        ("plan tiny", "add --on v5p:4x4x4 (or h100:8, here …); meshwright plan"),
        ("plan tiny --serve --seq 64", "add --on v5p:4x4x4 (or h100:8, here …) and --batch 256;"),
        ("plan tiny --on --batch 8", "--on needs a value"),
        ("plan tiny --on cpu:8 --json=yes", "--json takes no value; write it alone"),
        ("plan {store} --on cpu:8", "the folder is a token store, which --data takes; give a model"),
        ("generate {store} --prompt a", "the folder is a token store, which --data takes; give a model"),
        ("generate {folder} --prompt a", "the folder holds runs; give one, such as {folder}/run"),
        ("generate {store}/tokens.bin --prompt a", "is a file; give the folder of a run"),
        ("data info {folder}/run", "is a model or a run (it has a config.json), not a token store"),
        ("show --mesh dp=1 --on cpu:1 --html {store}", "Is a directory; give a place where you can write"),
        ("prove --plan {folder}/no.json", "meshwright plan … --json > FILE writes one"),
        ("audit --mesh dp=1 --text {folder}", "Is a directory; give a file with the text of a program"),
        ("train --config {folder}/model.json", "is the config of a model, not of a run; give the model"),
        ("train --config {folder}/no.json", "No such file or directory; give a run's config.json"),
        ("plan --on h100:8 --seq 4k", "add a model, such as llama-3.1-8b; meshwright plan"),
        ("plan tiny --on h100:8 --requests 20 --prompt 1000", "add --serve and --output 200"),
        ("plan tiny --requests 20", "add --on v5p:4x4x4 (or h100:8, here …) and --serve and --prompt 1000"),
        ("plan tiny --on cpu:8 --batch 8 --seq 64 --loss.router-z 0.1", "loss.router_z=0.1: tiny has no experts"),
        ("plan tiny --on cpu:8 --batch 8 --seq 64 --loss.load-balance 1", "loss.load_balance=1.0: tiny has"),
        ("plan tiny --on cpu:8 --batch 8 --seq 64 --like nemo", "'nemo' is not a stack"),
        ("prove --on cpu:8", "MODEL is missing; write meshwright prove MODEL"),
        ("prove tiny --serve", "add --on h100:8 and --batch 32 and --seq 2048"),
        ("audit --mesh fsdp=8", "MODEL is missing; write meshwright audit MODEL"),
        ("serve tiny", "tiny is a preset, which has sizes and no weights"),
        ("serve x --port abc", "--port: 'abc' is not a port"),
        ("generate tiny --prompt x --max-new 1.5", "--max-new: '1.5' is not a whole number"),
        ("export tiny", "OUT is missing; write meshwright export RUN OUT"),
        ("data pack", "FILES and --out FOLDER are missing"),
        ("doctor now", "'now' is too much: write meshwright doctor and options"),
        ("board nowhere", "'nowhere' is not a folder; give one that holds runs"),
        ("models zzz", "no preset has 'zzz' in its name"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(
    words: str, says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """In a folder with a run and a token store."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text("{}")
    (tmp_path / "model.json").write_text('{"model_type": "llama"}')
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "tokens.bin").write_bytes(b"")
    words, says = (text.format(folder=tmp_path, store=tmp_path / "store") for text in (words, says))
    with pytest.raises(SystemExit) as ended:
        run(words.split())
    assert ended.value.code == 2
    *_, said = capsys.readouterr().err.strip().splitlines()
    assert said.startswith("error: ")
    assert says in said


COMMAND = [sys.executable, "-m", "meshwright.cli.main", "machines"]


def test_a_reader_that_went_away_has_enough() -> None:
    """As in `meshwright machines | head -1`, also under `set -o pipefail`."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(COMMAND, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_output_may_be_closed() -> None:
    done = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *COMMAND], stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("words", "rank", "processes", "lines"),
    [
        ("train tiny --stepz 3", "0", "4", 1),
        ("train tiny --stepz 3", "3", "4", 0),
        ("serve m --prt 3", "3", "4", 0),
        ("train tiny --stepz 3", "3", "1", 1),  # it is alone: nobody else says it
        ("doctr", "3", "4", 1),
        ("plan tiny --onn cpu:8", "3", "4", 1),
    ],
)
def test_of_torchruns_processes_one_names_a_mistake(
    words: str, rank: str, processes: str, lines: int,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    for name in ("jax", "torch"):  # as in a process that has imported neither
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(SystemExit) as ended:
        run(words.split())
    assert ended.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == lines
