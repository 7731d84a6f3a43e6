"""torch.compile of blocks that are split over two processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.patience import PATIENCE_S

pytest.importorskip("torch")
pytest.importorskip("transformers")

HERE = Path(__file__).parent
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
import torch.distributed as dist
from models import batches, loss_of, tiny
import meshwright.torch as mt
from meshwright.torch.lora import add_factors
torch.set_num_threads(1)
mesh = mt.mesh("dp=1,tp=2", device="cpu")
plain, model = tiny("llama"), tiny("llama")
if sys.argv[2] == "lora":
    for one in (plain, model):
        layers = [path for path, _ in one.named_modules() if path.endswith("_proj")]
        add_factors(one, layers, 4, 1.5, torch.float32)
        torch.manual_seed(1)
        for param in one.parameters():
            if param.requires_grad:
                torch.nn.init.normal_(param, std=0.1)
mt.parallelize(model, mesh, compile=True, sequence_parallel=True)
batch = batches(1, 2)[0]
for one in (plain, model):
    loss_of(one, batch).backward()
for one, other in zip(plain.parameters(), model.parameters(), strict=True):
    assert one.requires_grad == other.requires_grad == (other.grad is not None)
    if one.grad is not None:
        torch.testing.assert_close(other.grad.full_tensor(), one.grad, atol=1e-6, rtol=1e-4)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["all", "lora"])
def test_compiled_blocks_have_the_gradients_of_one_process(tmp_path: Path, trained: str) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    env = os.environ | {"PYTHONPATH": str(HERE.parents[1] / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(tmp_path / "program.py"), str(HERE), trained],
        env=env, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
