"""Serving plans beside NVIDIA's AIConfigurator and published throughputs, for 8B and 70B.

    python benchmarks/serving_peers.py --aiconfigurator /tmp/venv/bin/aiconfigurator --write

AIConfigurator (`pip install aiconfigurator`, Linux on x86-64, in its own environment) searches
deployments from kernels that NVIDIA measured, for vLLM. Both are asked for the most tokens a second
of one replica with the same lengths and waits. Published results are of TensorRT-LLM, which NIM
runs, and of NIM itself, in fp8, which ours are planned with too, and of vLLM in bfloat16.
"""

import argparse
import csv
import dataclasses
import math
import subprocess
import tempfile
from pathlib import Path

from meshwright.machines import Machine
from meshwright.planner import Deployment, Load, deployments, efficiency
from meshwright.planner import load as loads
from meshwright.planner.constraints import Constraints
from meshwright.training import TrainConfig
from results import here, write_section

BATCHES = (16, 32, 64, 128, 256)
PROMPT, OUTPUT, FIRST, EACH = 1000, 200, 0.5, 0.03
SEARCHED = (  # our model, AIConfigurator's, machine, its name there
    ("llama-3.1-8b", "meta-llama/Meta-Llama-3.1-8B", "h100:1", "h100_sxm"),
    ("llama-3.1-8b", "meta-llama/Meta-Llama-3.1-8B", "h200:1", "h200_sxm"),
    ("llama-3.1-70b", "meta-llama/Meta-Llama-3.1-70B", "h100:4", "h100_sxm"),
    ("llama-3.1-70b", "meta-llama/Meta-Llama-3.1-70B", "h200:4", "h200_sxm"),
)
TENSORRT = "TensorRT-LLM 1.0, nvidia.github.io/TensorRT-LLM/performance/perf-overview.html"
VLLM = "vLLM 0.23.0, johnmusgrave.com/p/vllm-throughput-latency-sweep-on"
NIM = "NIM 1.8.0, docs.nvidia.com/nim/benchmarking/llm/1.0.0/performance"


@dataclasses.dataclass(frozen=True)
class Published:
    """Output tokens a second of all GPUs; with so many requests at a time, or as many as go."""

    model: str
    machine: str
    prompt: int
    output: int
    tokens: float
    source: str
    at_a_time: int | None = None
    dtype: str = "fp8"


PUBLISHED = (
    Published("llama-3.1-8b", "h100:1", 1000, 1000, 15220, TENSORRT),
    Published("llama-3.1-8b", "h100:1", 5000, 500, 3459, TENSORRT),
    Published("llama-3.1-8b", "h200:1", 1000, 1000, 17744, TENSORRT),
    Published("llama-3.1-8b", "h200:1", 5000, 500, 3902, TENSORRT),
    Published("llama-3.1-70b", "h100:2", 1000, 1000, 4205, TENSORRT),
    Published("llama-3.1-70b", "h100:2", 5000, 500, 898, TENSORRT),
    Published("llama-3.1-70b", "h200:1", 1000, 1000, 2909, TENSORRT),
    Published("llama-3.1-70b", "h200:1", 5000, 500, 566, TENSORRT),
    Published("llama-3.1-70b", "h100:2", 5000, 500, 51.67, NIM, 1),
    Published("llama-3.1-70b", "h100:2", 5000, 500, 218.48, NIM, 5),
    Published("llama-3.1-70b", "h100:2", 5000, 500, 623.4, NIM, 25),
    Published("llama-3.1-70b", "h100:2", 5000, 500, 814.37, NIM, 50),
    Published("llama-3.1-8b", "a100-40:1", 1024, 128, 75, VLLM, 1, "bf16"),
)


def ours(model: str, machine: str) -> Deployment:
    """The best replica on a machine; AIConfigurator's waits are averages, so p50."""
    asked = Load(1000, PROMPT, OUTPUT, FIRST, EACH, percentile=50, spread=0.0)
    config = TrainConfig(model)
    return deployments(config, [Machine.parse(machine)], asked, batches=BATCHES).best


def theirs(aiconfigurator: str, model: str, machine: str, system: str) -> dict[str, str]:
    """AIConfigurator's first deployment of one replica on as many GPUs."""
    chips = Machine.parse(machine).num_chips
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [
                aiconfigurator, "cli", "default", "--model-path", model, "--system", system,
                "--total-gpus", str(chips), "--serving-mode", "agg", "--backend", "vllm",
                "--isl", str(PROMPT), "--osl", str(OUTPUT), "--ttft", str(1e3 * FIRST),
                "--tpot", str(1e3 * EACH), "--save-dir", folder,
            ],
            check=True, capture_output=True,
        )  # fmt: skip
        (found,) = Path(folder).rglob("best_config_topn.csv")
        with found.open() as file:
            return next(csv.DictReader(file))


