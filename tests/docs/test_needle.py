"""examples/needle.py: its texts ask for what they hide, and a server's answers are counted."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from tests.serving.server.bigram_engine import BigramEngine
from tests.serving.server.serving import serving

from meshwright.data import ByteTokenizer, Reading, TokenStore, pack, read_sequences

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("needle", ROOT / "examples/needle.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("needles", [1, 4, 10])
def test_a_text_asks_for_what_it_hides(example: Any, needles: int) -> None:
    shortest = 13 * needles
    for index, length in enumerate((shortest, shortest + 1, 300)):
        text, questions = example.haystack(length, needles, f"test {index}")
        assert len(text) == length
        told = {found[1]: (found.start(2), found[2]) for found in re.finditer(r"!(\w)(\w) ", text)}
        asked = re.findall(r"\?(\w)(\w) ", text)
        assert len(told) == len(asked) == len(questions) == needles
        for (key, value), question in zip(asked, questions, strict=True):
            assert told[key] == (question.told, value)
            assert text[question.asked] == value
        # a letter is of the hay, of keys or of values
        hay = set(re.sub(r"[!?]\w\w ", "", text)) - {" "}
        keys, values = set(told), {value for _, value in told.values()}
        assert not hay & (keys | values)
        assert not keys & values


def test_written_texts_are_the_sequences_that_training_reads(example: Any, tmp_path: Path) -> None:
    example.main(["write", str(tmp_path / "a.jsonl"), "--sequences", "20", "--seq", "64"])
    pack([str(tmp_path / "a.jsonl")], tmp_path / "store", ByteTokenizer(), Reading())
    read = read_sequences(TokenStore.open(tmp_path / "store"), range(20), seq=64)
    assert (read["segments"] == 1).all()
    assert (read["tokens"][:, -1] == ByteTokenizer.end_of_document).all()
    assert len({tokens.tobytes() for tokens in read["tokens"]}) == 20


def test_answers_of_a_server_are_counted(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def nearby(prompt: str) -> str:
        """Knows what it read at most 60 characters ago."""
        found = re.search(rf"!{prompt[-1]}(\w) ", prompt[-60:])
        return "-" if found is None else f"{found[1]} and so on"

    with serving(BigramEngine(answer=nearby)) as server:
        example.main(["ask", server.url, "--sequences", "12", "--seq", "128", "--seed", "3"])
        results = example.ask(server.url, 12, 128, 4, 3)
    distances = [(question.asked - question.told, right) for question, right in results]
    assert all(right == (distance <= 58) for distance, right in distances)
    right = sum(right for _, right in distances)
    assert 0 < right < len(distances) == 48
    out = capsys.readouterr().out
    assert f"found {right} of 48: {100 * right / 48:.1f}% (12 texts of 128)" in out
    assert re.search(r"12 to 24 +\d+ +(\d+) +100", out[out.index("distance") :])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--needles", "11"], "--needles 11 must be from 1 to 10"),
        (["--seq", "40"], "--seq 40 is too short for so many needles; give 53 or more"),
        (["--sequences", "0"], "--sequences 0 must be at least 1"),
    ],
)
def test_mistakes_are_told(
    example: Any, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        example.main(["ask", "http://127.0.0.1:1", *arguments])
    assert words in capsys.readouterr().err


def test_a_server_that_is_not_there_is_told(example: Any) -> None:
    with pytest.raises(SystemExit, match=r"cannot be reached .* start `meshwright serve` first"):
        example.main(["ask", "http://127.0.0.1:1"])
