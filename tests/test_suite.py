"""What holds for every test and script: no time limits, paths and imported names that exist."""

import ast
import importlib
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[1]
TESTS = sorted(set((ROOT / "tests").rglob("*.py")) - {Path(__file__)})
SCRIPTS = [*TESTS, *sorted(path for name in ("benchmarks", "examples", "tools") for path in (ROOT / name).glob("*.py"))]  # fmt: skip
CLOCKS = {"monotonic", "perf_counter", "process_time", "monotonic_ns", "perf_counter_ns", "time"}


def programs(text: str) -> Iterator[ast.Module]:
    """A file, and the programs it has as text for processes it starts."""
    tree = ast.parse(text)
    yield tree
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" in node.value:
            try:
                yield ast.parse(node.value)
            except SyntaxError:  # a text
                continue


def reads_a_clock(node: ast.AST, times: set[str]) -> bool:
    """Whether an expression has a call of a clock in it, or the name of what came from one."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and part.id in times:
            return True
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute):
            owner = part.func.value
            if isinstance(owner, ast.Name) and owner.id == "time" and part.func.attr in CLOCKS:
                return True
    return False


def time_limits(program: ast.Module) -> list[int]:
    """Lines that assert how long something took."""
    times: set[str] = set()
    for node in ast.walk(program):
        if isinstance(node, ast.Assign) and reads_a_clock(node.value, times):
            times |= {name.id for name in node.targets if isinstance(name, ast.Name)}
    return [
        node.lineno
        for node in ast.walk(program)
        if isinstance(node, ast.Assert)
        if any(
            isinstance(part, ast.Compare) and reads_a_clock(part, times)
            for part in ast.walk(node.test)
        )
    ]


def short_waits(program: ast.Module) -> list[int]:
    """Lines that wait for a number of seconds and fail then."""

    def is_number(node: ast.expr) -> bool:
        return isinstance(node, ast.Constant) and type(node.value) in (int, float)

    return [
        call.lineno
        for call in ast.walk(program)
        if isinstance(call, ast.Call)
        if any(keyword.arg == "timeout" and is_number(keyword.value) for keyword in call.keywords)
        or (
            isinstance(call.func, ast.Attribute)
            and call.func.attr in ("wait", "join", "communicate", "wait_for")
            and any(map(is_number, call.args))
        )
    ]


@pytest.mark.parametrize(
    ("text", "limits", "waits"),
    [
        ("start = time.monotonic()\nf()\nassert time.monotonic() - start < 20", [3], []),
        ("took = time.perf_counter() - begin\nassert (took < 1, x) == (True, 2)", [2], []),
        ("begin = time.process_time()\nall = [time.process_time() - begin]\nassert min(all) < 1", [3], []),
        ('PROGRAM = """\nimport time\nassert time.time() < 3\n"""', [3], []),
        ("process.communicate(timeout=30)\nthread.join(5)\nx.wait(0.5)", [], [1, 2, 3]),
        ('process.wait(timeout=PATIENCE_S)\n", ".join(words)\nevent.wait()', [], []),
    ],
)  # fmt: skip
def test_limits_and_waits_are_found(text: str, limits: list[int], waits: list[int]) -> None:
    assert [line for program in programs(text) for line in time_limits(program)] == limits
    assert [line for program in programs(text) for line in short_waits(program)] == waits


def test_no_test_measures_time_or_waits_for_a_number_of_seconds() -> None:
    """A busy machine is slow by any factor. Limits of time are for benchmarks/; see patience.py."""
    for file in TESTS:
        for program in programs(file.read_text()):
            name = file.relative_to(ROOT)
            assert not (lines := time_limits(program)), f"{name}: a limit of time, lines {lines}"
            assert not (lines := short_waits(program)), f"{name}: not PATIENCE_S, lines {lines}"


# ---- paths --------------------------------------------------------------------------------------


def path_of(node: ast.expr, file: Path, names: dict[str, Path]) -> Path | None:
    """The path that an expression of `__file__` and literals stands for, if it is one."""
    match node:
        case ast.Name(name):
            return names.get(name)
        case ast.Call(func=ast.Name("Path"), args=[ast.Name("__file__")]):
            return file
        case ast.Call(func=ast.Attribute(value, "resolve" | "absolute"), args=[]):
            return path_of(value, file, names)
        case ast.Call(
            func=ast.Attribute(value, "with_name"), args=[ast.Constant(str() as name)]
        ) if base := path_of(value, file, names):
            return base.with_name(name)
        case ast.Attribute(value, "parent") if base := path_of(value, file, names):
            return base.parent
        case ast.Subscript(ast.Attribute(value, "parents"), ast.Constant(int() as number)) if (
            base := path_of(value, file, names)
        ):
            return base.parents[number]
        case ast.BinOp(left, ast.Div(), ast.Constant(str() as name)) if base := path_of(
            left, file, names
        ):
            return base / name
    return None


def missing_paths(text: str, file: Path) -> list[str]:
    """Paths of the repository that a file names and that are not there."""
    tree = ast.parse(text)
    names: dict[str, Path] = {}
    for statement in tree.body:
        match statement:
            case ast.Assign([ast.Name(name)], value) if path := path_of(value, file, names):
                names[name] = path
    paths = {path_of(node, file, names) for node in ast.walk(tree) if isinstance(node, ast.expr)}
    made = (".pytest_cache", ".venv")  # by what runs
    return [
        str(path)
        for path in sorted(path for path in paths if path is not None)
        if not path.exists() and not any(part.startswith(made) for part in path.parts)
    ]


def test_a_path_that_is_not_there_is_found() -> None:
    text = 'SCRIPT = Path(__file__).parents[{}] / "benchmarks" / "placement.py"'
    assert missing_paths(text.format(1), Path(__file__)) == []
    assert missing_paths(text.format(2), Path(__file__))
    assert missing_paths('HERE = Path(__file__).parent\nrun(HERE / "gone.py")', Path(__file__))


def test_every_path_that_a_script_builds_exists() -> None:
    missing = {str(file.relative_to(ROOT)): missing_paths(file.read_text(), file) for file in SCRIPTS}  # fmt: skip
    assert {name: paths for name, paths in missing.items() if paths} == {}


def test_every_file_that_commands_name_exists() -> None:
    named = re.compile(r"(?<![\w./-])(?:tests|benchmarks|examples|tools|docs|src)/[\w/.-]+\.\w+")
    files = [
        ROOT / "Makefile",
        ROOT / "CONTRIBUTING.md",
        ROOT / ".ci" / "run",
        *(ROOT / "benchmarks").glob("*.py"),
    ]
    missing = {
        (str(file.relative_to(ROOT)), path)
        for file in files
        for path in named.findall(file.read_text())
        if not (ROOT / path).exists()
    }  # fmt: skip
    assert missing == set()


# ---- imports ------------------------------------------------------------------------------------


def stale_imports(text: str) -> list[str]:
    """What a file imports of this repository, also within functions, and that is not there."""
    imports = [
        (str(node.module), alias.name, node.lineno)
        for program in programs(text)
        for node in ast.walk(program)
        if isinstance(node, ast.ImportFrom) and node.level == 0
        if str(node.module).partition(".")[0] in ("meshwright", "tests")
        for alias in node.names
    ]
    return [
        f"line {line}: {name} of {module}"
        for module, name, line in imports
        if is_stale(module, name)
    ]


def is_stale(module: str, name: str) -> bool:
    for import_name in (lambda: getattr(importlib.import_module(module), name),
                        lambda: importlib.import_module(f"{module}.{name}")):  # fmt: skip
        try:
            import_name()
        except AttributeError:
            continue
        except ModuleNotFoundError as missing:
            if str(missing.name).partition(".")[0] not in ("meshwright", "tests"):
                return False  # needs a package that is not installed
            continue
        return False
    return True


def test_a_stale_import_is_found() -> None:
    text = """
