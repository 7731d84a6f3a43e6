"""fp8 against bfloat16 training on real text: final evaluation losses, seed by seed.

    python benchmarks/real_text.py build FOLDER       # text of packages, packed (real_text_corpus)
    python benchmarks/real_text.py run FOLDER         # on one GPU: 3 seeds x auto, fp8
    python benchmarks/real_text.py report --write     # table, curves, and the page that shows them

`run` starts `meshwright train` for each seed and matmul: the flags below, 2,000 steps of 8 x 1,024
tokens, less than one epoch. Both matmuls of a seed have the same initial weights and the same order
of data. Results are kept after each run in benchmarks/real_text.json, and a run that is there is
not run again. The last 96 sequences of the store are held out and evaluated each 100 steps.
"""

import argparse
import datetime
import itertools
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from line_chart import BLUE, ORANGE, Curve, Panel, line_charts
from results import write_section

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).with_suffix(".json")
PICTURE = ROOT / "docs/images/fp8_real_text.svg"
PAGE = ROOT / "docs/train/train.md"
SECTION = "fp8 against bfloat16 on real text"
MARKS = "<!-- fp8 on real text: written by benchmarks/real_text.py -->", "<!-- end -->"

BF16, FP8 = "auto", "fp8"  # values of --compute.matmul; auto multiplies in --compute.dtype
LIMIT = 0.5  # percent between final evaluation losses
MODEL = [
    "llama-3-8b", "--override", "layers=12", "embed=768", "heads=12", "kv_heads=4", "head_dim=64",
    "mlp=3072", "vocab=16384",
]  # fmt: skip
TRAINING = [
    "--batch", "8", "--seq", "1024", "--compute.dtype", "bfloat16",
    "--optimizer.learning-rate", "6e-4", "--optimizer.schedule", "cosine",
    "--eval.every", "100", "--eval.sequences", "96", "--checkpoint.every", "1000000",
]  # fmt: skip
SEED_COLOURS = (BLUE, ORANGE, "#0f766e", "#7c3aed")
MEAN_OF = 20  # steps of training whose mean loss is kept
TOLD = ("layers:", "attention", "compiled in")  # how lines of a log begin that are kept


def train_flags(steps: int, extra: str) -> list[str]:
    """The words of `meshwright train` that all runs share."""
    return [*MODEL, *TRAINING, "--steps", str(steps), *shlex.split(extra)]


def train(
    store: Path, flags: Sequence[str], seed: int, matmul: str, at_once: int
) -> dict[str, Any]:
    """One run of the command in a process and a folder of its own; what it did."""
    from meshwright.training.run import read_metrics

    code = "from meshwright.cli.main import main; main()"
    own = ["--seed", str(seed), "--compute.matmul", matmul]
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        words = ["train", *flags, *own, "--data", str(store), "--run", str(run)]
        done = subprocess.run(
            [sys.executable, "-c", code, *words],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": str(round(0.9 / at_once, 3))},
        )  # fmt: skip
        not_finite = "not finite" in done.stdout
        if done.returncode and not not_finite:
            raise SystemExit(done.stdout[-6000:])
        metrics = read_metrics(run)
        about = json.loads((run / "run.json").read_text())
    _, losses = metrics.column("loss")
    _, seconds = metrics.column("step_seconds")
    return {
        "seed": seed,
        "matmul": matmul,
        "losses": [
            [begin + MEAN_OF, round(statistics.fmean(losses[begin : begin + MEAN_OF]), 5)]
            for begin in range(0, len(losses) - MEAN_OF + 1, MEAN_OF)
        ],
        "eval_losses": [list(one) for one in zip(*metrics.column("eval_loss"), strict=True)],
        "not_finite": not_finite,
        "steps_per_second": round(1 / statistics.median(seconds), 2) if seconds else None,
        "wall_seconds": round(time.perf_counter() - start, 1),
        "log": [line for line in done.stdout.splitlines() if line.startswith(TOLD)],
        "parameters": about["parameters"],
        "machine": about["machine"],
    }


