"""A call with arguments that it does not take is answered with a call that works."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.checkpoint import Checkpoints
from meshwright.errors import explained

_TRAIN = "Write mw.train(mw.TrainConfig('tiny', steps=200))"
_CALLS: list[tuple[Callable[[], Any], str]] = [
    (lambda: mw.train("tiny"), f"train: config='tiny' must be TrainConfig. {_TRAIN}"),
    (lambda: mw.train("tiny", steps=3), f"config=TrainConfig(steps=…). {_TRAIN}"),
    (lambda: mw.train(), f"train is missing a required argument: 'config'. {_TRAIN}"),
    (lambda: mw.TrainConfig(step=3), "TrainConfig has no 'step'; did you mean 'steps'? Write mw.T"),
    (lambda: mw.TrainConfig("tiny", learning_rate=3), "OptimizerConfig(learning_rate=…)"),
    (lambda: mw.TrainConfig("tiny", steps="3"), "steps='3' must be int"),
    (lambda: mw.TrainConfig("tiny", run="a", steps="3"), "steps='3' must be int"),
    (lambda: mw.TrainConfig("tiny", optimizer={}), "optimizer={} must be OptimizerConfig"),
    (lambda: mw.TrainConfig(), "missing a required argument: 'model'"),
    (lambda: dataclasses.replace(mw.TrainConfig("tiny"), stesp=3), "did you mean 'steps'?"),
    (lambda: mw.OptimizerConfig(lr=3), "has no 'lr'; known: name, learning_rate"),
    (lambda: mw.LoraConfig(ranks=3), "did you mean 'rank'?"),
    (lambda: mw.EngineConfig(max_len=3), "did you mean 'max_length'?"),
    (lambda: mw.ServeConfig("x", prt=3), "did you mean 'port'?"),
    (lambda: mw.serve("x"), "config='x' must be ServeConfig. Write mw.serve(mw.ServeConfig("),
    (lambda: mw.load(None), "load: model=None must be str. Write mw.load('runs/first')"),
    (lambda: mw.export("x"), "Write mw.export('runs/first', 'exported')"),
    (lambda: mw.plan("tiny"), "plan is missing a required argument: 'on'. Write mw.plan("),
    (lambda: mw.prove("tiny", on="cpu:8"), "prove takes a TrainConfig or a function"),
    (lambda: mw.prove("tiny"), "Write mw.prove(mw.TrainConfig("),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), _CALLS)
def test_a_wrong_call_is_answered_with_one_that_works(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(mw.MeshwrightError) as said:
        call()
    assert words in str(said.value)


def test_restore_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(mw.MeshwrightError, match=r"Write checkpoints\.restore\(checkpoints\.lat"):
        Checkpoints(tmp_path).restore(None)


def test_a_mistake_inside_a_function_is_not_the_callers() -> None:
    @explained("half(2)")
    def half(
        number: int,
        named: Collection[str] = (),
        words: Sequence[str] | None = None,
        sizes: Mapping[str, int] | None = None,
        call: Callable[[int], int] = abs,
        pairs: tuple[tuple[int, int], ...] = (),
    ) -> Any:
        return number.halves  # type: ignore[attr-defined]

    with pytest.raises(AttributeError, match="halves"):
        half(2)
    with pytest.raises(AttributeError, match="halves"):
        half(2, named={"steps"}, words=["a"], sizes={"a": 1}, call=len, pairs=((1, 2),))
    with pytest.raises(mw.MeshwrightError, match="half: named=3 must be Collection"):
        half(2, named=3)
    with pytest.raises(mw.MeshwrightError, match=r"number='2' must be int. Write half\(2\)"):
        half("2")


def test_a_mistake_inside_training_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise TypeError("inside")

    monkeypatch.setattr("meshwright.api.train_in_jax", broken)
    with pytest.raises(TypeError, match="inside"):
        mw.train(mw.TrainConfig("tiny"), words=["tiny", "--steps=3"], named={"steps"})
