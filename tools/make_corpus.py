"""Write the corpus that ships with the package: `python tools/make_corpus.py`.

Short stories, fables and descriptions from the sentence patterns in corpus_patterns.txt, all of our
own. The words are few and the grammar is plain: a tiny model learns to write it in a minute. The
same seed writes the same text.
"""

import gzip
import re
from pathlib import Path
from random import Random

PATTERNS = Path(__file__).with_name("corpus_patterns.txt")
OUT = Path(__file__).parents[1] / "src/meshwright/data/corpus/stories.txt.gz"
STORIES = 640

HE = {"he": "he", "him": "him", "his": "his", "He": "He"}
SHE = {"he": "she", "him": "her", "his": "her", "He": "She"}
# names in the patterns for a second and third different word of the same kind
SEVERAL = {
    "kind": ["kind", "other", "other2"],
    "spot": ["spot", "spot2", "spot3"],
    "trait": ["trait", "trait2"],
    "food": ["food", "food2"],
}

Plot = list[list[str]]


def patterns() -> tuple[dict[str, list[str]], list[Plot]]:
    """The words to choose from, and the plots: lists of beats, lists of sentences."""
    words: dict[str, list[str]] = {}
    plots: list[Plot] = []
    for line in PATTERNS.read_text().splitlines():
        if line.startswith("  lesson "):
            plots[-1].append(words[line.split()[1]])
        elif line.startswith("  "):
            plots[-1].append(line.strip().replace("\\n", "\n").split(" | "))
        elif line.startswith("plot "):
            plots.append([])
        elif line.startswith(("words ", "lessons ")):
            name, choices = line.split(" ", 1)[1].split(": ", 1)
            words[name] = choices.split(" | ")
    return words, plots


def story(plot: Plot, choices: dict[str, list[str]], random: Random) -> str:
    """One story: a sentence for each beat, the same names and things in all of them."""
    name, friend = random.sample(choices["he"] + choices["she"], 2)
    words = (SHE if name in choices["she"] else HE) | {"name": name, "friend": friend}
    for each in sorted(choices.keys() - {"he", "she"}):
        names = SEVERAL.get(each, [each])
        words |= dict(zip(names, random.sample(choices[each], len(names)), strict=True))
    words["morning"] = words["morning"].format(**words)
    text = ""
    for beat in plot:
        sentence = random.choice(beat).format(**words)
        # a new line where somebody speaks
        text += ("\n" if sentence.startswith('"') else " ") + sentence
    return re.sub(r"\b([Aa]) (?=[aeio])", r"\1n ", text.strip())


def corpus(seed: int = 1) -> str:
    """All stories, each different, a blank line between two."""
    random = Random(seed)
    choices, plots = patterns()
    stories: dict[str, None] = {}
    while len(stories) < STORIES:
        stories[story(plots[len(stories) % len(plots)], choices, random)] = None
    mixed = list(stories)
    random.shuffle(mixed)
    return "\n\n".join(mixed) + "\n"


def main() -> None:
    data = corpus().encode()
    # no time in the header: the same text is the same file
    OUT.write_bytes(gzip.compress(data, mtime=0))
    print(f"{OUT.name}: {len(data):,} bytes of text, {OUT.stat().st_size:,} compressed")


if __name__ == "__main__":
    main()
