"""The public surface: what it names, and what importing it needs."""

import ast
import re
import subprocess
import sys
import tomllib
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import meshwright as mw

SOURCE = Path(mw.__file__).parent


def test_every_public_name_is_there_and_documented() -> None:
    for name in mw.__all__:
        thing = getattr(mw, name)
        written = thing.__doc__ and not thing.__doc__.startswith(f"{name}(")
        assert name == "CHIPS" or written, name


def test_editors_know_what_plan_and_prove_return() -> None:
    def returned(function: Callable[..., object]) -> list[object]:
        return [one.__annotations__["return"] for one in typing.get_overloads(function)]

    assert returned(mw.plan) == [mw.ProgramPlan, mw.Plan]
    assert returned(mw.prove) == [mw.ProgramProof, mw.Proof]


def test_a_mistake_is_a_value_error() -> None:
    assert issubclass(mw.MeshwrightError, ValueError)


def test_importing_needs_jax_and_numpy_only() -> None:
    """Some machines have neither tyro nor rich nor optax: the core must work there."""
    blocked = [
        "tyro",
        "rich",
        "jinja2",
        "optax",
        "orbax",
        "safetensors",
        "tokenizers",
        "flax",
    ]
    code = f"""
import sys
for name in {blocked!r}:
    sys.modules[name] = None
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 8)
import meshwright as mw
from meshwright.models import abstract_arrays, decoder_rules, preset
mesh = mw.mesh("dp=1,fsdp=2,tp=4,sp=1")
mw.shard(np.ones((8, 8)), "a b -> a@fsdp b@tp", mesh=mesh)
table = mw.explain(abstract_arrays(preset("tiny")), decoder_rules(), mesh)
table.data(), table.markdown()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# a package may import only what stands before it, and only from a package's __init__
ORDER = [
    "lazy",
    "interrupt",
    "errors",
    "files",
    "arithmetic",
    "present",
    "hub",
    "machines",
    "meshes",
    "layouts",
    "ops",
    "models",
    "data",
    "launch",
    "checkpoint",
    "training",
    "serving",
    "evaluate",
    "audits",
    "planner",
    "proofs",
    "show",
    "testing",
    "torch",
    "api",
    "cli",
]


def imports(file: Path) -> Iterator[str]:
    """The modules of meshwright that a file imports."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)


def source_files() -> list[Path]:
    return [file for file in sorted(SOURCE.rglob("*.py")) if file.parent != SOURCE]


@pytest.mark.parametrize("file", source_files(), ids=lambda file: str(file.relative_to(SOURCE)))
def test_imports_go_one_way_and_through_packages(file: Path) -> None:
    own = file.relative_to(SOURCE).parts[0]
    for module in imports(file):
        names = module.split(".")
        if names[0] != "meshwright" or len(names) == 1 or names[1] == own:
            continue
        assert ORDER.index(names[1]) < ORDER.index(own), f"{own} imports {module}"
        found = SOURCE.joinpath(*names[1:])
        top_level = len(names) == 2  # errors.py and the like
        assert found.is_dir() or top_level, f"import from the package, not from {module}"


@pytest.mark.parametrize("package", ["machines", "meshes", "layouts"])
def test_one_file_of_a_package_for_any_backend_imports_jax(package: str) -> None:
    files = [
        file.name
        for file in sorted((SOURCE / package).rglob("*.py"))
        if any(module.split(".")[0] == "jax" for module in imports(file))
    ]
    assert len(files) == 1, files


