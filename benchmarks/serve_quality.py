"""What weights and a KV cache of 8 bits cost in quality: the loss of a run's model by the engine.

    make demo && python benchmarks/serve_quality.py demo-run --write

The text is the end of the corpus that the demo trains on, in pieces of 250 tokens; the loss is the
mean negative log-probability of their tokens, from the engine's prompt_logprobs. With fp8 weights
activations are rounded to fp8 too, as GPUs with fp8 units have them.
"""

import argparse

from results import here, write_section

PIECE, PIECES = 250, 8
KINDS = ((None, None), ("int8", None), ("fp8", None), (None, "fp8"), ("fp8", "fp8"))


def losses(run: str) -> dict[str, float]:
    import jax.numpy as jnp

    from meshwright.data import embedded_text
    from meshwright.ops import quantized
    from meshwright.serving import (
        EngineConfig,
        Request,
        Sampling,
        generation_mesh,
        model_source,
        start_engine,
    )

    quantized._has_fp8 = lambda: True  # also on CPUs
    source = model_source(run)
    tokens = source.encode(embedded_text()[-2 * PIECE * PIECES :])[-PIECE * PIECES :]
    pieces = [tuple(tokens[i : i + PIECE]) for i in range(0, len(tokens), PIECE)]
    greedy = Sampling(temperature=0)
    found = {}
    for weights, cache in KINDS:
        config = EngineConfig(
            max_batch=1, max_length=256, chunk=128, weights=weights, cache=cache,
            compile_first=False,
        )  # fmt: skip
        with start_engine(source, generation_mesh(), jnp.float32, config) as engine:
            done = engine.generate(
                [Request(piece, greedy, max_new=0, prompt_logprobs=0) for piece in pieces]
            )
        scores = [each.logprob for one in done for each in one.prompt_logprobs if each is not None]
        found[f"{weights or 'float32'} | {cache or 'float32'}"] = -sum(scores) / len(scores)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    args = parser.parse_args()
    found = losses(args.run)
    exact = next(iter(found.values()))
    lines = ["| weights | KV cache | loss | more |", "|---|---|---|---|"]
    lines += [f"| {kind} | {loss:.4f} | {loss / exact - 1:+.2%} |" for kind, loss in found.items()]
    print("\n".join(lines))
    if args.write:
        write_section(
            "Quality of 8-bit weights and caches", f"the model of `make demo`, {here()}", lines
        )


if __name__ == "__main__":
    main()
