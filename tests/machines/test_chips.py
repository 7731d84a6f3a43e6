"""The catalogue holds every chip asked for, each figure with its source."""

import dataclasses

import pytest

from meshwright import CHIPS

FIGURES = (
    "bf16_flops", "fp8_flops", "memory_bytes", "memory_bandwidth", "link_bandwidth", "links",
    "host_network_bandwidth", "cores_per_chip", "chips_per_host",
)  # fmt: skip


def test_the_catalogue_names_every_generation() -> None:
    tpus = {"v2", "v3", "v4", "v5e", "v5p", "v6e", "7x"}
    gpus = {"a100-40", "a100-80", "h100", "h100-pcie", "h200", "b200", "b300", "gb200", "gb300"}
    gpus |= {"l4", "l40s", "a10g", "mi300x", "mi355x", "rtx-4090", "rtx-5090", "rtx-pro-6000"}
    hosted = {"a2-high", "a2-ultra", "p4d", "p4de", "a3-high", "a3-mega", "h100-500w"}
    assert set(CHIPS) == tpus | gpus | hosted | {"cpu"}


@pytest.mark.parametrize("name", CHIPS)
@pytest.mark.parametrize("figure", FIGURES)
def test_every_figure_is_there_and_sourced(name: str, figure: str) -> None:
    chip = CHIPS[name]
    value = getattr(chip, figure)
    optional = figure in ("fp8_flops", "host_network_bandwidth")
    assert (value is None and optional) or value > 0
    assert len(chip.source(figure)) > 10


@pytest.mark.parametrize("name", CHIPS)
def test_sources_are_of_figures_that_exist(name: str) -> None:
    fields = {field.name for field in dataclasses.fields(CHIPS[name])}
    assert set(CHIPS[name].sources) - {"*"} <= fields


@pytest.mark.parametrize(
    ("name", "bandwidth"), [("a100-80", 300e9), ("h100", 450e9), ("h200", 450e9), ("b200", 900e9)]
)
def test_nvlink_adds_up_to_the_published_total_per_direction(name: str, bandwidth: float) -> None:
    assert CHIPS[name].links * CHIPS[name].link_bandwidth == bandwidth


@pytest.mark.parametrize(
    ("name", "shape", "wraps"),
    [
        ("v4", (4, 4, 4), (True, True, True)),
        ("v5p", (2, 4, 4), (False, False, False)),
        ("v5p", (4, 4, 12), (True, True, True)),
        ("v5e", (16, 16, 1), (True, True, False)),
        ("v5e", (8, 16, 1), (False, True, False)),
        ("v6e", (4, 4, 1), (False, False, False)),
        ("v3", (32, 32, 1), (True, True, False)),
    ],
)
def test_links_close_into_rings_where_published(
    name: str, shape: tuple[int, int, int], wraps: tuple[bool, bool, bool]
) -> None:
    assert CHIPS[name].wraps(shape) == wraps