from meshwright.models import save_hf
from tests import patience

def save():
    from meshwright.models.decoder.{} import {}
"""
    assert stale_imports(text.format("hf_folder", "hf_model")) == []
    assert stale_imports(text.format("hf_folder", "save_hf")) == [
        "line 6: save_hf of meshwright.models.decoder.hf_folder"
    ]
    assert stale_imports(text.format("gone", "save_hf"))


def test_every_name_that_a_script_imports_exists() -> None:
    """Scripts are seldom run, and what their functions import is not seen before that."""
    stale = {str(file.relative_to(ROOT)): stale_imports(file.read_text()) for file in SCRIPTS if file not in TESTS}  # fmt: skip
    assert {name: imports for name, imports in stale.items() if imports} == {}


# ---- packages -----------------------------------------------------------------------------------


def packages_of(extra: str) -> set[str]:
    """The packages that an extra installs, by the names of their imports; also of its extras."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    packages: set[str] = set()
    for requirement in extras[extra]:
        name, others = re.match(r"([\w.-]+)(?:\[(.*?)\])?", requirement).groups()  # type: ignore[union-attr]
        if name == "meshwright":
            packages |= set.union(*(packages_of(other) for other in others.split(",")))
        else:
            packages.add(name.lower().replace("-", "_"))
    return packages


def skipped_without(program: ast.Module) -> set[str]:
    """The packages without which tests of a file are skipped."""
    return {
        call.args[0].value.partition(".")[0]
        for call in ast.walk(program)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.importorskip"
        if isinstance(call.args[0], ast.Constant)
    }


def test_what_tests_are_skipped_without_is_installed_by_make_test_or_make_test_clients() -> None:
    of_test, of_clients = packages_of("dev"), packages_of("clients")
    run_by_clients = re.search(
        r"^test-clients:.*?\n\n", (ROOT / "Makefile").read_text(), re.M | re.S
    )
    assert run_by_clients is not None
    for file in TESTS:
        packages = skipped_without(ast.parse(file.read_text()))
        if packages <= of_test:
            continue
        name = str(file.relative_to(ROOT))
        assert packages <= of_clients, f"{name} needs {packages - of_clients}, which no extra has"
        assert name in run_by_clients[0], f"make test-clients leaves out {name}"


# ---- signals ------------------------------------------------------------------------------------


def test_processes_of_tests_hear_signals_that_a_background_shell_ignores() -> None:
    """`nohup make test &` starts with SIGHUP, SIGINT and SIGQUIT ignored, and so would they."""
    ignored = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
    child = f"import signal; print([signal.getsignal(n) is not signal.SIG_IGN for n in {[*map(int, ignored)]}])"
    program = f"""
import signal, subprocess, sys
for number in {[*map(int, ignored)]}:
    signal.signal(number, signal.SIG_IGN)
from tests.processes import hear_signals
hear_signals()
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
subprocess.run([sys.executable, "-c", {child!r}], check=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.stdout == "[True, True, True]\n", done.stderr