def test_layouts_work_where_jax_is_not_installed() -> None:
    code = """
import sys
sys.modules["jax"] = sys.modules["ml_dtypes"] = sys.modules["rich"] = None
import numpy as np
import meshwright as mw
from meshwright import layouts, machines, meshes
spec = mw.MeshSpec.parse("dp=2,fsdp=-1,tp=2").resolve(8)
arrays = {"w": mw.ArraySpec((8, 4), "embed mlp"), "norms": [mw.ArraySpec((8,), "embed")]}
rules = mw.Rules([("embed", "fsdp"), ("mlp", "tp")])
placed = mw.layout_tree(arrays, rules, mesh=spec)
assert str(placed["w"]) == "embed mlp -> embed@fsdp mlp@tp"
assert placed["norms"][0].axes == (("fsdp",),)
slices = placed["w"].slices((8, 4), spec.shape)
assert slices.shape == (2, 2, 2)
assert slices[0, 1, 1] == (slice(4, 8), slice(2, 4))
whole, parts = np.arange(32).reshape(8, 4), {}
for place in np.ndindex(*slices.shape):
    parts[place[1:]] = whole[slices[place]]
joined = np.block([[parts[0, 0], parts[0, 1]], [parts[1, 0], parts[1, 1]]])
assert (joined == whole).all()
by_path = mw.PathRules([("w", ("fsdp", "tp")), (".*", ())])
assert mw.layout_tree(arrays, by_path, mesh=spec)["w"].axes == (("fsdp",), ("tp",))
on_gpus = mw.mesh("fsdp=2,tp=4", machine="h100:8")
assert on_gpus.devices[1, 0].id == 4
table = mw.explain(arrays, rules, on_gpus)
print(table)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "norms/0" in done.stdout
    assert "embed@fsdp mlp@tp" in done.stdout


# more than 8 parameters, and why
MANY_PARAMETERS = {
    "ops/attention/ring_steps.py:gradients_of_ring_step": "a kernel: what a ring step holds",
    "ops/attention/attention.py:attention": "what models differ in, by keyword",
    "ops/attention/paged.py:paged_attention": "what models differ in, by keyword",
    "ops/experts_triton.py:top_experts": "a kernel: what routers differ in, by keyword",
    "ops/cross_entropy.py:cross_entropy": "what models differ in, by keyword",
    "serving/model.py:load": "mw.load: settings of a user, by keyword",
    "planner/load.py:deployments": "settings of a user, by keyword",
    "planner/planner.py:plan": "mw.plan: settings of a user, by keyword",
    "training/step.py:step_functions": "settings of a run, by keyword",
    "torch/parallelize.py:parallelize": "mw.torch.parallelize: settings of a user, by keyword",
    "models/decoder/presets.py:_qwen": "a table of presets, one line each",
}


def test_functions_have_at_most_eight_parameters() -> None:
    many = set()
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            names = [a.arg for a in (*node.args.args, *node.args.kwonlyargs)]
            if len([name for name in names if name not in ("self", "cls")]) > 8:
                many.add(f"{file.relative_to(SOURCE)}:{node.name}")
    assert many <= MANY_PARAMETERS.keys(), many - MANY_PARAMETERS.keys()


def test_every_package_has_its_place() -> None:
    there = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert there - {"__init__", "__main__", "__pycache__", "py"} == set(ORDER)


def test_what_src_does_not_import_is_not_a_dependency() -> None:
    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [
        *project["dependencies"],
        *extras["track"],
        *extras["parquet"],
        *extras["serve"],
        *extras["hub"],
        *extras["eval"],
        *extras["torch"],
    ]
    text = "\n".join(file.read_text() for file in SOURCE.rglob("*.py"))
    for requirement in wanted:
        package = re.split(r"[<>=\[]", requirement)[0]
        module = package.replace("orbax-checkpoint", "orbax.checkpoint").replace("-", "_")
        imported = rf"^\s*(import|from) {module}\b|import_module\(\"{module}|\"{module}[\".]"
        assert re.search(imported, text, re.MULTILINE), f"nothing imports {package}"


def test_a_package_imports_its_names_when_they_are_used() -> None:
    code = """
import sys
import meshwright.training
assert "jax" not in sys.modules
assert {"TrainConfig", "prepare", "abstract_step"} <= set(dir(meshwright.training))
import meshwright.training.prepare  # Python sets a submodule as an attribute of its package
from meshwright.training import prepare, train
assert callable(prepare) and callable(train)
try:
    meshwright.training.nothing
except AttributeError as mistake:
    print(mistake)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "module 'meshwright.training' has no attribute 'nothing'" in done.stdout
