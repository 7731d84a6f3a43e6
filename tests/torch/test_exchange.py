"""A run goes from JAX to PyTorch and back: losses and weights are those of one backend."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import meshwright as mw
from meshwright.models import Compute, LossConfig, abstract_arrays, decoder_rules, from_hf_config
from meshwright.models import load_hf as load_into_jax
from meshwright.training import load_pieces, save_pieces
from meshwright.training.state import abstract_state, new_state
from meshwright.training.step import step_functions

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import meshwright.torch as mt  # noqa: E402

STEPS = 30
SIZES = {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2,
    "num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 4,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip


def batch(step: int) -> np.ndarray:
    return np.random.default_rng(step).integers(3, 96, (4, 12))


class InJax:
    """A train state on a mesh of four devices."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.mesh = mw.mesh(
            "dp=1,fsdp=2,tp=2,sp=1", devices=jax.devices()[:4], axis_types="explicit"
        )
        self.arrays = abstract_arrays(config)
        matrices = jax.tree.map(lambda spec: spec.is_matrix, self.arrays)
        self.optimizer = optax.adamw(1e-3, 0.9, 0.95, 1e-6, weight_decay=0.1, mask=matrices)
        self.target = abstract_state(self.arrays, decoder_rules(), self.optimizer, self.mesh)
        self.functions = step_functions(
            config, Compute(decoder_rules()), self.optimizer, lambda _: 1e-3, self.mesh,
            loss=LossConfig(), clip_norm=None,
        )  # fmt: skip
        self.state: Any = None

    def begin(self, folder: Path) -> None:
        kept = jax.tree.map(lambda leaf: leaf.sharding, self.target.params)
        params = load_into_jax(folder, self.config, kept)
        self.state = new_state(self.arrays, self.target, self.optimizer, self.mesh, params=params)

    def train(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            tokens = batch(step).astype(np.int32)
            targets = np.full_like(tokens, -1)
            targets[:, :-1] = tokens[:, 1:]
            fields = {
                "tokens": tokens, "targets": targets, "segments": np.ones_like(tokens),
                "positions": np.broadcast_to(np.arange(12, dtype=np.int32), tokens.shape),
            }  # fmt: skip
            arrays = {name: value[None].copy() for name, value in fields.items()}
            put = jax.device_put(arrays, self.functions.batch_sharding)
            self.state, report = self.functions.train(self.state, put)
            losses.append(float(report["loss"]))
        return losses


class InTorch:
    """The same run in PyTorch."""

    def __init__(self, config: Any) -> None:
        with torch.device("meta"):
            self.model = transformers.LlamaForCausalLM(config)
        mt.parallelize(self.model, mt.mesh("dp=1,tp=1", device="cpu"))
        matrices = [p for p in self.model.parameters() if p.ndim == 2]
        vectors = [p for p in self.model.parameters() if p.ndim == 1]
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-6)

    def train(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            tokens = torch.from_numpy(batch(step))
            loss = self.model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


@pytest.mark.filterwarnings("ignore")  # of torch, about its own parts
@pytest.mark.parametrize(
    "tied", [pytest.param(False, marks=pytest.mark.slow), True], ids=["untied", "tied"]
)
def test_a_run_goes_from_jax_to_pytorch_and_back(tmp_path: Path, tied: bool) -> None:
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied)
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(config)
    plain.save_pretrained(tmp_path / "first")
    own = from_hf_config(tmp_path / "first")
    try:
        alone = InTorch(config)
        mt.load_hf(alone.model, tmp_path / "first")
        wanted = alone.train(range(STEPS))
        weight = alone.model.model.layers[1].mlp.up_proj.weight.full_tensor().detach().numpy()

        in_jax = InJax(own)
        in_jax.begin(tmp_path / "first")
        found = in_jax.train(range(10))
        assert save_pieces(tmp_path / "run", in_jax.state, own, {"data": {"position": 40}}) == 10

        in_torch = InTorch(config)
        checkpoints = mt.Checkpoints(tmp_path / "run")
        meta = checkpoints.restore(10, in_torch.model, in_torch.optimizer)
        assert meta == {"data": {"position": 40}}
        found += in_torch.train(range(10, 20))
        checkpoints.save(20, in_torch.model, in_torch.optimizer, {"data": {"position": 80}})
    finally:
        torch.distributed.destroy_process_group()

    again = InJax(own)
    again.state, meta = load_pieces(tmp_path / "run", 20, again.target, own)
    assert meta == {"data": {"position": 80}}
    assert int(again.state.step) == 20
    found += again.train(range(20, 30))
    np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=0)
    trained = np.asarray(again.state.params["layers"]["mlp"]["up"][1])
    np.testing.assert_allclose(trained, weight.T, atol=1e-4, rtol=0)
