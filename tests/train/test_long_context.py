"""Rows of a million tokens: the command says them, and the step lowers."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

LENGTH = 1_048_576
PROGRAM = """
import sys
from meshwright.train.cpu import simulate_devices
simulate_devices(64)
import jax, jax.numpy as jnp, json
from meshwright.cli.train import settings
from meshwright.train.setup import prepare
setup = prepare(settings(sys.argv[1:]))
row = jax.ShapeDtypeStruct(
    (1, setup.config.batch, setup.config.seq), jnp.int32, sharding=setup.functions.batch_sharding
)
batch = {name: row for name in ("tokens", "targets", "segments", "positions")}
text = setup.functions.train.lower(setup.target, batch).as_text()
print(json.dumps({
    "mesh": dict(setup.mesh.shape), "attention": setup.attention,
    "theta": setup.model.rope.theta, "permutes": text.count("collective_permute"),
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
        str(long_store), "--rope.theta", "5e7", "--compute.remat", "full", "--compute.mlp-chunk",
        "16384", "--compute.dtype", "bfloat16",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *said], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["mesh"] == {"dp": 1, "fsdp": 1, "tp": 16, "sp": 4}
    assert found["theta"] == 5e7
    assert "ring over 4 parts of a row, in zigzag order" in found["attention"]
    assert found["permutes"] > 0


def test_without_other_positions_the_models_own_length_holds(long_store: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "meshwright.cli.main", "train", "llama-2-7b", "--seq", str(LENGTH), "--mesh",
         "1,-1,1,4", "--cpu-devices", "4", "--batch", "1", "--data", str(long_store)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2
    assert "seq=1048576 is longer than the model allows; 4096 or less would fit" in done.stderr
    assert "--rope.theta" in done.stderr
