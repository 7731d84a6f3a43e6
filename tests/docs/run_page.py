"""Run every snippet of one Markdown page: `python tests/docs/run_page.py docs/page.md`.

```python blocks run top to bottom in one namespace. With `>>>` prompts they are doctests: what they
print must be what the page shows, line by line (blank lines and trailing spaces aside; `...` skips).
Without prompts they are plain code that must not fail.
```console blocks hold `$ command` lines, which must succeed and print what follows them, if
anything does (`...` skips). Blocks after `<!-- not run: why -->` are left out; those after
`<!-- needs torch -->` are where that is not installed.
"""

import atexit
import doctest
import functools
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from forked import Commands

sys.path.pop()  # there tests/torch would be found as torch

# a command that needs no shell but for where its output goes
PLAIN = re.compile(r"meshwright ([^|&;<>$`*?~#]+?)(?: > (\S+)( 2>&1)?)?")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class ByLine(doctest.OutputChecker):
    """Compares line by line; blank lines and trailing spaces do not count."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        lines = [
            "\n".join(line.rstrip() for line in text.splitlines() if line.strip())
            for text in (want, got)
        ]
        return super().check_output(*lines, optionflags)


def run_page(page: Path) -> int:
    """Run the page; gives back how many snippets ran."""
    text = page.read_text()
    if re.search(r"^\$ meshwright ", text, re.MULTILINE):
        meshwright()  # while jax has not begun its work here
    namespace: dict[str, object] = {"__name__": "__page__"}
    ran = 0
    for match in FENCE.finditer(text):
        language, body = match[1], match[2]
        line = text[: match.start()].count("\n") + 2
        if re.search(r"<!-- not run: .+ -->\s*$", text[: match.start()]):
            continue
        needs = re.search(r"<!-- needs (\w+) -->\s*$", text[: match.start()])
        if needs and importlib.util.find_spec(needs[1]) is None:
            continue
        if language == "python":
            run_python(body, namespace, page, line)
        elif language == "console":
            run_console(body, page, line)
        else:
            continue
        ran += 1
    return ran


def run_python(body: str, namespace: dict[str, object], page: Path, line: int) -> None:
    if ">>>" not in body:
        code = compile("\n" * (line - 1) + body, str(page), "exec")
        exec(code, namespace)
        return
    test = doctest.DocTestParser().get_doctest(body, namespace, page.name, str(page), line - 1)
    runner = doctest.DocTestRunner(checker=ByLine(), optionflags=doctest.ELLIPSIS)
    runner.run(test, clear_globs=False)
    namespace.update(test.globs)
    if runner.summarize(verbose=False).failed:
        raise SystemExit(1)


def run_console(body: str, page: Path, line: int) -> None:
    commands: list[tuple[str, list[str]]] = []
    for text in body.splitlines():
        if text.startswith("$ "):
            commands.append((text[2:], []))
        elif commands:
            commands[-1][1].append(text.rstrip())
    for command, expected in commands:
        code, printed = ended(command)
        shown = [text for text in expected if text]
        fails = "error" in "".join(shown[:1]).lower()
        if (code != 0) != fails:
            raise SystemExit(f"{page}:{line}: '{command}' gave {code}\n{printed}")
        alike = ByLine().check_output("\n".join(shown), printed, doctest.ELLIPSIS)
        if shown and not alike:
            raise SystemExit(
                f"{page}:{line}: '{command}' printed\n{printed}\nbut the page shows\n"
                + "\n".join(shown)
            )


def ended(command: str) -> tuple[int, str]:
    """The exit status of a command, and what it printed to the screen."""
    plain = PLAIN.fullmatch(command)
    if plain is None:
        done = subprocess.run(
            command, shell=True, env=environment(), text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        return done.returncode, done.stdout
    arguments, file, errors_too = plain.groups()
    with tempfile.NamedTemporaryFile() as screen:
        shown = Path(screen.name)
        out = Path(file) if file else shown
        code = meshwright().run(shlex.split(arguments), out, out if errors_too else shown)
        return code, shown.read_text()


@functools.cache
def meshwright() -> Commands:
    commands = Commands(environment())
    atexit.register(commands.close)
    return commands


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "COLUMNS": "120"}


if __name__ == "__main__":
    print(f"{run_page(Path(sys.argv[1]))} snippets ran")
