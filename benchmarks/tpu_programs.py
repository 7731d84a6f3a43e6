"""TPU programs before and after a change: roofline, bytes sent and memory of the same steps.

    python benchmarks/tpu_programs.py --record before   # compiles the steps, at one commit
    python benchmarks/tpu_programs.py --record after    # and at another
    python benchmarks/tpu_programs.py --dump FOLDER --record after --step 3
    python benchmarks/tpu_programs.py --write           # puts the table into RESULTS.md

Needs libtpu to compile and no TPU. `--dump` reads a program that was compiled elsewhere, from what
XLA's `--xla_dump_to` left in a folder: its text has no cycles before code is made for it, so that
matmuls are priced at 0.9 of the peak. Steps compared with each other should be read the same way.
"""

import argparse
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from compiled_roofline import roofline
from meshwright.audits import audit
from meshwright.planner import StepModel
from meshwright.proofs import prove
from plan_against_compiler import GIB, asynchronous, case, config_of, words, workload_of
from results import origins, write_section

RECORD = Path(__file__).with_name("tpu_programs.json")
STEPS = [
    case("llama-3.1-8b", "v5p:4x4x4", "dp=1,fsdp=64,tp=1,sp=1", 64, 4096),
    case("llama-3.1-8b", "v5p:4x4x4", "dp=2,fsdp=32,tp=1,sp=1", 128, 4096, "none"),
    case("llama-3.1-8b", "v5p:4x4x4", "dp=1,fsdp=16,tp=4,sp=1", 128, 4096, "elementwise"),
    case("llama-3.1-8b", "v5p:4x4x4", "dp=1,fsdp=16,tp=1,sp=4", 16, 32768, "none"),
    case("llama-3.1-8b", "v4:4x4x4", "dp=4,fsdp=16,tp=1,sp=1", 64, 4096),
    case("llama-2-13b", "v4:4x4x4", "dp=2,fsdp=32,tp=1,sp=1", 64, 4096, "elementwise"),
    case("llama-3.2-3b", "v6e:4x4", "dp=1,fsdp=16,tp=1,sp=1", 32, 4096, "mlp"),
    case("llama-3.2-3b", "v6e:4x4", "dp=2,fsdp=8,tp=1,sp=1", 32, 4096, "none"),
    case("qwen2.5-7b", "v6e:8x8", "dp=2,fsdp=32,tp=1,sp=1", 128, 4096, accumulation=2),
    case("qwen3-8b", "v5e:8x8", "dp=2,fsdp=32,tp=1,sp=1", 64, 4096, "mlp"),
]
OVER_SHARDS = {"fsdp", "sp"}


def summary(one: dict[str, Any], text: str, total: int) -> dict[str, Any]:
    """What a compiled step takes, from its text."""
    step = StepModel(workload_of(one))
    found = audit(text, step.choice.sizes)
    sums = {
        f"{each.operation} {'+'.join(each.axes)}": each.bytes
        for each in found.by_axis()
        if each.bytes >= 2**20
    }
    taken = roofline(text, step.choice.sizes, step)
    return {
        "seconds": taken.seconds, "total": total, "sums": sums,
        "asynchronous": asynchronous(found.rows), "cycles": "estimated_cycles" in text,
    }  # fmt: skip


def of_dump(folder: Path) -> tuple[str, int]:
    """The text and the bytes of a program that XLA dumped."""
    text = next(folder.glob("*after_buffer_assignment.txt")).read_text()
    report = next(folder.glob("*memory-usage-report.txt")).read_text()
    found = re.search(r"color=0\)\nTotal bytes: (\d+)", report)
    assert found is not None
    return text, int(found[1])


def read_record() -> dict[str, dict[str, Any]]:
    record: dict[str, dict[str, Any]] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return record


def add_to_record(label: str, one: dict[str, Any], entry: dict[str, Any]) -> None:
    record = read_record()
    record.setdefault(words(one), {})[label] = entry
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(record[name])}" for name in record)
    RECORD.write_text(f"{{\n{lines}\n}}\n")


def gradients(entry: dict[str, Any]) -> str:
    """Of weights over fsdp and sp: reduce-scattered and all-reduced, in GiB."""
    parts = []
    for operation in ("reduce-scatter", "all-reduce"):
        names = (name.split(" ") for name in entry["sums"])
        sizes = [
            entry["sums"][f"{kind} {axes}"]
            for kind, axes in names
            if kind == operation and set(axes.split("+")) <= OVER_SHARDS
        ]
        parts.append(f"{sum(sizes) / GIB:.2f}")
    return " + ".join(parts)


def table(record: dict[str, dict[str, Any]]) -> list[str]:
    """A line for each step that is recorded before and after."""
    labels = ("before", "scattered", "after")
    lines = [
        "| step | roofline | scattered | and overlapped | gradients over fsdp and sp | "
        "scattered | memory | after | asynchronous |",
        f"|{'---|' * 9}",
    ]
    for one in STEPS:
        entries = record.get(words(one), {})
        if not {"before", "after"} <= entries.keys():
            continue
        before, scattered, after = (entries.get(label, entries["before"]) for label in labels)
        first = before["seconds"]
        cells = [
            words(one), f"{first:.4f} s", f"{scattered['seconds'] / first:.3f}",
            f"{after['seconds'] / first:.3f}", gradients(before), gradients(scattered),
            f"{before['total'] / GIB:.2f}", f"{after['total'] / GIB:.2f}",
            f"{100 * after['asynchronous']:.0f}%",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--record", choices=("before", "scattered", "after"))
    parser.add_argument("--dump", type=Path)
    parser.add_argument("--step", type=int, choices=range(len(STEPS)))
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(None if arguments is None else list(arguments))
    steps = STEPS if options.step is None else [STEPS[options.step]]
    for one in steps if options.record else []:
        compiled = one | {"overlap": options.overlap}
        if options.dump is None:
            proof = prove(config_of(compiled), one["on"])
            assert proof.footprint is not None
            text, total = proof.text, proof.footprint.total
            made = {"compiler": proof.compiler, "machine": proof.compiled_on, "date": proof.date}
        else:  # of another machine, perhaps
            (text, total), made = of_dump(options.dump), {}
        add_to_record(options.record, one, summary(compiled, text, total) | made)
    record = read_record()
    cycles = any(entry["cycles"] for entries in record.values() for entry in entries.values())
    made = origins(entry for entries in record.values() for entry in entries.values())
    priced = "" if cycles else " Compiled up to the assignment of buffers, so without cycles."
    said = (
        f"`python benchmarks/tpu_programs.py --write`; compiled by {made}.{priced} The roofline "
        "of the compiled program before, and of it the part that is left with gradients scattered "
        "along a dim of their own (ops/collectives.py), and with overlap, which is the default "
        "now; GiB of gradients reduce-scattered + all-reduced; GiB of memory; and of the bytes "
        "all-gathered in loops the share that is asynchronous."
    )
    lines = table(record)
    print("\n".join([said, *lines]))
    if options.write:
        write_section("TPU programs before and after", said, lines)


if __name__ == "__main__":
    main()
