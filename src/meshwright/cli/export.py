"""`meshwright export`: the model of a run as a folder that transformers or PEFT reads."""

import dataclasses
from typing import Any, Literal

from meshwright.cli.flags import simulate


@dataclasses.dataclass(frozen=True)
class ExportSettings:
    run: str
    """Folder of a run (or of a Hugging Face model, or its name on the Hub)."""
    out: str
    """Folder to write; it must be new or empty."""
    step: int | None = None
    """Step of the checkpoint; the latest by default."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Data type of the weights."""
    merge: bool = False
    """Of a run with LoRA, the whole model with the adapter merged into it."""
    adapter: str | None = None
    """With --merge, the adapter: a folder of PEFT or of a run, or a name on the Hub."""
    mesh: str = "dp=1,fsdp=1,tp=1,sp=1"
    """Mesh axes and sizes, for a model that one device cannot hold: fsdp=-1."""
    cpu_devices: int | None = None
    """Simulate this number of devices on the CPU."""


def export(settings: ExportSettings) -> None:
    """Write the model of a run as a folder that transformers reads, or an adapter for PEFT.

    meshwright export runs/first exported
    """
    from meshwright.serving import export as write

    simulate(settings.cpu_devices)
    named: dict[str, Any] = {
        name: getattr(settings, name) for name in ("step", "dtype", "merge", "adapter", "mesh")
    }
    print(f"wrote {write(settings.run, settings.out, **named)}")
