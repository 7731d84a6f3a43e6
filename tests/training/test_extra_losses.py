"""Extra losses and metrics that a family's loss returns: added, reduced and written by name."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.training.test_step import by_hand, close, descend, global_norm
from tests.training.toy import Setting, packed_batch, parts

from meshwright.errors import MeshwrightError
from meshwright.models import ExtraLoss, LossSums, Metric, family_of
from meshwright.training import step as train_step
from meshwright.training import train
from meshwright.training.config import EvalConfig, TrainConfig
from meshwright.training.run import read_metrics

WEIGHT = 0.25


def documents(segments: Any) -> Any:
    """Of each sequence the number of its documents; a metric counted in sequences, not targets."""
    return segments.max(-1)


def family_with_extras(config: Any, metric: str = "documents") -> Any:
    """The family, with a penalty for each target: the squares of the last norm."""
    family = family_of(config)

    def loss(params: Any, batch: Any, *rest: Any) -> LossSums:
        sums = family.loss(params, batch, *rest)
        penalty = sums.count.astype(jnp.float32) * jnp.sum(params["norm"] ** 2)
        many = jnp.sum(documents(batch["segments"])).astype(jnp.float32)
        return dataclasses.replace(
            sums,
            extra={"penalty": ExtraLoss(penalty, WEIGHT)},
            metrics={**sums.metrics, metric: Metric(many, jnp.int32(len(batch["tokens"])))},
        )

    return dataclasses.replace(family, loss=loss)


@pytest.fixture
def extras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_step, "family_of", family_with_extras)


@pytest.mark.parametrize("micro_batches", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_an_extra_loss_is_differentiated_with_its_weight_and_metrics_have_their_own_counts(
    extras: None, micro_batches: int
) -> None:
    total, entropy, params, gradient = by_hand()
    expected = gradient | {"norm": gradient["norm"] + 2 * WEIGHT * params["norm"]}
    batch = {n: x.reshape(micro_batches, -1, x.shape[-1]) for n, x in packed_batch(0).items()}
    report, before, after = descend(Setting("dp=2,fsdp=2,tp=2,sp=1"), None, batch)
    squares = float((params["norm"] ** 2).sum())
    assert float(report["penalty"]) == pytest.approx(squares, rel=1e-5)
    assert float(report["total_loss"]) == pytest.approx(total + WEIGHT * squares, rel=1e-6)
    assert float(report["loss"]) == pytest.approx(entropy, rel=1e-6)
    assert float(report["documents"]) == pytest.approx(documents(batch["segments"]).mean())
    assert float(report["gradient_norm"]) == pytest.approx(global_norm(expected), rel=1e-5)
    close(jax.tree.map(lambda a, b: a - b, before, after), expected, 2e-4)


def test_evaluation_has_the_sum_and_count_of_each(extras: None) -> None:
    run, batch = parts(Setting("dp=1,fsdp=2,tp=1,sp=1")), packed_batch(0)
    found = run.functions.evaluate(run.new_state().params, run.put(batch))
    targets = (batch["targets"] >= 0).sum()
    assert int(found["loss"].count) == int(found["penalty"].count) == targets
    assert int(found["documents"].count) == np.prod(batch["tokens"].shape[:2])
    assert int(found["documents"].sum) == documents(batch["segments"]).sum()


def test_a_metric_cannot_have_the_name_of_what_a_step_reports_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named = lambda config: family_with_extras(config, "tokens")  # noqa: E731
    monkeypatch.setattr(train_step, "family_of", named)
    run = parts(Setting())
    with pytest.raises(MeshwrightError, match=r"metric named 'tokens'.*another name"):
        run.functions.train.lower(run.target, run.put(packed_batch(0)))


@pytest.mark.slow
def test_a_run_writes_extras_under_their_names(extras: None, tmp_path: Path) -> None:
    small = ("layers=1", "embed=32", "heads=2", "kv_heads=2", "mlp=32")
    config = TrainConfig(
        "tiny", tmp_path, mesh="fsdp=16", batch=16, seq=16, steps=2, override=small,
        eval=EvalConfig(sequences=16),
    )  # fmt: skip
    train(config)
    metrics = read_metrics(tmp_path)
    steps, penalties = metrics.column("penalty")
    assert steps == [1, 2]
    assert penalties[0] == pytest.approx(32)  # norms begin as ones
    assert len(metrics.column("documents")[0]) == 2
    for name in ("eval_loss", "eval_penalty", "eval_documents"):
        assert metrics.column(name)[0] == [2]
