"""The public surface: what it names, and what importing it needs."""

import subprocess
import sys

import meshwright as mw


def test_every_public_name_is_there_and_documented() -> None:
    for name in mw.__all__:
        thing = getattr(mw, name)
        written = thing.__doc__ and not thing.__doc__.startswith(f"{name}(")
        assert name == "CHIPS" or written, name


def test_a_mistake_is_a_value_error() -> None:
    assert issubclass(mw.MeshwrightError, ValueError)


def test_importing_needs_jax_and_numpy_only() -> None:
    """Some machines have neither tyro nor rich nor grain: the core must work there."""
    blocked = [
        "tyro",
        "rich",
        "jinja2",
        "grain",
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


def test_nothing_below_imports_what_is_above_it() -> None:
    """pages, machines, mesh, layout, ops, models, train, serve, evaluate, audit, plan, prove, show, cli."""
    from pathlib import Path

    order = ["pages", "machines", "mesh", "layout", "ops", "models", "train", "serve", "evaluate"]
    order += ["audit", "plan", "prove", "show", "cli"]
    source = Path(mw.__file__).parent
    for i, part in enumerate(order):
        for file in (source / part).rglob("*.py"):
            text = file.read_text()
            for above in order[i + 1 :]:
                assert f"meshwright.{above}" not in text, f"{file} imports {above}"
