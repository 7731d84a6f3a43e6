"""Fine-tune the demo's model on conversations and talk to it: `python examples/finetune_demo.py`.

The model that `make demo` trained tells stories. 500 generated conversations teach it to answer
questions about animals; 100 others, whose words it has not seen together, test it.
"""

import argparse
import itertools
import json
import random
import shlex
import sys
import time
from pathlib import Path

from train_demo import command_line, meshwright

import meshwright as mw

FACTS = {  # of each animal: its colour, its food and its home
    "fox": ("red", "berries", "a den"),
    "owl": ("brown", "mice", "a tall oak"),
    "bear": ("black", "honey", "a cave"),
    "frog": ("green", "flies", "a pond"),
    "swan": ("white", "water plants", "a lake"),
    "mole": ("dark grey", "worms", "a tunnel"),
    "seal": ("silver", "fish", "the cold sea"),
    "camel": ("yellow", "thorny bushes", "the desert"),
    "parrot": ("blue", "nuts", "the jungle"),
    "hedgehog": ("pale brown", "beetles", "a heap of leaves"),
}
ASKED = (
    ("What colour is the {}?", "Which colour has the {}?", "The colour of the {}?", "{}: colour?"),
    ("What does the {} eat?", "Which food does the {} like?", "The food of the {}?", "{}: food?"),
    ("Where does the {} live?", "Where is the home of the {}?", "The home of the {}?", "{}: home?"),
)  # fmt: skip
ANSWERS = ("The {} is {}.", "The {} eats {}.", "The {} lives in {}.")
POLITE = ("", "Please tell me. ", "Hello! ", "I want to know. ", "A question: ")
TRAINED, TESTED = 500, 100
# how many of the answers to new questions have to be right to the letter
WANTED = 90


def conversations() -> list[dict[str, list[dict[str, str]]]]:
    """All questions in every wording, in a random order."""
    made = []
    for animal, topic, polite in itertools.product(FACTS, range(3), POLITE):
        for words in ASKED[topic]:
            question, answer = polite + words.format(animal), ANSWERS[topic]
            messages = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer.format(animal, FACTS[animal][topic])},
            ]
            made.append({"messages": messages})
    random.Random(0).shuffle(made)
    return made


def exact_answers(folder: Path, tests: list[dict[str, list[dict[str, str]]]]) -> int:
    """How many tests the model in the folder answers as they do."""
    right = 0
    with mw.load(folder) as model:
        for number, test in enumerate(tests):
            question, expected = test["messages"]
            answer = model.chat([question], max_new=32, temperature=0).text
            right += answer == expected["content"]
            if number < 3:
                print(f"{question['content']}\n  {answer}", flush=True)
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, default=Path("demo-run"), help="the demo's run")
    parser.add_argument("--out", type=Path, default=Path("finetune-run"), help="a new folder")
    parser.add_argument("--steps", type=int, default=120)
    options = parser.parse_args()
    if options.out.exists():
        raise SystemExit(f"{options.out} exists already; remove it, or give --out another")
    start = time.monotonic()
    options.out.mkdir(parents=True)
    base, data, store, run, model = (
        options.out / name for name in ("base", "train.jsonl", "train.store", "run", "model")
    )
    made = conversations()
    tests = made[TRAINED : TRAINED + TESTED]
    data.write_text("".join(json.dumps(each) + "\n" for each in made[:TRAINED]))
    meshwright("export", str(options.base), str(base))
    meshwright(
        "data", "pack", str(data), "--out", str(store), "--tokenizer", str(base),
        "--chat-template", "chatml",
    )  # fmt: skip
    meshwright("data", "show", str(store), "--count", "1")
    meshwright(
        "train", str(base), "--data", str(store), "--run", str(run),
        "--batch", "16", "--seq", "128", "--steps", str(options.steps), "--cpu-devices", "2",
        "--mesh", "fsdp=2", "--optimizer.name", "muon", "--optimizer.learning-rate", "5e-3",
        "--eval.sequences", "16",
    )  # fmt: skip
    meshwright("export", str(run), str(model))
    print("\nquestions that are not in the data:", flush=True)
    right = exact_answers(model, tests)
    print(f"{right} of {TESTED} answers are right to the letter")
    if right < WANTED:
        sys.exit(f"expected at least {WANTED}")
    command = shlex.join(command_line())
    print(f"\n{time.monotonic() - start:.0f} s in all. Talk to it, or serve it:")
    print(f"  {command} chat {shlex.quote(str(model))}")
    print(f"  {command} serve {shlex.quote(str(model))}")


if __name__ == "__main__":
    main()
