"""`meshwright export`: the model of a run as a folder that transformers or PEFT reads."""

from typing import Any, Literal

import tyro


def export(
    run: tyro.conf.Positional[str],
    out: tyro.conf.Positional[str],
    /,
    *,
    step: int | None = None,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    merge: bool = False,
    adapter: str | None = None,
    mesh: str = "dp=1,fsdp=1,tp=1,sp=1",
    cpu_devices: int | None = None,
) -> None:
    """Write the model of a run as a folder that transformers reads, or an adapter for PEFT.

    meshwright export runs/first exported

    Args:
        run: Folder of a run (or of a Hugging Face model, or its name on the Hub).
        out: Folder to write; it must be new or empty.
        step: Step of the checkpoint; the latest by default.
        dtype: Data type of the weights.
        merge: Of a run with LoRA, the whole model with the adapter merged into it.
        adapter: With --merge, the adapter: a folder of PEFT or of a run, or a name on the Hub.
        mesh: Mesh axes and sizes, for a model that one device cannot hold: fsdp=-1.
        cpu_devices: Simulate this number of devices on the CPU.
    """
    from meshwright.launch import make_room_for_cpu_collectives, simulate_devices
    from meshwright.serving import export as write

    make_room_for_cpu_collectives()
    if cpu_devices is not None:
        simulate_devices(cpu_devices)
    named: dict[str, Any] = {"step": step, "dtype": dtype, "merge": merge, "adapter": adapter}
    print(f"wrote {write(run, out, mesh=mesh, **named)}")
