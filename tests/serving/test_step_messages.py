"""A plan is the same after it was sent."""

import numpy as np

from meshwright.serving.executor import Results, StepPlan
from meshwright.serving.program_inputs import PromptShape, Shape
from meshwright.serving.sampler import SamplingBatch, SlotState
from meshwright.serving.sampling import Sampling
from meshwright.serving.step_messages import pack, plan_of, results_of, unpack

INTS = np.arange(7, dtype=np.int32)


def test_plans_are_the_same_after_they_were_sent() -> None:
    sampling = Sampling(
        0.1 + 0.2, top_k=5, top_p=0.9, frequency_penalty=0.5, logit_bias=((3, -1.5), (4, 2.0)),
        seed=2**32 - 1,
    )  # fmt: skip
    new_slots = [SlotState(1, sampling, [5, 9], [2]), SlotState(0, Sampling(0.0))]
    choice = SamplingBatch(np.array([[0, 1, 2], [7, 8, 0]], np.int32), 2, new_slots, True)
    shape, whole = Shape(4, 2, 16, first=False, scored=True), PromptShape(2, 64)
    for plan in (
        StepPlan(None, (shape, INTS), choice),
        StepPlan((whole, INTS), None, None),
        StepPlan((whole, INTS), (shape, INTS), choice),
    ):
        data = unpack(pack({"replica": 3, "plan": plan[:3]}))
        assert data["replica"] == 3
        sent = plan_of(data["plan"])
        for one, other in zip(sent[:2], plan[:2], strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert one[0] == other[0]
                np.testing.assert_array_equal(one[1], other[1])
                assert one[1].dtype == np.int32
        if plan.choice is None:
            assert sent.choice is None
            continue
        assert sent.choice is not None
        np.testing.assert_array_equal(sent.choice.where, choice.where)
        assert (sent.choice.variant, sent.choice.masked) == (2, True)
        assert [(*each[:2], *map(list, each[2:])) for each in sent.choice.new_slots] == [
            (*each[:2], *map(list, each[2:])) for each in new_slots
        ]


def test_results_are_the_same_after_they_were_sent() -> None:
    logprobs = (np.array([0.1], np.float32), np.array([3], np.int32))
    for results in (
        Results(np.array([5, 9], np.int32), logprobs, None),
        Results(None, None, logprobs),
    ):
        sent = results_of(unpack(pack(results)))
        for one, other in zip(sent, results, strict=True):
            if other is None:
                assert one is None
            else:
                np.testing.assert_array_equal(one[0], other[0])
                assert len(one) == len(other)
                assert one[0].dtype == other[0].dtype