def steady(one: Published) -> tuple[float, int]:
    """Output tokens a second of our engine with its batch always full, and the largest batch."""
    asked = Load(1.0, one.prompt, one.output, spread=0.0)
    kept = "fp8" if one.dtype == "fp8" else None
    fixed = {"weights": kept, "cache": kept}
    best, batch = 0.0, 0
    for size in (one.at_a_time,) if one.at_a_time else (1024, 512, 256, 128, 64, 32, 16, 8, 4):
        config = TrainConfig(one.model, batch=size, seq=asked.longest)
        limits = Constraints(fixed=fixed)
        found = loads._replica(config, Machine.parse(one.machine), limits)
        if not isinstance(found, str):
            rate = one.output * found.costs.highest_rate(one.prompt, one.output)
            best, batch = max((best, batch), (rate, size))
    return best, batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--aiconfigurator", default="aiconfigurator")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    version = subprocess.run(
        [str(Path(given.aiconfigurator).with_name("pip")), "show", "aiconfigurator"],
        capture_output=True, text=True, check=False,
    ).stdout.splitlines()[1:2]  # fmt: skip
    lines = [
        "| model | GPUs | tokens/s a GPU: plan | AIConfigurator | ratio | batch: plan | theirs | "
        "first token: plan | theirs |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for model, name, machine, system in SEARCHED:
        one, other = ours(model, machine), theirs(given.aiconfigurator, name, machine, system)
        rate = one.highest_rate * OUTPUT / one.machine.num_chips
        peer = float(other["tokens/s/gpu"])
        first = one.waits.first_token(50)
        lines.append(
            f"| {model} | {machine} | {rate:,.0f} | {peer:,.0f} | {rate / peer:.2f} | "
            f"{one.max_batch} | {float(other['concurrency']):.0f} | {1e3 * first:.0f} ms | "
            f"{float(other['ttft']):.0f} ms |"
        )
        print(lines[-1], flush=True)
    lines += [
        "",
        "| model | GPUs | prompt / answer | at a time | published tokens/s | plan | ratio | "
        "host's part of the plan | source |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    ratios = []
    for each in PUBLISHED:
        rate, batch = steady(each)
        ratios.append(rate / each.tokens)
        lines.append(
            f"| {each.model} | {each.machine} | {each.prompt} / {each.output} | "
            f"{each.at_a_time or f'all (plan: {batch})'} | {each.tokens:,.0f} | {rate:,.0f} | "
            f"{ratios[-1]:.2f} | {rate * efficiency.SERVED_TOKEN:.0%} | {each.source} |"
        )
        print(lines[-1], flush=True)
    mean = math.exp(sum(math.log(ratio) for ratio in ratios) / len(ratios))
    print(f"geometric mean {mean:.2f}")
    if given.write:
        which = " ".join(version) or "Version: unknown"
        intro = (
            f"One replica, most output tokens a second: prompts of {PROMPT:,} tokens and answers "
            f"of {OUTPUT}, {1e3 * FIRST:.0f} ms to the first token and {1e3 * EACH:.0f} ms between "
            f"tokens on average, bfloat16. AIConfigurator ({which}) for vLLM from NVIDIA's "
            f"measured kernels; ours is a plan of our engine, none of it measured on these "
            f"machines but one H200 with 8B. Then published throughputs, in fp8 but for vLLM's, "
            f"beside plans with weights and cache in the same dtype and the batch always full "
            f"(geometric mean of the ratios {mean:.2f}). Known differences, none of "
            f"them isolated by a measurement: an answer's token takes "
            f"{1e6 * efficiency.SERVED_TOKEN:.0f} µs of our server's host beside the devices' "
            f"work (its part of the time is in the table), AIConfigurator counts no such time; "
            f"with tp, ours multiplies in fp8 only what is not summed over devices; ours has "
            f"requests at random times, AIConfigurator a fixed number at "
            f"a time. {here()}."
        )
        write_section("Serving plans beside AIConfigurator, TensorRT-LLM and NIM", intro, lines)


if __name__ == "__main__":
    main()
