"""A small model trained on sequences split over sp finds needles, and only through other devices' keys."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.patience import PATIENCE_S

from meshwright.data import Needles, needle_sequences
from meshwright.evaluate.needle import retrieve
from meshwright.models import decoder_rules
from meshwright.serve.load import generation_mesh, load, look_into

SEQ = 128
MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 320,
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "tie_word_embeddings": False, "rope_theta": 1000.0,
    "attention_bias": False,
}  # fmt: skip


def meshwright(*words: object) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "meshwright.cli.main", *map(str, words)],
        capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_model_trained_over_sp_finds_needles_and_not_where_parts_cannot_see_each_other(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    meshwright("data", "needle", tmp_path / "needles", "--sequences", 8000, "--seq", SEQ)
    meshwright(
        "train", tmp_path / "config.json", "--data", tmp_path / "needles", "--seq", SEQ,
        "--mesh", "sp=4", "--cpu-devices", 4, "--context-parallel", "ring", "--steps", 500,
        "--batch", 16, "--optimizer.name", "muon", "--optimizer.learning-rate", 1e-2,
        "--optimizer.schedule", "wsd", "--optimizer.warmup-steps", 20,
        "--optimizer.weight-decay", 0, "--run", tmp_path / "run",
    )  # fmt: skip
    model = load(
        look_into(str(tmp_path / "run")), generation_mesh("sp=4"), rules=decoder_rules(sp=True)
    )
    sequences = needle_sequences(Needles(), sequences=64, seq=SEQ, fresh=True)
    found = retrieve(model, sequences, context_parallel="ring")
    assert found.share >= 0.95
    # the same weights, where each of the four parts of a sequence sees its own keys only
    parts = np.broadcast_to(np.arange(SEQ, dtype=np.int32) * 4 // SEQ + 1, sequences.tokens.shape)
    broken = retrieve(
        model, sequences, context_parallel="ring", segments=np.ascontiguousarray(parts)
    )
    assert broken.share < 0.5
    elsewhere = sequences.told // (SEQ // 4) != sequences.asked // (SEQ // 4)
    assert elsewhere.mean() > 0.5
    assert broken.right[elsewhere].mean() < 0.2 < 0.95 <= found.right[elsewhere].mean()
