"""Which strategy splits an attention, why, and what is said where one cannot."""

import dataclasses
import logging
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from meshwright.errors import MeshwrightError
from meshwright.ops.attention import (
    STRATEGIES,
    Mask,
    Split,
    choose_strategy,
    explain_strategy,
    sequence_order,
)
from meshwright.ops.attention.strategy import refusal

LONG = Split(ways=8, length=2**20, heads=32, kv_heads=8, head_dim=128, mask=Mask())


def changed(**what: Any) -> Split:
    return dataclasses.replace(LONG, **what)


# ---- auto


@pytest.mark.parametrize(
    ("split", "chosen", "why"),
    [
        (LONG, "ring", "a ring step has 262,144 FLOPs per byte sent, and the machine needs 5,000"),
        # a ring step has length / ways / 2 for each byte of ungrouped heads
        (changed(length=80_000, kv_heads=32), "ring", "a ring step has 5,000 FLOPs"),
        (changed(length=79_984, kv_heads=32), "ulysses", "9998 tokens per device are too few"),
        (changed(length=79_984, kv_heads=32, flops_per_byte=2000.0), "ring", "needs 2,000"),
        (
            changed(length=8192),
            "ulysses",
            "an all-to-all of heads sends less than keys to 8 devices",
        ),
        # 4 devices: heads cost (32 + 8) / 4 of a part's tokens, keys 8
        (changed(length=8192, ways=4), "allgather", "keys of 8 heads are small"),
        (changed(length=8192, ways=4, kv_heads=32), "ulysses", "an all-to-all of heads sends less"),
        (changed(length=1024, kv_heads=1), "allgather", "keys of 1 head are small"),
        (changed(length=8192, mask=Mask(window=2000)), "ring", "needs only 2 ring exchanges"),
        (changed(length=8192, mask=Mask(window=100)), "ring", "needs only 1 ring exchange"),
        (changed(mask=Mask(block=1000)), "ring", "a ring step has 262,144 FLOPs"),
        (
            changed(length=8 * 4097, heads=8, kv_heads=8),
            "ulysses",
            "ring and allgather are not possible: seq=",
        ),
    ],
)
def test_auto_takes_what_costs_least_and_says_why(split: Split, chosen: str, why: str) -> None:
    found, reason = explain_strategy(split)
    assert found == chosen == choose_strategy(split, "auto")
    assert why in reason


def test_autos_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    explain_strategy.cache_clear()
    with caplog.at_level(logging.INFO, logger="meshwright"):
        choose_strategy(LONG)
        choose_strategy(LONG)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("context parallelism: ring (a ring step has")


# ---- refusals

REFUSALS: dict[str, tuple[Split, str, str]] = {
    "seq, for two chunks": (
        changed(length=1000, ways=16, mask=Mask()), "ring",
        r"seq=1000 is not divisible by 32 \(two chunks per device, to balance a causal mask\); "
        r"seq=992 or 1024 would fit$",
    ),
    "seq, in order": (
        changed(length=1000, ways=16, mask=Mask(window=64)), "ring",
        r"seq=1000 is not divisible by 16; seq=992 or 1008 would fit$",
    ),
    "seq, ulysses": (
        changed(length=1001, mask=Mask(causal=False)), "ulysses",
        r"seq=1001 is not divisible by 8; seq=1000 or 1008 would fit$",
    ),
    "seq shorter than the ring": (
        changed(length=5), "allgather", r"seq=5 is not divisible by 16 .*; seq=16 would fit$"
    ),
    "seq that ulysses can": (
        changed(length=8 * 125), "ring", r"seq=992 or 1008 would fit; ulysses would work$"
    ),
    "heads": (
        changed(heads=36, kv_heads=36), "ulysses",
        r"splits the heads over sp=8 devices, and 36 heads on a device are not divisible by 8; "
        r"ring and allgather would work$",
    ),
    "key heads": (
        changed(kv_heads=4), "ulysses",
        r"4 kv_heads on a device are not divisible by 8; ring and allgather would work$",
    ),
    "queries behind their keys": (
        changed(mask=Mask(offset=7)), "ring",
        r"it has no mask with an offset of 7; ulysses would work$",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_what_a_strategy_cannot_do_is_said_with_what_can(name: str) -> None:
    split, strategy, words = REFUSALS[name]
    with pytest.raises(MeshwrightError, match=words) as error:
        choose_strategy(split, strategy)
    assert str(error.value).startswith(f"context_parallel={strategy!r} is not possible: ")


def test_where_none_can_every_reason_is_said() -> None:
    with pytest.raises(MeshwrightError) as error:
        choose_strategy(changed(length=1001, kv_heads=4), "auto")
    message = str(error.value)
    assert message.startswith("context parallelism over sp=8 is not possible: ring: seq=1001 is")
    assert "; allgather: seq=1001 is not divisible by 16" in message
    assert "; ulysses: it splits the heads over sp=8 devices, and 4 kv_heads" in message


def test_a_name_that_is_not_a_strategy_is_an_error() -> None:
    with pytest.raises(
        MeshwrightError, match=r"'ulises' is not a strategy; did you mean 'ulysses'"
    ):
        choose_strategy(LONG, "ulises")
    with pytest.raises(MeshwrightError, match="known: auto, ring, allgather, ulysses"):
        choose_strategy(LONG, "x")


splits = st.builds(
    Split,
    ways=st.sampled_from([1, 2, 3, 4, 8]),
    length=st.integers(1, 400),
    heads=st.sampled_from([4, 8, 24]),
    kv_heads=st.sampled_from([1, 2, 4]),
    head_dim=st.just(8),
    mask=st.one_of(
        st.sampled_from([Mask(), Mask(causal=False)]),
        st.builds(lambda n: Mask(window=n), st.integers(1, 400)),
        st.builds(lambda n: Mask(block=n), st.integers(1, 20)),
    ),
)


@given(split=splits, strategy=st.sampled_from(STRATEGIES))
def test_lengths_that_are_said_to_fit_do(split: Split, strategy: str) -> None:
    why = refusal(split, strategy)
    assume(why is not None and "would fit" in why)
    assert why is not None
    numbers = why.split("seq=")[-1].removesuffix(" would fit").split(" or ")
    for number in numbers:
        assert refusal(dataclasses.replace(split, length=int(number)), strategy) is None


@given(split=splits)
def test_what_auto_takes_can_serve(split: Split) -> None:
    if all(refusal(split, name) for name in STRATEGIES):
        with pytest.raises(
            MeshwrightError, match=r"context parallelism over sp=.* is not possible"
        ):
            explain_strategy(split)
    else:
        assert refusal(split, explain_strategy(split)[0]) is None


# ---- the order of sequences


@pytest.mark.parametrize(
    ("split", "strategy", "order"),
    [
        (LONG, "ring", "zigzag"),
        (LONG, "allgather", "zigzag"),
        (LONG, "ulysses", "contiguous"),
        (changed(ways=1), "ring", "contiguous"),
        (changed(mask=Mask(causal=False)), "ring", "contiguous"),
        (changed(mask=Mask(window=4096)), "ring", "contiguous"),
        (changed(length=1024, mask=Mask(block=64)), "ring", "zigzag"),
        (changed(length=1024, mask=Mask(block=128)), "ring", "contiguous"),
        (changed(length=1024, mask=Mask(block=300)), "ring", "contiguous"),
    ],
)
def test_rows_lie_in_zigzag_where_that_balances_the_mask(
    split: Split, strategy: str, order: str
) -> None:
    assert sequence_order(split, strategy) == order
