"""What constrained decoding costs: decode with no, half and all requests under a JSON schema.

    python benchmarks/serve_constrained.py --models 8b --batches 1 32 128 --write
    python benchmarks/serve_constrained.py --models tiny --batches 4 --cpu    # a smoke test

The method is that of serve.py. The tokenizer has as many tokens as the model: all bytes, and words
of 2 to 9 characters; the schema is a list of strings that does not end.
"""

import argparse
import dataclasses
import json
import random
from typing import Any

from results import here, write_section
from serve import FEW, SIZES, engine_of, requests, seconds

SCHEMA = {
    "type": "array",
    "items": {"type": "string", "minLength": 1, "maxLength": 30},
    "minItems": 100_000,
}
SHARES = {"none": 0, "half": 2, "all": 1}  # every so many-th request has the schema


def words(vocab: int) -> Any:
    """A byte-level tokenizer of `vocab` tokens."""
    import tokenizers

    from meshwright.data import tokenizer_from_json

    choose = random.Random(0)
    letters = "etaoinshrdlucmfwypvbgkqjxz"
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    known = dict.fromkeys(["<end>", *alphabet])
    while len(known) < vocab:
        word = "".join(choose.choices(letters, k=choose.randint(2, 8)))
        known[choose.choice(("", "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}")) + word] = None
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE({token: index for index, token in enumerate(known)}, [])
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(["<end>"])
    definition = json.loads(inner.to_str())
    return tokenizer_from_json(
        {"kind": "huggingface", "end_token": "<end>", "definition": definition}
    )


def speed(engine: Any, wanted: list[Any], every: int, new: int) -> float:
    """Tokens/s of decode, with a grammar for every `every`-th request."""
    from meshwright.serving import Grammar

    grammar = Grammar.json(SCHEMA)
    wanted = [
        dataclasses.replace(request, grammar=grammar) if every and index % every == 0 else request
        for index, request in enumerate(wanted)
    ]
    few, many = (
        [dataclasses.replace(each, max_new=count) for each in wanted] for count in (FEW, FEW + new)
    )
    seconds(engine, few)
    times = [(seconds(engine, few), seconds(engine, many)) for _ in range(3)]
    before, after = (min(each) for each in zip(*times, strict=True))
    return len(wanted) * new / (after - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["8b"], choices=list(SIZES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32, 128])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--new", type=int, default=128, help="decode steps that are timed")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    args = parser.parse_args()
    import jax

    if args.cpu:
        jax.config.update("jax_platforms", "cpu")
    lines = [
        "| model, batch | none constrained, tok/s | half | all | all of none |",
        "|---|---|---|---|---|",
    ]
    for name in args.models:
        vocab, length = SIZES[name]["vocab"], args.context + FEW + args.new
        with engine_of(
            name, "float32" if args.cpu else "bfloat16", words(vocab), max_batch=max(args.batches),
            max_length=length, batch_buckets=tuple(args.batches), strict=True,
        ) as engine:  # fmt: skip
            for batch in args.batches:
                wanted = requests(batch, args.context, 1, vocab, batch)
                found = [speed(engine, wanted, every, args.new) for every in SHARES.values()]
                cells = [f"{each:,.0f}" for each in found]
                lines.append(
                    " | ".join([f"| {name}, {batch}", *cells, f"{found[2] / found[0]:.2f} |"])
                )
                print(lines[-1], flush=True)
    print("\n".join(lines))
    if args.write:
        device = jax.devices()[0].device_kind
        write_section("Constrained decoding", f"{device}, {here()}", lines)


if __name__ == "__main__":
    main()
