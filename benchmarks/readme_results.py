"""README's table of results and time of the demo, from RESULTS.md: `readme_results.py` writes them.

It is written anew between README's marks whenever RESULTS.md changes; a test compares the two.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README, RESULTS = ROOT / "README.md", ROOT / "benchmarks" / "RESULTS.md"
BEGIN, END = "<!-- by benchmarks/readme_results.py -->\n", "<!-- end -->\n"
DEMO = ("<!-- demo, by benchmarks/readme_results.py -->\n", "<!-- end of demo -->\n")


def section(text: str, title: str) -> str:
    """A section of RESULTS.md."""
    parts = re.split(r"^## (.+)\n", text, flags=re.MULTILINE)
    return parts[parts.index(title) + 1]


def numbers(pattern: str, text: str) -> list[float]:
    """The groups of a pattern that the text must have."""
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"RESULTS.md has no {pattern!r} any more: change readme_results.py")
    return [float(group.replace(",", "")) for group in match.groups()]


def table(text: str) -> str:
    """The rows of README, with the numbers of RESULTS.md."""
    verdicts = r"Off by ([\d.]+)% at most, ([\d.]+)% on average; (\d+) of (\d+) verdicts right"
    tpu = numbers(verdicts, section(text, "Memory planned and compiled for TPUs"))
    gpu = numbers(verdicts, section(text, "Memory planned and compiled for GPUs"))
    near = r"(\d+) of (\d+) within 1%; (\d+) surprises"
    sent = [
        numbers(near, section(text, f"Bytes planned and compiled for {k}s")) for k in ("TPU", "GPU")
    ]
    close, kinds, surprises = (int(sum(column)) for column in zip(*sent, strict=True))
    chosen = section(text, "The chosen mesh among others")
    (slowest,) = numbers(r"it takes ([\d.]+) of the time of the best", chosen)
    scenarios = len(re.findall(r"^\| \S.* on ", chosen, re.MULTILINE))
    steps = section(text, "Training step on one GPU")
    decode = section(text, "Serving on one device")
    (decoded,) = numbers(r"\| 8b, batch 128 \|.*\| ([\d.]+) \|", decode)
    shard = re.findall(r"^\| `mw.shard`.*?\| ([\d.]+)×", section(text, "Placement"), re.MULTILINE)

    def speed(batch: str, side: str) -> str:
        return f"{numbers(rf'[|] {batch} [|] {side} [|].*?[|] ([0-9.]+)× [(]', steps)[0]:.2f}×"

    experts = section(text, "Mixture of experts: a step on one GPU")
    ((layers, batch, length),) = re.findall(
        r"(\d+) layers of .*?, (\d+) × ([\d,]+) tokens", experts
    )
    (of_experts,) = numbers(r"\| ours \|(?:[^|]*\|){3} ([\d.]+) \|", experts)
    right, compiled = int(tpu[2] + gpu[2]), int(tpu[3] + gpu[3])
    peer = "transformers + torch.compile"
    planned = section(text, "Published training results")
    bf16, eight, long = (
        numbers(rf"\| {kind} \| \d+% \| \d+ of \d+ \(\d+%\) \| (\d+) of (\d+)", planned)
        for kind in ("bf16", "fp8", "32,768 tokens and more")
    )
    rows = [
        ("measured", "compared with", "result"),
        ("---", "---", "---"),
        *(
            (f"planned memory, {all_steps:.0f} {kind} steps", f"the {kind} compiler",
             f"mean error {mean}%, worst {worst}%")
            for kind, (worst, mean, _, all_steps) in (("TPU", tpu), ("GPU", gpu))
        ),
        (f"fits or does not fit, all {compiled}", "the compilers", f"{right} right"),
        (f"planned bytes of {kinds} kinds of collectives", "the compilers",
         f"{close} within 1%, {surprises or 'no'} surprise{'s' if surprises > 1 else ''}"),
        (f"planned step time (`--like` the stack), {bf16[1]:.0f} published results in bf16 that "
         "nothing was fitted to", "MaxText, Megatron, torchtitan", f"{bf16[0]:.0f} within 10%"),
        (f"the same, {eight[1] + long[1]:.0f} in fp8 or of 32K tokens and more", "the same stacks",
         f"{eight[0] + long[0]:.0f} within 15%"),
        (f"the plan's first mesh, {scenarios} TPU scenarios", "roofline of compiled alternatives",
         f"at most {100 * (slowest - 1):.1f}% slower"),
        ("training step, 1.5B, 8 × 2,048, one H200", peer, f"{speed('8x2048', 'ours')} as fast"),
        ("training step, 1.5B, 4 × 8,192, one H200", peer, f"{speed('4x8192', 'command')} as fast"),
        ("the same with `--compute.matmul fp8`, 8 × 2,048 and 4 × 8,192", f"{peer}, bfloat16",
         f"{speed('8x2048', 'fp8')}, {speed('4x8192', 'fp8')}"),
        ("the same with `--backend torch`, 8 × 2,048 and 4 × 8,192", peer,
         f"{speed('8x2048', 'torch')}, {speed('4x8192', 'torch')}"),
        (f"training step, {layers} layers of qwen3-30b-a3b, {batch} × {length}, one H200",
         f"{peer}, grouped_mm", f"{of_experts}× as fast"),
        ("decode, 8B, batch 128, one H200", "transformers, static cache", f"{decoded}× as fast"),
        ("`mw.shard` of 1,000 arrays", "`jax.device_put` by hand",
         f"{max(map(float, shard)):.2f}× the time"),
    ]  # fmt: skip
    lines = (f"| {' | '.join(row)} |\n" for row in rows)
    return "".join(lines).replace("| --- | --- | --- |", "|---|---|---|")


def demo(text: str) -> str:
    """What `make demo` takes."""
    pattern = r"`make demo` .*?: (\d+) MB downloaded.*?install (\d+) s, demo (\d+) s of wall time"
    megabytes, install, run = numbers(pattern, section(text, "First minutes"))
    return (
        f"It costs nothing: {megabytes:.0f} MB to download, {install:.0f} s to install and "
        f"{run:.0f} s to run on two CPU cores.\n"
    )


def main() -> None:
    text, results = README.read_text(), RESULTS.read_text()
    for (begin, end), new in (((BEGIN, END), table(results)), (DEMO, demo(results))):
        before, _, rest = text.partition(begin)
        text = before + begin + new + end + rest.partition(end)[2]
    README.write_text(text)


if __name__ == "__main__":
    main()
