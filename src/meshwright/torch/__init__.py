"""The same meshes and rules in PyTorch: FSDP2 and tensor parallelism from one layout.

    mesh = mw.torch.mesh("dp=-1,tp=3")
    model = mw.torch.parallelize(model, mesh)
    print(mw.torch.explain(model_on_meta, "dp=2,tp=3"))

It needs the extra `torch`; jax need not be installed.
"""

from meshwright.errors import not_installed

try:
    import torch as _torch  # noqa: F401
except ImportError:
    raise ImportError(
        f"meshwright.torch needs PyTorch 2.13 or newer: {not_installed('torch')}"
    ) from None

from meshwright.torch.audit import assert_collectives, audit, expected_of_model
from meshwright.torch.checkpoint import Checkpoints
from meshwright.torch.explanation import TorchExplanation, explain
from meshwright.torch.load import initialize, load_hf
from meshwright.torch.loss import cross_entropy
from meshwright.torch.mesh import data_shard, mesh
from meshwright.torch.parallelize import parallelize
from meshwright.torch.save import save_hf

__all__ = [
    "Checkpoints", "TorchExplanation", "assert_collectives", "audit", "cross_entropy", "data_shard",
    "expected_of_model", "explain", "initialize", "load_hf", "mesh", "parallelize", "save_hf",
]  # fmt: skip
