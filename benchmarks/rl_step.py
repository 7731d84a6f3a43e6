"""The parts of a step of RL, and how far the engine's log-probabilities are from the trainer's.

    python benchmarks/rl_step.py --model llama-3.2-1b --batch 64 --seq 512     # prints a table
    python benchmarks/rl_step.py --write                                      # into RESULTS.md

Random weights, all on one device: the engine samples `--batch` sequences of half a prompt and half
new tokens; the trainer's own program scores them (strict mode); a train step follows; the weights
go back to the engine. Each part is timed after it has run once; the median of `--repeats`. Strict
mode costs the score; an update computes log-probabilities too. Differences are over all sampled
tokens. The last column compares two runs of the trainer's program on the same weights.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from meshwright.data import load_tokenizer
from meshwright.serving import (
    EngineConfig,
    Request,
    Sampling,
    Source,
    generation_mesh,
    start_engine,
    trained_weights,
)
from meshwright.training import (
    ComputeConfig,
    TrainConfig,
    abstract_step,
    by_target,
    new_state,
    sample_batch,
    train_on,
)
from results import here, write_section

TITLE = "Sampling for RL: its parts, and the distance of sampler and trainer"


def measured(options: argparse.Namespace, dtype: str) -> dict[str, Any]:
    """Seconds of each part, and the differences of log-probabilities."""
    config = TrainConfig(
        options.model, batch=options.batch, seq=options.seq, override=tuple(options.override),
        compute=ComputeConfig(dtype=dtype),
    )  # fmt: skip
    step = abstract_step(config, generation_mesh())
    state = new_state(step.arrays, step.state, step.optimizer, step.mesh)
    source = Source(
        step.model, load_tokenizer("bytes"), frozenset(), False, "random",
        trained_weights(state.params),
    )  # fmt: skip
    half = options.seq // 2
    settings = EngineConfig(
        max_batch=options.batch, max_length=options.seq, batch_buckets=(options.batch,),
        chunk_shapes=((1, half),), chunk=half, prompt_logprobs=False, compile_first=False,
        prefix_cache=False,
    )  # fmt: skip
    random = np.random.default_rng(0)
    prompts = random.integers(0, 256, (options.batch, half))
    requests = [
        Request(tuple(prompt.tolist()), Sampling(seed=index), half, ignore_end=True, logprobs=0)
        for index, prompt in enumerate(prompts)
    ]
    with start_engine(source, step.mesh, step.compute.dtype, settings) as engine:
        done = engine.generate(requests)
        sampling = seconds(lambda: engine.generate(requests), options.repeats)
        samples = [(one.prompt, answer.tokens) for one, answer in zip(requests, done, strict=True)]
        batch = sample_batch(step, samples)
        own = step.functions.log_probs(state.params, batch)
        engines = by_target(
            step, samples, [[token.logprob for token in one.logprobs] for one in done]
        )
        score = seconds(
            lambda: step.functions.log_probs(state.params, batch).block_until_ready(),
            options.repeats,
        )
        again = np.asarray(step.functions.log_probs(state.params, batch))

        def update() -> Any:
            nonlocal state
            state, report = train_on(step, state, batch, lambda new: -new.mean())
            return jax.block_until_ready(report)

        weights = seconds(lambda: engine.update_weights(state.params), options.repeats)
        training = seconds(update, options.repeats)
    counts = np.asarray(batch["targets"]) >= 0
    trainer, sampler = np.float64(own)[counts], np.float64(engines)[counts]
    difference = trainer - sampler
    return {
        "dtype": dtype, "sampling": sampling, "score": score, "update": training,
        "weights": weights, "largest": np.abs(difference).max(),
        "mean": np.abs(difference).mean(),
        "kl": np.mean(np.expm1(difference) - difference),
        "strict": np.abs(again - np.asarray(own)).max(), "tokens": int(counts.sum()),
    }  # fmt: skip


def seconds(run: Callable[[], Any], repeats: int) -> float:
    """The median of some runs, after one that compiles."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def table(results: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| dtype | sampling | score (strict mode) | update | weights to the engine | strict mode, "
        "of sampling + update | engine − trainer: largest, mean | KL | strict: largest |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in results:
        share = one["score"] / (one["sampling"] + one["update"])
        lines.append(
            f"| {one['dtype']} | {one['sampling']:.3f} s | {one['score']:.3f} s | "
            f"{one['update']:.3f} s | {one['weights']:.3f} s | +{share:.1%} | "
            f"{one['largest']:.2g}, {one['mean']:.2g} | {one['kl']:.2g} | {one['strict']:.2g} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--override", nargs="*", default=(), help="changes to the model")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--dtypes", nargs="*", default=("float32", "bfloat16"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    options = parser.parse_args()
    results = [measured(options, dtype) for dtype in options.dtypes]
    device = jax.devices()[0].device_kind
    model = " ".join([options.model, *options.override])
    conditions = (
        f"{here()}, one {device}; {model}, {options.batch} sequences "
        f"of {options.seq} tokens, half of them sampled ({results[0]['tokens']:,} tokens)."
    )
    lines = table(results)
    print(conditions, *lines, sep="\n")
    if options.write:
        write_section(TITLE, conditions, lines)


if __name__ == "__main__":
    main()
