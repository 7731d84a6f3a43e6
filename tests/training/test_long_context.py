"""Sequences of a million tokens: the command says them, and the step lowers."""

import json
import re
import subprocess
import sys
import typing
from pathlib import Path

import numpy as np
import pytest
from tests.patience import PATIENCE_S

from meshwright.errors import MeshwrightError
from meshwright.models import override, preset
from meshwright.ops import rope
from meshwright.ops.attention import KERNELS, STRATEGIES
from meshwright.training.config import ComputeConfig, TrainConfig

LENGTH = 1_048_576
PROGRAM = """
import sys
from meshwright.launch.cpu import simulate_devices
simulate_devices(64)
import json
from meshwright.cli.train import settings
from meshwright.training.prepare import prepare
step = prepare(settings(sys.argv[1:])).step
text = step.lower().as_text()
print(json.dumps({
    "mesh": dict(step.mesh.shape), "attention": step.attention,
    "theta": step.model.rope.theta, "permutes": text.count("collective_permute"),
}))
"""


@pytest.fixture(scope="module")
def long_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    text = rng.integers(97, 123, LENGTH + 4096, dtype=np.uint8).tobytes()
    (folder / "long.txt").write_bytes(text)
    store = folder / "long.store"
    subprocess.run(
        [sys.executable, "-m", "meshwright.cli.main", "data", "pack", str(folder / "long.txt"),
         "--out", str(store)],
        check=True, capture_output=True,
    )  # fmt: skip
    return store


def test_a_million_tokens_over_lwms_mesh_is_said_and_lowers(long_store: Path) -> None:
    said = [
        "llama-2-7b", "--seq", str(LENGTH), "--mesh", "1,-1,16,4", "--batch", "1", "--data",
        str(long_store), "--override", "rope.theta=5e7", "--compute.remat", "full", "--compute.mlp-chunk",
        "16384", "--compute.dtype", "bfloat16",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *said], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["mesh"] == {"dp": 1, "fsdp": 1, "tp": 16, "sp": 4}
    assert found["theta"] == 5e7
    assert "ring over 4 parts of a sequence, in zigzag order" in found["attention"]
    # tokens, targets, segments and positions are put in order by two each; the rest is the ring's
    assert found["permutes"] > 4 * 2


def test_without_other_positions_the_models_own_length_holds(long_store: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "meshwright.cli.main", "train", "llama-2-7b", "--seq", str(LENGTH), "--mesh",
         "1,-1,1,4", "--cpu-devices", "4", "--batch", "1", "--data", str(long_store)],
        capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 2
    assert "seq=1048576 is longer than the model allows; 4096 or less would fit" in done.stderr
    assert "--override rope.scaling=linear rope.factor=256" in done.stderr


def test_positions_can_be_set_for_longer_sequences() -> None:
    own = preset("llama-2-7b")
    assert override(own, (), 8192) == own
    longer = override(own, ("rope.theta=1e6",), 32768)
    assert (longer.rope, longer.max_seq) == (rope.Rope(1e6), 32768)
    scaled = {
        "linear": rope.LinearScaling(8.0),
        "yarn": rope.YarnScaling(8.0, own.max_seq),
        "llama3": rope.Llama3Scaling(8.0, 1.0, 4.0, own.max_seq),
    }
    for name, scaling in scaled.items():
        found = override(own, (f"rope.scaling={name}", "rope.factor=8"), 32768)
        assert (found.rope, found.max_seq) == (rope.Rope(own.rope.theta, scaling), 32768)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("rope.theta=0.5", "rope.theta=0.5 must be above 1"),
        ("rope.theta=nan", "rope.theta=nan must be above 1"),
        ("rope.theta=big", "rope.theta=big must be a number"),
        ("rope.factor=0.5", "rope.factor=0.5 must be at least 1"),
        ("rope.factor=8", "rope.factor=8 belongs to a scaling; add rope.scaling="),
        ("rope.scaling=yarn", "rope.scaling=yarn needs rope.factor: how many times"),
        ("rope.scaling=yarm", "is not a scaling; did you mean 'yarn'?"),
        ("rope.theat=5", "'rope.theat' is not a field of the model; did you mean 'rope.theta'?"),
        ("layers=many", "layers=many must be a whole number"),
        ("tied_embeddings=yes", "tied_embeddings=yes must be true or false"),
        ("layers=0", "layers=0 of a model must be a whole number from 1"),
        ("layers", "'layers' is not NAME=VALUE, such as rope.theta=5e7"),
    ],
)
def test_changes_to_the_model_that_mean_nothing_are_refused(said: str, words: str) -> None:
    with pytest.raises(MeshwrightError, match=re.escape(words)):
        override(preset("llama-2-7b"), (said,), 4096)


def test_sizes_of_the_model_can_be_changed() -> None:
    smaller = override(preset("llama-3.2-1b"), ("layers=2", "tied_embeddings=false"), 4096)
    assert (smaller.layers, smaller.tied_embeddings, smaller.rope.theta) == (2, False, 500000.0)


def test_the_flags_name_every_kernel_and_strategy() -> None:
    kernels = typing.get_type_hints(ComputeConfig)["attention"]
    assert set(typing.get_args(kernels)) == {"auto", *KERNELS}
    strategies = typing.get_type_hints(TrainConfig)["context_parallel"]
    assert set(typing.get_args(strategies)) == {"auto", *STRATEGIES}


def test_a_length_that_does_not_divide_names_only_lengths_that_do(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "meshwright.cli.main", "train", "tiny", "--mesh", "fsdp=2,sp=4",
         "--cpu-devices", "8", "--context-parallel", "ring", "--seq", "261", "--batch", "2",
         "--run", str(tmp_path / "run")],
        capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 2
    assert "seq=256 or 264 would fit" in done.stderr
