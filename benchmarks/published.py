"""Published training results beside the plan: of our own step, and `--like` the stack that ran it.

    python benchmarks/published.py            # prints the table
    python benchmarks/published.py --write    # and puts it into RESULTS.md
    python benchmarks/published.py --fit      # the numbers of planner/stacks.py, from half of them

benchmarks/published.json has a line for each result: stack, model, machine, batch, sequence length,
settings as far as they are published, tokens a second and chip (`said`: as published), what is
`assumed`, the `source`, and the `half` it belongs to. Numbers are fitted to `fit` results alone and
judged by the others. Where no mesh is published, or one with pipeline stages, the plan's fastest
counts; `pipeline` (stages, micro-batches) takes off the bubble of 1F1B.

Mixtures of experts are in benchmarks/published_experts.json. No number is fitted to them, and
`--like` refuses them: they stand beside our own step alone, with an even load, as in the synthetic
data and the forced balance of those who published. `between`: the ratios that a test allows.
"""

import argparse
import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from meshwright import Machine, TrainConfig
from meshwright.planner import StepModel, Workload, constraints_of
from meshwright.planner.fastest import fastest
from meshwright.planner.search import Candidate
from meshwright.planner.stacks import LONG, OURS, RECOMPUTES, STACKS, Results, Stack, like
from meshwright.planner.time import step_time
from meshwright.training import with_settings
from results import here, write_section

RECORD = Path(__file__).with_name("published.json")
EXPERTS = Path(__file__).with_name("published_experts.json")
SETTINGS = {
    "matmul": "compute.matmul", "remat": "compute.remat", "param_dtype": "compute.param_dtype",
    "accumulation": "accumulation",
}  # fmt: skip
WITHIN = {"bf16": 0.10, "fp8": 0.15, "long": 0.15}
WANTED = {"bf16": 0.90, "fp8": 0.75, "long": 0.75}


def results(record: Path = RECORD) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(record.read_text())
    return found


def kind(one: dict[str, Any]) -> str:
    """bf16, fp8, or long for long contexts in either."""
    return "long" if one["seq"] >= LONG else one.get("matmul", "bf16")


def stack_of(one: dict[str, Any]) -> Stack:
    return like(one["stack"], Machine.parse(one["on"]).chip, one.get("matmul", ""), one["seq"])


def planned(one: dict[str, Any], stack: Stack) -> Candidate | None:
    """The fastest way of a plan with the settings of a result; None if nothing fits."""
    given = {name: one[key] for key, name in SETTINGS.items() if key in one}
    config = TrainConfig(one["model"], batch=one["batch"], seq=one["seq"])
    config = with_settings(config, given)
    workload = Workload.of(config, Machine.parse(one["on"]))
    limits = constraints_of(config, set(given), one.get("mesh"))
    return fastest(dataclasses.replace(workload, like=stack), limits)


def tokens(one: dict[str, Any], seconds: float) -> float:
    """Tokens a second and chip of a step."""
    stages, micro_batches = one.get("pipeline", (1, 1))
    busy = micro_batches / (micro_batches + stages - 1)
    chips: int = Machine.parse(one["on"]).num_chips
    return busy * one["batch"] * one["seq"] / seconds / chips


class Judged(NamedTuple):
    """A result with the plan of our own step and of its stack; None where nothing fits."""

    result: dict[str, Any]
    ours: float | None  # tokens a second and chip
    like: float | None

    def off(self, value: float | None) -> float:
        """How far a plan is from what is published, of that."""
        return math.inf if value is None else value / self.result["tokens"] - 1


def judge(one: dict[str, Any], ours: bool = True) -> Judged:
    """`ours`: with the plan of our own step too."""
    ways = [planned(one, OURS) if ours else None, planned(one, stack_of(one))]
    return Judged(one, *(None if way is None else tokens(one, way.seconds) for way in ways))


def within(judged: Iterable[Judged], of: str, half: str = "") -> tuple[int, int]:
    """How many results of a kind are planned within its limit, like their stack; and of how many.

    `half`: only those.
    """
    alike = [each for each in judged if kind(each.result) == of]
    alike = [each for each in alike if half in ("", each.result["half"])]
    return sum(abs(each.off(each.like)) <= WITHIN[of] for each in alike), len(alike)


def notes(one: dict[str, Any]) -> str:
    """The settings of a result, and what is assumed."""
    settings = [one["mesh"]] if "mesh" in one else ["fastest mesh"]
    settings += [f"remat={one['remat']}"] if "remat" in one else []
    return "; ".join([", ".join(settings), *([one["assumed"]] if "assumed" in one else [])])


def table(judged: Sequence[Judged]) -> list[str]:
    lines = [
        "| stack | model, batch × seq | machine | precision | published | our step | ratio "
        "| like it | ratio | half | settings, assumptions | source |",
        "|" + "---|" * 12,
    ]
    for one, ours, theirs in judged:
        said = f" ({one['said']})" if "said" in one else ""
        cells = [
            one["stack"], f"{one['model']}, {one['batch']:,} × {one['seq']:,}", one["on"],
            one.get("matmul", "bf16"), f"{one['tokens']:,}{said}",
        ]  # fmt: skip
        for value in (ours, theirs):
            ratio = "" if value is None else f"{value / one['tokens']:.2f}"
            cells += ["fits on no mesh" if value is None else f"{value:,.0f}", ratio]
        lines.append(f"| {' | '.join([*cells, one['half'], notes(one), one['source']])} |")
    return [*lines, "", *summary(judged)]