def run(options: argparse.Namespace) -> None:
    """All runs that the record lacks, each written down as soon as it is done."""
    import jax

    flags = train_flags(options.steps, options.flags)
    record: dict[str, Any] = {"flags": flags, "jax": jax.__version__, "runs": []}
    if options.out.exists():
        record = json.loads(options.out.read_text())
        if record["flags"] != flags:
            raise SystemExit(
                f"{options.out} has runs with other flags, {shlex.join(record['flags'])}; "
                "give another --out"
            )
    there = {(one["seed"], one["matmul"]) for one in record["runs"]}
    seeds = map(int, options.seeds.split(","))
    wanted = itertools.product(seeds, options.matmul.split(","))
    store, at_once = options.folder / "text.store", options.at_once
    if not store.exists():
        raise SystemExit(f"no {store}: python benchmarks/real_text.py build {options.folder}")
    with ThreadPoolExecutor(at_once) as pool:
        runs = [
            pool.submit(train, store, flags, seed, matmul, at_once)
            for seed, matmul in wanted if (seed, matmul) not in there
        ]  # fmt: skip
        for done in as_completed(runs):
            if done.exception():
                pool.shutdown(wait=False, cancel_futures=True)  # those that run are recorded
                continue
            result = done.result()
            record["runs"].append(result)
            new = options.out.with_suffix(".new")  # whole, even if it is ended while writing
            new.write_text(json.dumps(record) + "\n")
            new.replace(options.out)
            print(
                f"seed {result['seed']} {result['matmul']}: evaluation "
                f"{result['eval_losses'][-1:]}, {result['steps_per_second']} steps/s, "
                f"{result['wall_seconds']} s",
                flush=True,
            )

    for done in runs:
        if not done.cancelled() and (problem := done.exception()):
            raise problem


def final_loss(run: Mapping[str, Any], steps: int) -> float | None:
    """Evaluation loss of the last step. None, a divergence: a loss was not finite, the last step
    was not reached, or its evaluation is worse than the first."""
    evaluations = [(step, float(loss)) for step, loss in run["eval_losses"]]
    if run["not_finite"] or not evaluations or evaluations[-1][0] != steps:
        return None
    return evaluations[-1][1] if evaluations[-1][1] <= evaluations[0][1] else None  # nan: None


def difference(bf16: float, fp8: float) -> float:
    """Percent by which the loss with fp8 is above the one with bfloat16."""
    return 100 * (fp8 / bf16 - 1)


