"""Prices have a source and a date; a user's file adds chips and prices."""

from pathlib import Path

import pytest

from meshwright import CHIPS, Machine
from meshwright.errors import MeshwrightError
from meshwright.machines import PRICES, read_catalogue


@pytest.mark.parametrize("chip", PRICES)
def test_every_price_is_of_a_chip_with_source_date_and_region(chip: str) -> None:
    assert chip in CHIPS
    for price in PRICES[chip]:
        assert 0.1 < price.dollars < 100
        assert price.date.startswith("20")
        assert "." in price.source
        assert price.region
    dollars = [price.dollars for price in PRICES[chip]]
    assert dollars == sorted(dollars)


def test_the_price_of_a_chip_is_its_part_of_an_instance() -> None:
    of_p5 = next(price for price in PRICES["h100"] if price.instance == "p5.48xlarge")
    assert of_p5.dollars == 55.04 / 8


@pytest.mark.parametrize(
    ("text", "machine"),
    [
        ("p5.48xlarge", "h100:8"),
        ("16*p5.48xlarge", "h100:16x8"),
        ("Standard_ND96isr_H100_v5", "h100:8"),
        ("2*a3-highgpu-8g", "a3-high:2x8"),
        ("4*p4d.24xlarge", "p4d:4x8"),
        ("16*a4x-highgpu-4g", "gb200:64"),  # NVLink joins 72
        ("36*a4x-highgpu-4g", "gb200:2x72"),
    ],
)
def test_clouds_instances_are_machines(text: str, machine: str) -> None:
    assert str(Machine.parse(text)) == machine


def written(folder: Path, text: str) -> Path:
    file = folder / "own.toml"
    file.write_text(text)
    return file


def test_a_file_adds_chips_and_prices(tmp_path: Path) -> None:
    text = '[chips.big]\nlike = "v5e"\nmemory_bytes = 34359738368\n'
    text += '[prices]\nbig = 0.9\nv5p = 2\n"p5en.48xlarge" = 40\n'
    catalogue = read_catalogue(written(tmp_path, text))
    chip = catalogue.own["big"]
    assert chip.memory_bytes == 2 * CHIPS["v5e"].memory_bytes
    assert chip.usable_gib == 2 * (CHIPS["v5e"].usable_gib or 0)
    assert chip.bf16_flops == CHIPS["v5e"].bf16_flops
    assert chip.source("memory_bytes") == "your own catalogue"
    assert {name: catalogue.prices[name].dollars for name in ("big", "v5p", "h200", "v6e")} == {
        "big": 0.9, "v5p": 2, "h200": 5, "v6e": PRICES["v6e"][0].dollars,
    }  # fmt: skip
    assert str(Machine.parse("big:4x4", catalogue.own)) == "big:4x4"
    with pytest.raises(MeshwrightError, match="nearest: 'big:4x4'"):
        Machine.parse("big:4x5", catalogue.own)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prices = 3", "neither the table"),
        ("[prices]\nh1000 = 3", "neither a chip nor an instance; did you mean 'h100'"),
        ("[prices]\nh100 = -3", "not a number of dollars"),
        ("[chips.mine]\nmemory_bytes = 3", 'lacks like = "h100"'),
        ('[chips.mine]\nlike = "h1000"', "not in the catalogue"),
        ('[chips.mine]\nlike = "h100"\nflops = 3', "not a figure of a chip"),
        ('[chips.mine]\nlike = "h100"\nlinks = "3"', "not a number above 0"),
        ('[chips.mine]\nlike = "h100"\nmemory_bytes = nan', "not a number above 0"),
        ('[chips.mine]\nlike = "h100"\nbf16_flops = inf', "not a number above 0"),
        ("[prices]\nh100 = nan", "not a number of dollars"),
        ("[prices", "is not TOML"),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(MeshwrightError, match=said):
        read_catalogue(written(tmp_path, text))
    with pytest.raises(MeshwrightError, match="cannot be read"):
        read_catalogue(tmp_path / "missing.toml")
