"""Needle in a haystack, over HTTP: does a model use what it read far back?

python examples/needle.py write needles.jsonl --sequences 10000 --seq 256
meshwright data pack needles.jsonl --out needles.store
meshwright train tiny --data needles.store --seq 256 --run needles
meshwright serve needles
python examples/needle.py ask http://127.0.0.1:8000 --sequences 64 --seq 256

Filler text (the hay) hides `!key value` pairs (the needles) and asks for them at the end:

yg lzc yg yg yg !qn lzc !dh yg tek lzc yg !xp yg !vj lzc lzc tek lzc lzc yg yg ?qn ?vj ?dh ?xp

The hay repeats three words, which differ from text to text. A needle occurs once: to continue `?q`,
a model must attend to `!qn`. Within a text, a letter belongs to the hay, to keys or to values. So
the hay teaches induction (copy what followed this letter before) on every token, and a small model
learns the task in minutes. Any server with OpenAI's /v1/completions can be asked.
"""

import argparse
import json
import random
import string
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STRAWS = 3  # distinct words in the hay of a text, of two to four letters
PAIR = 4  # characters of `!kv ` and `?kv `
MOST_NEEDLES = 10  # so that at least four letters are left for values
AT_ONCE = 8  # texts that the server is asked about at the same time


@dataclass(frozen=True)
class Question:
    """The position of a value in the hay, and of the same value as the answer."""

    told: int
    asked: int


def haystack(length: int, needles: int, seed: str) -> tuple[str, list[Question]]:
    """A text of `length` characters that hides needles and asks for each of them at its end."""
    chance = random.Random(seed)
    letters = chance.sample(string.ascii_lowercase, 26)

    def take(number: int) -> list[str]:
        taken, letters[:number] = letters[:number], []
        return taken

    straws = ["".join(take(chance.randint(2, 4))) + " " for _ in range(STRAWS)]
    keys = take(needles)
    pairs = [key + chance.choice(letters) for key in keys]
    hay, left = [], length - 2 * PAIR * needles
    while left > 0:
        hay.append(chance.choice(straws)[-left:])  # the last, which comes first, may be cut
        left -= len(hay[-1])
    text, told = "", {}
    places = chance.sample(range(len(hay)), needles)  # no two needles follow the same word
    after = dict(zip(places, pairs, strict=True))
    for index, straw in enumerate(reversed(hay)):
        text += straw
        if index in after:
            told[after[index]] = len(text) + 2
            text += f"!{after[index]} "
    questions = []
    for pair in chance.sample(pairs, needles):
        questions.append(Question(told[pair], len(text) + 2))
        text += f"?{pair} "
    return text, questions


def write(file: Path, sequences: int, seq: int, needles: int, seed: int) -> None:
    """Write training texts as JSON lines: a byte for each token, and an end of document."""
    with file.open("w", encoding="utf-8") as out:
        for index in range(sequences):
            text, _ = haystack(seq - 1, needles, f"write {seed} {index}")
            print(json.dumps({"text": text}), file=out)


def ask(url: str, sequences: int, seq: int, needles: int, seed: int) -> list[tuple[Question, bool]]:
    """Ask a server about texts that `write` never writes: each question, and if it was answered.

    A prompt is a text up to the answer, with the right answers to the questions before it.
    """
    model = _request(f"{url}/v1/models")["data"][0]["id"]

    def answered(index: int) -> list[tuple[Question, bool]]:
        text, questions = haystack(seq - 1, needles, f"ask {seed} {index}")
        prompts = [text[: question.asked] for question in questions]
        body = {"model": model, "prompt": prompts, "max_tokens": 1, "temperature": 0}
        choices = _request(f"{url}/v1/completions", body)["choices"]
        answers = {choice["index"]: choice["text"] for choice in choices}
        return [
            (question, answers[number].startswith(text[question.asked]))
            for number, question in enumerate(questions)
        ]

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [each for part in pool.map(answered, range(sequences)) for each in part]


def table(title: str, places: list[tuple[int, bool]], seq: int, parts: int = 10) -> str:
    """How many answers were right, by place, in equal ranges of the sequence."""
    lines = [f"{title:>24}  asked  found    %"]
    for part in range(parts):
        start, stop = part * seq // parts, (part + 1) * seq // parts
        right = [is_right for place, is_right in places if start <= place < stop]
        if right:
            span = f"{start:,} to {stop - 1:,}"
            share = 100 * sum(right) / len(right)
            lines.append(f"{span:>24}  {len(right):5,}  {sum(right):5,}  {share:3.0f}")
    return "\n".join(lines)


def _request(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=600) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        sys.exit(f"error: {url} answered {error.code}: {error.read().decode(errors='replace')}")
    except urllib.error.URLError as error:
        sys.exit(f"error: {url} cannot be reached ({error.reason}); start `meshwright serve` first")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    of_write = commands.add_parser("write", help="write texts to train on")
    of_write.add_argument("file", type=Path, help="JSON lines, for `meshwright data pack`")
    of_ask = commands.add_parser("ask", help="ask a server for the hidden values of new texts")
    of_ask.add_argument("url", help="of the server, such as http://127.0.0.1:8000")
    for command in (of_write, of_ask):
        command.add_argument("--sequences", type=int, default=64, help="number of texts")
        command.add_argument("--seq", type=int, default=256, help="length in tokens, if bytes are")
        command.add_argument("--needles", type=int, default=4, help="pairs hidden in each text")
        command.add_argument("--seed", type=int, default=0, help="random seed")
    given = parser.parse_args(arguments)
    if not 1 <= given.needles <= MOST_NEEDLES:
        parser.error(f"--needles {given.needles} must be from 1 to {MOST_NEEDLES}")
    shortest = given.needles * (2 * PAIR + 5) + 1  # a word of hay before each needle
    if given.seq < shortest:
        parser.error(f"--seq {given.seq} is too short for so many needles; give {shortest} or more")
    if given.sequences < 1:
        parser.error(f"--sequences {given.sequences} must be at least 1")
    settings = given.sequences, given.seq, given.needles, given.seed
    if given.command == "write":
        write(given.file, *settings)
        return
    found = ask(given.url.rstrip("/"), *settings)
    print(table("needle position", [(each.told, right) for each, right in found], given.seq))
    distances = [(each.asked - each.told, right) for each, right in found]
    print(table("distance to the answer", distances, given.seq))
    right = sum(is_right for _, is_right in found)
    share = f"{100 * right / len(found):.1f}%"
    print(f"found {right:,} of {len(found):,}: {share} ({given.sequences} texts of {given.seq:,})")


if __name__ == "__main__":
    main()
