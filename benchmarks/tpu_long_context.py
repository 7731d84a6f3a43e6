"""A 7B model at 1,048,576 tokens on 512 TPU v4 chips, by the real TPU compiler; no TPU is needed.

    python benchmarks/tpu_long_context.py            # prints a table
    python benchmarks/tpu_long_context.py --check    # and fails if it is not as it should be
    python benchmarks/tpu_long_context.py --write    # and puts it into RESULTS.md

The whole train step is compiled: ring attention, bfloat16 with float32 weights and moments, full
remat, packed documents. Needs libtpu (`pip install jax[tpu]`); a row takes minutes on two cores.
"""

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from results import here, write_section

MACHINE, MODEL, SEQ = "v4:8x8x8", "llama-2-7b", 2**20
LIMIT = 30.75  # GiB of a v4 chip that the compiler gives out
GIB = 2**30
# without these words libtpu looks for a TPU that is here
ABSENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclasses.dataclass(frozen=True)
class Run:
    mesh: str
    rows: int
    sequence_parallel: bool = False
    fits: bool = True  # whether it should


RUNS = [
    Run("dp=1,fsdp=1,tp=4,sp=128", rows=1),
    Run("dp=1,fsdp=1,tp=4,sp=128", rows=8),
    Run("dp=1,fsdp=8,tp=16,sp=4", rows=8, sequence_parallel=True),
    Run("dp=1,fsdp=8,tp=16,sp=4", rows=8, fits=False),
]


def compiled(run: Run) -> dict[str, Any]:
    """What the compiler says of a run: seconds, bytes, and what travels while kernels run."""
    import jax
    from jax.experimental import topologies

    from meshwright.meshes import mesh
    from meshwright.models import preset
    from meshwright.ops.rope import Rope
    from meshwright.training.abstract_step import abstract_step
    from meshwright.training.config import ComputeConfig, TrainConfig

    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=MACHINE, chip_config_name="megacore", wrap=[True] * 3
    )
    placed = mesh(run.mesh, MACHINE, list(topology.devices), axis_types="explicit")
    model = dataclasses.replace(preset(MODEL), max_seq=SEQ, rope=Rope(5e7))
    compute = ComputeConfig(remat="full", sequence_parallel=run.sequence_parallel)
    config = TrainConfig(
        MODEL, mesh=run.mesh, batch=run.rows, seq=SEQ, context_parallel="ring", compute=compute
    )
    lowered = abstract_step(config, placed, model).lower()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            program = lowered.compile(compiler_options={"xla_dump_to": folder})
        except jax.errors.JaxRuntimeError as reason:
            if "RESOURCE_EXHAUSTED" not in str(reason):
                raise
            needed = re.search(r"([\d.]+)G of [\d.]+G hbm|\(([\d.]+)G\) exceeds", str(reason))
            said = next(filter(None, needed.groups())) if needed else None
            return {"seconds": time.perf_counter() - start, "needed": said}
        seconds = time.perf_counter() - start
        (report,) = Path(folder).glob("*jit_train*memory-usage-report.txt")
        total = re.search(r"color=0\)\nTotal bytes: (\d+)", report.read_text())
    assert total is not None
    text = program.as_text()
    return {
        "seconds": seconds,
        "bytes": int(total[1]),
        "arguments": program.memory_analysis().argument_size_in_bytes,
        "hops": hops_under_kernels(text),
        "whole_rows": len(re.findall(rf"[\[,]{SEQ}[,\]]", text)),
    }


def hops_under_kernels(text: str) -> tuple[int, int]:
    """Hops of keys and of their gradients: those during which a kernel runs, and all."""
    lines = text.splitlines()
    within = ""  # which computation
    with_kernels: set[str] = set()
    for line in lines:
        if opened := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            within = opened[1]
        elif re.match(r"\s+%?splash", line):
            with_kernels.add(within)
    hidden = hops = kernels = 0
    before: dict[str, int] = {}
    for line in lines:
        chosen = re.search(r"branch_computations=\{(.*?)\}", line)
        branches = {name.strip(" %") for name in chosen[1].split(",")} if chosen else {""}
        if re.match(r"\s+%?splash", line) or branches <= with_kernels:
            kernels += 1
        elif sent := re.match(r"\s+%?(collective-permute-start[\w.\-]*) = \(\w+\[2,", line):
            before[sent[1]] = kernels
        done = re.search(r" collective-permute-done\(.*?(collective-[\w.\-]+)\)", line)
        if done and done[1] in before:
            hops += 1
            hidden += kernels > before.pop(done[1])
    return hidden, hops


def table() -> tuple[list[str], list[str]]:
    """The table, and what is not as it should be."""
    lines = [
        "| mesh | rows of 1M tokens | GiB of a chip | compiled in | hops of keys and gradients "
        "with a kernel running meanwhile | arrays with a whole row |",
        "|---|---|---|---|---|---|",
    ]
    wrong = []
    for run in RUNS:
        child = subprocess.run(
            [sys.executable, __file__, "--run", json.dumps(dataclasses.asdict(run))],
            env=os.environ | ABSENT, check=True, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        found = json.loads(child.stdout.splitlines()[-1])
        said = f"{run.mesh}{', `sequence_parallel`' if run.sequence_parallel else ''}"
        start = f"| {said} | {run.rows} |"
        if "bytes" in found:
            (hidden, hops), used = found["hops"], found["bytes"] / GIB
            rest = f" {used:.1f} | {found['seconds']:.0f} s | {hidden} of {hops} | "
            lines.append(f"{start}{rest}{found['whole_rows'] or 'none'} |")
            # but for the last one, which takes the gradients home
            if hidden != hops - 1 or found["whole_rows"]:
                wrong.append(f"{said}: {lines[-1]}")
        else:
            over = f"does not fit: {found['needed']} of temporaries"
            lines.append(f"{start} {over} | {found['seconds']:.0f} s | | |")
        if ("bytes" in found) != run.fits:
            wrong.append(f"{said}: {'fits' if 'bytes' in found else 'does not fit'}")
        print(lines[-1], flush=True)
    return lines, wrong


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(compiled(Run(**json.loads(options.run)))))
        return
    lines, wrong = table()
    print("\n".join(lines))
    if options.write:
        from importlib.metadata import version

        conditions = (
            f"`python benchmarks/tpu_long_context.py --write`, {here()}, libtpu "
            f"{version('libtpu')}. The train step of {MODEL} on {MACHINE}. The compiler gives out "
            f"{LIMIT} GiB of a chip; memory is that of its buffer assignment. Hops are counted in "
            "the program, where a loop's stand once; the one without a kernel is the last, which "
            "takes the gradients home."
        )
        write_section("7B at 1M tokens on 512 TPU v4 chips", conditions, lines)
    if options.check and wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
