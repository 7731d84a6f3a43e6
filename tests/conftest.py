"""All tests run on 16 simulated CPU devices, with jax in its strictest mode."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

# what one test compiles serves the others, and the processes they start; before jax is imported
CACHE = Path(__file__).parents[1] / ".pytest_cache" / "compiled"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")
# no test reaches the Hugging Face Hub; those of it start a server of their own
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# nor need each process compile the sources of this package
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# most of the time of a test is compiling: LLVM without its slow passes takes less than half of it,
# and fusions emitted in LLVM's IR, not through MLIR's dialects, a third of that (jax up to 0.11;
# later ones do not know the option, and take no notice)
FAST = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters=true",
    "--xla_cpu_parallel_codegen_split_count=1",
)
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FAST])

import jax
import pytest
from hypothesis import settings
from tests.forked import Commands, shared_commands
from tests.processes import hear_signals

from meshwright.launch.cpu import make_room_for_cpu_collectives
from meshwright.machines import Machine
from meshwright.ops import mosaic

hear_signals()
make_room_for_cpu_collectives()
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 16)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection() -> None:
    gc.disable()  # all that collecting makes is kept


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # tracing makes many objects, few of them in cycles


@pytest.fixture(scope="module")
def fast_proofs() -> Iterator[None]:
    """Proofs leave XLA_FLAGS out, which say nothing of another machine; here CPUs' have them."""
    from meshwright.proofs import proof, target

    def environment(machine: Machine) -> dict[str, str]:
        flags = {"XLA_FLAGS": os.environ["XLA_FLAGS"]} if machine.chip.platform == "cpu" else {}
        return target.child_environment(machine) | flags

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(proof, "child_environment", environment)
        yield


@pytest.fixture(scope="session")
def commands() -> Commands:
    return shared_commands()


@pytest.fixture
def eight() -> list[jax.Device]:
    return jax.devices()[:8]


@pytest.fixture
def pretended_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of our own are taken, and can be lowered but not run; whatever the version of jax."""
    monkeypatch.setattr(mosaic, "current_device", lambda: ("cuda", "NVIDIA H200"))
    monkeypatch.setattr(mosaic, "OLDEST", (0, 0))


settings.register_profile("meshwright", deadline=None, derandomize=True, max_examples=200)
settings.load_profile("meshwright")
