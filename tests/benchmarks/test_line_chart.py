"""Charts for the docs: axes with round numbers, and curves inside their panel."""

import xml.etree.ElementTree as ElementTree

import pytest

from line_chart import BLUE, HEIGHT, WIDTH, Curve, Panel, line_charts, round_numbers

approx = pytest.approx


def test_round_numbers_are_few_and_inside() -> None:
    assert round_numbers(3.3, 9.8, 7) == approx([4, 5, 6, 7, 8, 9])
    assert round_numbers(0, 2000, 6) == [0, 500, 1000, 1500, 2000]
    assert round_numbers(-0.55, 0.55, 7) == approx([-0.4, -0.2, 0, 0.2, 0.4])


def test_curves_stay_in_their_panel() -> None:
    points = [(100.0, 5.0), (200.0, 4.0), (300.0, float("nan")), (400.0, 3.0)]
    svg = line_charts([Panel("a < b", [Curve("one", BLUE, points)], limits=(2.0,), unit="%")])
    root = ElementTree.fromstring(svg)
    paths = [one.get("d", "") for one in root.iter() if one.get("fill") == "none"]
    (drawn,) = paths
    places = [tuple(map(float, point.split())) for point in drawn[1:].split("L")]
    assert len(places) == 3
    assert [x for x, _ in places] == sorted(x for x, _ in places)
    assert [y for _, y in places] == sorted(y for _, y in places)  # falling losses: downwards
    assert all(0 < x < WIDTH and 0 < y < HEIGHT for x, y in places)
    assert "a < b" in "".join(root.itertext())
