"""A run whose folder is deleted or replaced ends, and changes nothing there."""

import json
from pathlib import Path

from tests.processes import run_commands
from tests.training.test_loop import MODEL

SETTINGS = ["--batch", "4", "--seq", "32", "--steps", "12", "--eval.sequences", "4"]
SETTINGS += ["--eval.every", "5", "--checkpoint.every", "2", "--checkpoint.keep-last", "1"]

# what happens to the folder while a run evaluates
CHANGES = """
import shutil
from meshwright.training.jax_backend import JaxBackend

def evaluate(self):
    run = self.config.run
    self.checkpoints.wait()
    if run.name == "replaced":
        shutil.copytree(run, run.with_name("other"))
    shutil.rmtree(run)
    if run.name == "replaced":
        shutil.copytree(run.with_name("other"), run)
    return 1.0, 1

JaxBackend.evaluate = evaluate
"""


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_run_leaves_alone_what_replaced_its_folder_and_does_not_make_it_again(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    train = ["train", str(tmp_path / "config.json"), *SETTINGS, "--run"]
    deleted, replaced = tmp_path / "deleted", tmp_path / "replaced"
    for ended in run_commands(
        ("[python]", CHANGES), [*train, str(deleted)], [*train, str(replaced)]
    ):
        assert ended.code == 2, ended.out + ended.err
        assert ended.err.startswith("error: the run's folder ")
        assert ended.err.count("\n") == 1
        assert "warning" not in ended.out
        assert "step 6" not in ended.out, "it ended at the next write"
    assert not deleted.exists()
    assert contents(replaced) == contents(tmp_path / "other")
    assert [path.name for path in (replaced / "checkpoints").iterdir()] == ["step-00000004"]
