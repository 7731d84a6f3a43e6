"""Why a step takes as long as it does, in a sentence."""

from meshwright.planner.result import Choice
from meshwright.planner.time import StepTime
from meshwright.present import count

_PLURAL = {
    "all-gather": "all-gathers",
    "reduce-scatter": "reduce-scatters",
    "all-reduce": "all-reduces",
    "collective-permute": "ring steps",
    "all-to-all": "all-to-alls",
}


def bound_and_reason(choice: Choice, timing: StepTime) -> tuple[str, str]:
    """What bounds it (compute, memory, axes, or idle), and the sentence."""
    waits: dict[tuple[str, ...], float] = {}
    for one in timing.collectives:
        waits[one.axes] = waits.get(one.axes, 0.0) + one.exposed
    parts, step = timing.seconds, timing.step
    compute = parts["matmuls"] + parts["attention"]
    memory = sum(parts[name] for name in ("elementwise", "loss", "optimizer", "loop over layers"))
    worst = max(waits, key=waits.__getitem__, default=())
    waited = waits.get(worst, 0.0)
    if worst and waited > max(memory, 0.5 * compute):
        return "+".join(worst), _network(choice, timing, worst, waited)
    if parts["idle"] > max(compute, memory, waited):
        idle = _percent(parts["idle"], step)
        return "idle", f"too small to fill the device: nothing runs in {idle} of the step"
    share = f"matmuls {_percent(parts['matmuls'], step)}, attention "
    share += f"{_percent(parts['attention'], step)}"
    if memory > compute:
        return "memory", f"memory-bound: {_percent(memory, step)} of the step; {share}"
    said = f"compute-bound: {share} of the step"
    again = 1 - timing.work.flops / timing.work.computed
    if choice.remat == "mlp" or choice.repeats_layers:
        said += f"; remat={choice.remat} makes {100 * again:.0f}% of the FLOPs again"
    if worst and waited > 0.03 * step:
        said += f"; {_percent(waited, step)} waits for {_axes(choice, worst)}"
        said += f" ({_sends(choice, timing, worst)})"
    return "compute", said


def _network(choice: Choice, timing: StepTime, axes: tuple[str, ...], waited: float) -> str:
    return (
        f"{_axes(choice, axes)} is network-bound: {_sends(choice, timing, axes)}; "
        f"{_percent(waited, timing.step)} of the step waits for it"
    )


def _sends(choice: Choice, timing: StepTime, axes: tuple[str, ...]) -> str:
    """`4 all-reduces x 512 MB a layer over ICI x8, open`: the most waited for kind."""
    over = [one for one in timing.collectives if one.axes == axes]
    worst = max(over, key=lambda one: one.exposed)
    operation, size, layers = worst.operation, worst.bytes, worst.layers
    alike = operation, size, layers, worst.stack
    times = sum(
        one.times for one in over if (one.operation, one.bytes, one.layers, one.stack) == alike
    )
    many, where = times, "a step"
    if layers:
        many, where = times // (layers * choice.accumulation), "a layer"
        where += f" of the {worst.stack}" if worst.stack else ""
    words = _PLURAL[operation] if many > 1 else operation
    micro = ""
    if choice.accumulation > 1 and layers:
        micro = f" and micro-batch, {count(choice.accumulation, 'micro-batch')},"
    return f"{many} {words} x {_size(size)} {where}{micro} over {worst.link}"


def _axes(choice: Choice, axes: tuple[str, ...]) -> str:
    return " · ".join(f"{axis}={choice.sizes[axis]}" for axis in axes)


def _size(size: float) -> str:
    for unit, worth in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= worth:
            value = size / worth
            return f"{value:.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"
    return f"{size:.0f} bytes"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}%"
