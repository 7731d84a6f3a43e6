"""The work of a causal ring, counted: even in zig-zag order, as uneven as it can be in the other."""

import pytest

from ring_balance import unevenness, visits, wrong


@pytest.mark.parametrize("ways", [2, 4, 8])
def test_in_zigzag_order_every_device_does_the_same_at_every_ring_step_and_nothing_in_vain(
    ways: int,
) -> None:
    steps = visits("zigzag", ways)
    assert wrong("zigzag", steps) == []
    assert [step[0].blocks for step in steps] == [3] + [2] * (ways - 1)
    everything = [pair for step in steps for visit in step for pair in visit.computed.elements()]
    length = len({query for query, _ in everything})
    assert len(everything) == length * (length + 1) // 2


def test_in_contiguous_order_the_last_of_eight_devices_does_eight_times_the_work_of_the_first() -> (
    None
):
    steps = visits("contiguous", 8)
    assert [sum(step[device].blocks for step in steps) for device in range(8)] == [*range(1, 9)]
    assert unevenness(visit.blocks for visit in steps[7]) == 8
    for step in steps:
        for visit in step:
            assert not visit.useful - visit.computed
    assert len(wrong("contiguous", steps)) == 14  # all but the step at home: uneven, and in vain
