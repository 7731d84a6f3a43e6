"""Whole steps with each attention kernel: places of documents, and the 3% rule."""

import jax.numpy as jnp
import numpy as np

from attention_steps import first_keys, places, table


def test_places_are_lengths_and_offsets_of_documents() -> None:
    segments = jnp.asarray([[1, 1, 1, 2, 2, 3, 3, 3], [5] * 8, [1, 2, 1, 2, 2, 2, 2, 2]])
    lengths, offsets = places(segments, 4)
    # a document whose number was used before is another one
    np.testing.assert_array_equal(lengths, [[3, 2, 3, -1], [8, -1, -1, -1], [1, 1, 1, 5]])
    np.testing.assert_array_equal(
        offsets, [[0, 3, 5, -1, -1], [0, -1, -1, -1, -1], [0, 1, 2, 3, -1]]
    )


def test_first_keys_are_the_starts_of_documents() -> None:
    segments = jnp.asarray([[1, 1, 1, 2, 2, 3], [5] * 6, [1, 2, 1, 1, 2, 2]])
    expected = [[0, 0, 0, 3, 3, 5], [0] * 6, [0, 1, 2, 2, 4, 4]]
    np.testing.assert_array_equal(first_keys(segments)[:, 0], expected)


def test_a_kernel_stays_from_three_percent_on() -> None:
    def cell(kernel: str, **more: object) -> dict[str, object]:
        return {"model": "llama", "documents": 4, "kernel": kernel, **more}

    found = [
        cell("hopper", ms=100.0, bytes=2**30),
        cell("cudnn", ms=102.9, bytes=2**31),
        cell("tokamax", ms=103.0, bytes=2**31),
        cell("other", failed="out of memory\nmore"),
        {**cell("cudnn", ms=150.0, bytes=2**31), "documents": 0},  # nothing to compare it with
    ]
    assert table(found)[2:] == [
        "| llama | 4 | hopper | 100.0 | 1.0 GiB |  |",
        "| llama | 4 | cudnn | 102.9 | 2.0 GiB | 1.029 |",
        "| llama | 4 | tokamax | 103.0 | 2.0 GiB | 1.030 (keep ours) |",
        "| llama | 4 | other | failed | out of memory |  |",
        "| llama | none | cudnn | 150.0 | 2.0 GiB |  |",
    ]