def last_losses(run: Mapping[str, Any]) -> float:
    """The mean training loss of the last 500 steps."""
    return statistics.fmean(loss for _, loss in run["losses"][-500 // MEAN_OF :])


def pairs(record: Mapping[str, Any]) -> dict[int, tuple[dict[str, Any], dict[str, Any]]]:
    """By seed, the runs with bfloat16 and with fp8, where both are there."""
    found = {(one["seed"], one["matmul"]): one for one in record["runs"]}
    seeds = sorted({seed for seed, _ in found})
    return {
        seed: (found[seed, BF16], found[seed, FP8])
        for seed in seeds
        if {(seed, BF16), (seed, FP8)} <= found.keys()
    }


def number_of(record: Mapping[str, Any], flag: str) -> int:
    """The value of a flag; where it was given again, the last one is the one that counts."""
    flags = record["flags"]
    return int(flags[len(flags) - flags[::-1].index(flag)])


def table(record: Mapping[str, Any]) -> tuple[list[str], float | None]:
    """Lines of the table, and the largest difference; None if a run diverged."""
    lines = [
        "| seed | bfloat16 | fp8 | difference | of training, last 500 steps |",
        "|---|---|---|---|---|",
    ]
    finals, runs = list[tuple[float, float]](), pairs(record)
    for seed, both in runs.items():
        bf16, fp8 = (final_loss(one, number_of(record, "--steps")) for one in both)
        percent = ""
        if bf16 is not None and fp8 is not None:
            finals.append((bf16, fp8))
            off = difference(bf16, fp8)
            percent = f"{off:+.2f}%" + ("" if abs(off) <= LIMIT else f" **(limit {LIMIT}%)**")
        shown = ["**diverged**" if loss is None else f"{loss:.4f}" for loss in (bf16, fp8)]
        training = difference(*map(last_losses, both))
        lines.append(f"| {seed} | {' | '.join(shown)} | {percent} | {training:+.2f}% |")
    if len(finals) < len(runs):
        return lines, None
    bf16, fp8 = (statistics.fmean(column) for column in zip(*finals, strict=True))
    lines.append(f"| mean | {bf16:.4f} | {fp8:.4f} | {difference(bf16, fp8):+.2f}% | |")
    return lines, max(abs(difference(*both)) for both in finals)


def curves(record: Mapping[str, Any]) -> str:
    """Evaluation losses of all runs, and the difference of each seed, as SVG."""
    losses, differences = [], []
    for seed, (bf16, fp8) in pairs(record).items():
        before, after = (
            {int(step): float(loss) for step, loss in one["eval_losses"]} for one in (bf16, fp8)
        )
        losses += [
            Curve("bfloat16", BLUE, list(before.items())),
            Curve("fp8", ORANGE, list(after.items())),
        ]
        shared = sorted(before.keys() & after.keys())
        off = [(float(step), difference(before[step], after[step])) for step in shared]
        differences.append(Curve(f"seed {seed}", SEED_COLOURS[seed % len(SEED_COLOURS)], off))
    return line_charts(
        [
            Panel("evaluation loss by step", losses),
            Panel("fp8 over bfloat16, and the limits", differences, (-LIMIT, LIMIT), "%"),
        ]
    )


def conditions(record: Mapping[str, Any]) -> str:
    first = record["runs"][0]
    batch, seq, steps = (number_of(record, flag) for flag in ("--batch", "--seq", "--steps"))
    return (
        f"`python benchmarks/real_text.py report --write`, {datetime.date.today()}, "
        f"{first['machine']}, jax {record['jax']}: {first['parameters']} parameters, "
        f"{steps:,} steps of {batch} × {seq:,} tokens of documentation and source code "
        f"(`benchmarks/real_text_corpus.py`), AdamW, cosine. Final evaluation loss; limit of the "
        f"difference {LIMIT}%."
    )


def page_lines(record: Mapping[str, Any], largest: float | None) -> list[str]:
    """What the page says: a sentence and the picture."""
    result = "At least one run diverged"
    if largest is not None:
        steps = number_of(record, "--steps")
        offs = [
            difference(*(final_loss(one, steps) or math.nan for one in both))
            for both in pairs(record).values()
        ]
        low, high = min(offs), max(offs)
        if high <= 0:
            how = f"{-high:.2f}% to {-low:.2f}% lower than"
        elif low >= 0:
            how = f"{low:.2f}% to {high:.2f}% higher than"
        else:
            how = f"between {-low:.2f}% lower and {high:.2f}% higher than"
        result = f"With fp8 the final evaluation loss was {how} with bfloat16"
    runs, steps = len(pairs(record)), number_of(record, "--steps")
    return [
        f"{result}: a model of {record['runs'][0]['parameters']} parameters, "
        f"{runs} seeds, {steps:,} steps on documentation and source code of Python packages",
        "([table](../../benchmarks/RESULTS.md#fp8-against-bfloat16-on-real-text), "
        "`benchmarks/real_text.py`). Along the way single evaluations differ by more, either way. "
        "Other models and longer runs were not measured.",
        "",
        f"![Evaluation loss by step with bfloat16 and fp8](../images/{PICTURE.name})",
    ]


def between_marks(text: str, lines: Sequence[str]) -> str:
    """The page with these lines in place of what was between the marks."""
    before, _, rest = text.partition(MARKS[0])
    _, found, after = rest.partition(MARKS[1])
    if not found:
        raise SystemExit(f"{PAGE} lacks the marks {' … '.join(MARKS)}")
    return "\n".join([before + MARKS[0], *lines, MARKS[1] + after])


def report(options: argparse.Namespace) -> int:
    record = json.loads(options.record.read_text())
    if not pairs(record):
        raise SystemExit(f"{options.record} has no seed with both {BF16} and {FP8} yet")
    lines, largest = table(record)
    print("\n".join([conditions(record), "", *lines]))
    if options.write:
        write_section(SECTION, conditions(record), lines)
        PICTURE.write_text(curves(record))
        PAGE.write_text(between_marks(PAGE.read_text(), page_lines(record, largest)))
    return 0 if largest is not None and largest <= LIMIT else 1


def build(options: argparse.Namespace) -> None:
    from real_text_corpus import build as build_store

    store = build_store(options.folder)
    print(f"{store.path}: {len(store.tokens):,} tokens, {store.documents:,} documents")


def main() -> int | None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    builds = commands.add_parser("build", help="fetch, tokenize and pack the text")
    builds.add_argument("folder", type=Path)
    builds.set_defaults(work=build)
    runs = commands.add_parser("run", help="train with both matmuls")
    runs.add_argument("folder", type=Path, help="made by build")
    runs.add_argument("--seeds", default="0,1,2")
    runs.add_argument("--matmul", default=f"{BF16},{FP8}")
    runs.add_argument("--steps", type=int, default=2000)
    runs.add_argument("--flags", default="", help="more flags of meshwright train")
    runs.add_argument("--at-once", type=int, default=3, help="runs that share the GPU")
    runs.add_argument("--out", type=Path, default=RECORD)
    runs.set_defaults(work=run)
    reports = commands.add_parser("report", help="print the table")
    reports.add_argument("record", type=Path, nargs="?", default=RECORD)
    reports.add_argument("--write", action="store_true", help="RESULTS.md, the picture, the page")
    reports.set_defaults(work=report)
    options = parser.parse_args()
    status: int | None = options.work(options)
    return status


if __name__ == "__main__":
    sys.exit(main())
