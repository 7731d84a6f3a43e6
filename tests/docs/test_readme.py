"""README says what is so: its numbers are those of RESULTS.md, its commands exist."""

import re
from pathlib import Path

from meshwright.errors import install_command
from meshwright.models import FAMILIES
from readme_results import demo, table

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_numbers_are_those_of_the_results() -> None:
    """After a new measurement: python benchmarks/readme_results.py."""
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    assert table(results) in README
    assert demo(results) in README


def test_the_number_of_architectures_is_that_of_the_families() -> None:
    count = sum(len(family.hugging_face.architectures) for family in FAMILIES)
    assert f"**{count} architectures**" in README
    assert f" {count} architectures of Hugging Face" in (ROOT / "docs" / "faq.md").read_text()


def test_every_make_command_is_there() -> None:
    rules = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)\b +#|`make ([a-z-]+)`", README))
    names = {one or other for one, other in named}
    assert {"demo", "serve"} <= names <= rules


def test_the_environment_is_made_before_the_first_command() -> None:
    places = [
        README.find(text) for text in ("-m venv", install_command("serve"), "meshwright --help")
    ]
    assert places == sorted(places)
    assert -1 not in places
    assert places[-1] < README.index("$ meshwright ")


def test_the_results_name_a_number_that_is_not_there_any_more() -> None:
    """A section of RESULTS.md that was reworded is an error, not an old number."""
    text = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    for gone in ("verdicts right", "within 1%", "of the time of the best", "| 8b, batch 128 |"):
        assert gone in text
        try:
            table(text.replace(gone, "-"))
        except ValueError as reason:
            assert "RESULTS.md has no" in str(reason)
        else:
            raise AssertionError(gone)
