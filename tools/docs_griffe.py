"""An extension of griffe: examples with `>>>` in docstrings are blocks of code."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Puts a fence around each example, which Markdown would take for a quotation."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """The text with fences around its examples: from `>>>` to the next empty line."""
    example = re.compile(r"^( *)>>> .*?(?=\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)

    def block(found: re.Match[str]) -> str:
        indent = found[1]
        lines = (line.removeprefix(indent) for line in found[0].splitlines())
        return "\n".join(["", "```pycon", *lines, "```"])

    return example.sub(block, text)
