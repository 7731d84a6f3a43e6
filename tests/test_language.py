"""Names, comments, messages and pages use the field's words, not the ones this project had before."""

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/meshwright"

# pattern → what to write instead; identifiers are matched as words: `log_sum` is "log sum"
WORDS = {
    r"rows?": "sequence",
    r"(a|the|this|each|every|one|per|first|last|next|in) turns?": "ring step, iteration",
    r"go(es|ing)? on": "resume, continue",
    r"in force": "current mesh",
    r"log[ -]sums?(?![ -]exp)": "log-sum-exp, lse",
    r"slopes?|steepness": "gradient",
    r"described( (step|array|machine|mesh|device)s?)?": "abstract",
    r"(first|start) values?": "initializer",
    r"memory (is )?full": "out of memory",
    r"(?<!all[ -])(gathers|gathered|gathering)": "all-gather",
    r"sequence parallel\w* (over|along) `?sp": "context parallelism",
    r"tp[ -]sequence": "sequence parallelism (Megatron's)",
    r"writes? text": "generate text",
    r"how-manieth": "index",
    r"documents? (lying|lies?|that lie)": "packed documents, segment ids",
}
# in sentences these have other meanings
NAMES = {
    r"(.* )?turns?( .*)?": "ring step, iteration",
    r"(.* )?(wide|narrow)( .*)?": "non-trivial axis",
    r"under way": "in flight",
}


# file or folder → a word it may use, and why
ROW = r"rows?"
ALLOWED = {
    "src/meshwright/audits/": (ROW, "of the table of collectives"),
    "src/meshwright/cli/audit.py": (ROW, "of that table, and the flag --rows"),
    "src/meshwright/testing.py": (ROW, "of that table"),
    "src/meshwright/proofs/compare.py": (ROW, "of that table"),
    "src/meshwright/cli/prove": (ROW, "of that table, and the flag --rows"),
    "src/meshwright/cli/models.py": (ROW, "of a table"),
    "src/meshwright/cli/doctor.py": (ROW, "of a table"),
    "src/meshwright/present/": (ROW, "of a table"),
    "src/meshwright/planner/report/": (ROW, "of the table of meshes"),
    "docs/plan/": (ROW, "of that table, and the flag --rows"),
    "src/meshwright/layouts/explanation.py": (ROW, "of the table of arrays"),
    "src/meshwright/serving/": (ROW, "of the arrays of a step"),
    "src/meshwright/show/": (ROW, "of a drawn table, row-major"),
    "docs/notation/explain.md": (ROW, "of the table of arrays"),
    "docs/own-model.md": (ROW, "of the table of collectives"),
    "docs/coming-from/lwm.md": (ROW, "of the table of arrays"),
    "src/meshwright/ops/attention/hopper/": (ROW, "of a matrix"),
    "docs/notation/path-rules.md": (ROW, "of a matrix"),
    "docs/show.md": (ROW, "of a matrix"),
    "docs/coming-from/einshard.md": (ROW, "of a matrix"),
    "docs/coming-from/pytorch-2d.md": (ROW, "of a matrix"),
    "docs/decisions.md": (ROW, "of a matrix, of chips"),
    "src/meshwright/meshes/": (ROW, "of chips"),
    "docs/notation/mesh.md": (ROW, "of chips, and a user's axis"),
    "docs/coming-from/t5x.md": (ROW, "of chips"),
    "src/meshwright/training/state.py": (ROW, "skipped_in_a_row, an array of every checkpoint"),
    "src/meshwright/torch/dry_run.py": (ROW, "row-parallel layers, of a matrix"),
    "src/meshwright/torch/styles.py": (ROW, "row-parallel layers"),
    "src/meshwright/torch/audit.py": (ROW, "of the table of collectives"),
    "src/meshwright/torch/explanation.py": (ROW, "of the table of arrays"),
    "src/meshwright/data/readers.py": (ROW, "of a Parquet or Arrow table"),
    "src/meshwright/ops/experts.py": (ROW, "of a matrix: a token for one of its experts"),
    "src/meshwright/ops/grouped.py": (ROW, "of a matrix"),
    "src/meshwright/ops/hopper_grouped.py": (ROW, "of a matrix"),
    "src/meshwright/ops/triton_grouped.py": (ROW, "of a matrix"),
    "src/meshwright/ops/float32_matmul.py": (ROW, "of a matrix"),
    "src/meshwright/ops/__init__.py": (ROW, "of a matrix"),
    "src/meshwright/models/decoder/experts.py": (ROW, "of a matrix"),
}


@functools.cache
def texts() -> list[tuple[str, int, str, bool]]:
    return list(read_texts())


def read_texts() -> Iterator[tuple[str, int, str, bool]]:
    """(file, line, text, whether it is an identifier) of everything that is checked."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for number, line in enumerate(page.read_text().splitlines(), start=1):
            yield str(page.relative_to(ROOT)), number, line, False
    for file in sorted(SOURCE.rglob("*.py")):
        name, code = str(file.relative_to(ROOT)), file.read_text()
        yield name, 0, file.stem, True
        for token in tokenize.generate_tokens(io.StringIO(code).readline):
            if tokenize.tok_name[token.type] in ("COMMENT", "STRING", "FSTRING_MIDDLE"):
                yield name, token.start[0], token.string, False
        for node in ast.walk(ast.parse(code)):
            for identifier in identifiers(node):
                yield name, getattr(node, "lineno", 0), identifier, True


def identifiers(node: ast.AST) -> Iterator[str]:
    """The names that a piece of code introduces."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id


@functools.cache
def matches(text: str, is_name: bool) -> list[tuple[str, str]]:
    return list(find_matches(text, is_name))


def find_matches(text: str, is_name: bool) -> Iterator[tuple[str, str]]:
    """The old words in a text, and what to write instead."""
    if is_name:
        text = re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", text).lower().strip()
    for pattern, instead in (WORDS | NAMES if is_name else WORDS).items():
        ends = ("^", "$") if pattern in NAMES else (r"(?<![\w-])", r"(?![\w-])")
        match = re.search(rf"{ends[0]}({pattern}){ends[1]}", text, re.IGNORECASE)
        if match:
            yield match[0], instead


def old_words() -> Iterator[str]:
    for file, line, text, is_name in texts():
        allowed = [word for place, (word, _) in ALLOWED.items() if file.startswith(place)]
        for word, instead in matches(text, is_name):
            if not any(re.fullmatch(pattern, word, re.IGNORECASE) for pattern in allowed):
                yield f"{file}:{line}: {word!r}; write: {instead}"


def test_the_old_words_are_gone() -> None:
    found = list(old_words())
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "is_name", "words"),
    [
        ("log_sum_here", True, ["log sum"]),
        ("log_sum_exp", True, []),
        ("by_row", True, ["row"]),
        ("turn_of", True, ["turn of"]),
        ("return_value", True, []),
        ("the run goes on", False, ["goes on"]),
        ("weights are gathered over fsdp", False, ["gathered"]),
        ("weights are all-gathered over fsdp", False, []),
        ("DescribedStep", True, ["described step"]),
    ],
)
def test_a_word_is_found_in_names_and_sentences(text: str, is_name: bool, words: list[str]) -> None:
    assert [word for word, _ in matches(text, is_name)] == words


def test_every_exception_is_of_a_file_that_exists() -> None:
    files = {file for file, *_ in texts()}
    for place in ALLOWED:
        assert any(file.startswith(place) for file in files), f"{place} is no more"