def experts_table(results: Iterable[dict[str, Any]]) -> list[str]:
    """The plan of our own step beside each published result of a mixture of experts."""
    lines = [
        "| stack | model, batch × seq | machine | published | planned | ratio "
        "| settings, assumptions | source |",
        "|" + "---|" * 8,
    ]
    for one in results:
        ratio = planned_over_published(one)
        cells = [
            one["stack"], f"{one['model']}, {one['batch']:,} × {one['seq']:,}", one["on"],
            f"{one['tokens']:,.0f}", f"{ratio * one['tokens']:,.0f}", f"{ratio:.2f}", notes(one),
            one["source"],
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def planned_over_published(one: dict[str, Any]) -> float:
    """Tokens a second and chip of the plan of our own step, over what is published."""
    way = planned(one, OURS)
    return 0.0 if way is None else tokens(one, way.seconds) / one["tokens"]


def summary(judged: Sequence[Judged]) -> list[str]:
    lines = ["| results | within | like their stack | judged ones alone | our own step | wanted |"]
    lines.append("|" + "---|" * 6)
    for of, limit in WITHIN.items():
        every, half = within(judged, of), within(judged, of, "judged")
        alike = [each for each in judged if kind(each.result) == of]
        ours = sum(abs(each.off(each.ours)) <= limit for each in alike)
        cells = [of if of != "long" else f"{LONG:,} tokens and more", f"{limit:.0%}"]
        cells += [f"{near} of {count} ({near / count:.0%})" for near, count in (every, half)]
        lines.append(f"| {' | '.join(cells)} | {ours} of {len(alike)} | {WANTED[of]:.0%} |")
    return lines


def fit() -> None:
    """Print the speeds with the least squared error of logarithms over the `fit` results.

    One after the other, three times over, on the meshes of the plan as it is: matmuls from
    sequences that are not long, attention from long ones, what a ring step adds from split ones.
    """
    halves = [one for one in results() if one["half"] == "fit"]
    for name, groups in STACKS.items():
        for group in groups:
            mine = [one for one in halves if one["stack"] == name]
            mine = [one for one in mine if Machine.parse(one["on"]).chip.kind in group.chips]
            ways = [(one, way) for one in mine if (way := planned(one, stack_of(one)))]
            fitted = _fitted(group, RECOMPUTES[name], ways)
            print(name, fitted, f"from {len(ways)} results", flush=True)


def _fitted(
    group: Results, recomputes: bool, ways: Sequence[tuple[dict[str, Any], Candidate]]
) -> Results:
    def error(changed: Results, ones: Sequence[tuple[dict[str, Any], Candidate]]) -> float:
        total = 0.0
        for one, way in ones:
            speed = changed.matmul[one.get("matmul", "bf16")]
            stack = Stack("", speed, changed.attention, changed.ring_step, recomputes)
            workload = dataclasses.replace(way.step.workload, like=stack)
            seconds = step_time(StepModel(workload, way.choice)).step
            total += math.log(tokens(one, seconds) / one["tokens"]) ** 2
        return total

    for _ in range(3):
        for precision in group.matmul:
            ones = [each for each in ways if kind(each[0]) == precision]
            speeds = [
                dataclasses.replace(group, matmul={**group.matmul, precision: n / 100})
                for n in range(40, 180)
            ]
            group = min(speeds, key=lambda each: error(each, ones)) if ones else group
        long = [each for each in ways if kind(each[0]) == "long"]
        split = [each for each in long if each[1].choice.context > 1]
        for field, ones in (("attention", long), ("ring_step", split)):
            least = 20 if field == "attention" else 0
            speeds = [dataclasses.replace(group, **{field: n / 100}) for n in range(least, 150)]
            group = min(speeds, key=lambda each: error(each, ones)) if ones else group
    return group


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--fit", action="store_true")
    options = parser.parse_args()
    if options.fit:
        fit()
        return
    lines = table([judge(one) for one in results()])
    of_experts = experts_table(results(EXPERTS))
    print("\n".join([*lines, "", *of_experts]))
    if options.write:
        conditions = (
            f"`python benchmarks/published.py --write`, {here()}. Tokens a second and chip: as "
            "published, of the plan of our own step, and of the plan `--like` the stack; ratios "
            "are planned over published."
        )
        write_section("Published training results", conditions, lines)
        conditions = (
            f"`python benchmarks/published.py --write`, {here()}. Tokens a second and chip, as "
            "published and of the plan of our own step, with an even load of experts; nothing is "
            "fitted to these."
        )
        write_section("Published training results of experts", conditions, of_experts)


if __name__ == "__main__":
    main()
