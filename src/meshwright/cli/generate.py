"""`meshwright generate`: continue prompts with a trained model, as the tokens come."""

import collections
import dataclasses
import itertools
import json as jsonlib
import os
import sys
import time
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import tyro

from meshwright.cli.auto import planned_to_serve
from meshwright.data import decode_stream
from meshwright.errors import MeshwrightError
from meshwright.interrupt import ctrl_c_says
from meshwright.launch import make_room_for_cpu_collectives, simulate_devices
from meshwright.machines import Machine
from meshwright.models import default_dtype, describe_padding, family_of
from meshwright.present import count, mesh_text
from meshwright.serve import (
    Sampling,
    Source,
    check_fits,
    check_prompts,
    generation_mesh,
    load,
    look_into,
    stream,
)
from meshwright.train import AUTO


def generate(
    run: Annotated[str, tyro.conf.Positional],
    prompt: tuple[str, ...] = (),
    max_new: int = 100,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = 0.95,
    min_p: float | None = None,
    seed: int = 0,
    mesh: str = "dp=1,fsdp=1,tp=1,sp=1",
    dtype: Literal["auto", "bfloat16", "float32"] = "auto",
    step: int | None = None,
    tokenizer: str | None = None,
    end_token: str | None = None,
    special_tokens: bool | None = None,
    json: bool = False,
    cpu_devices: int | None = None,
) -> None:
    """Continue prompts with a model: a training run's, or a Hugging Face folder's.

    meshwright generate runs/first --prompt "Once upon a time" --max-new 200 --mesh fsdp=-1

    Args:
        run: The folder of a run, or of a Hugging Face model.
        prompt: What to continue; - reads it from standard input. Repeatable.
        max_new: Tokens to add to each prompt at most; an end-of-document token ends it earlier.
        temperature: 0 takes the likeliest token always; 1 samples as the model predicts.
        top_k: Sample from the k likeliest tokens only.
        top_p: Of these, from the likeliest that together have this probability; 1 is all.
        min_p: Of these, from those at least this times as likely as the likeliest.
        seed: The same seed gives the same text, on every mesh.
        mesh: Where the model lies: fsdp=-1 takes all devices, auto what the plan would choose for
            the shortest wait. The default is one device.
        dtype: Of weights and cache. auto: bfloat16 on accelerators, float32 on CPUs.
        step: The checkpoint to take; by default the last.
        tokenizer: "bytes", a tokenizer.json or its folder, in place of the run's own.
        end_token: The token that ends a document, where the tokenizer does not say.
        special_tokens: Whether prompts get what the tokenizer puts around a text, such as
            begin-of-text; by default with a Hugging Face model only.
        json: Print plain data at the end instead of text as it comes.
        cpu_devices: Simulate this many devices on the CPU.
    """
    sampling = Sampling(temperature, top_k, top_p, min_p, seed)
    texts = _texts(prompt)
    make_room_for_cpu_collectives()
    if cpu_devices is not None:
        simulate_devices(cpu_devices)
    source = look_into(run, step=step, tokenizer=tokenizer, end_token=end_token)
    if special_tokens is not None:
        source = dataclasses.replace(source, special_tokens=special_tokens)
    prompts = [source.encode(text) for text in texts]
    check_prompts(prompts, max_new, source.config)
    if mesh == AUTO:
        longest = max(map(len, prompts)) + max_new
        mesh = planned_to_serve(source.config, Machine.here(), len(prompts), longest, dtype)
    placed = generation_mesh(mesh)
    check_fits(source.config, placed)
    kind = default_dtype(dtype, placed.devices.flat[0].platform)
    used = (
        f"{source.name}, mesh {mesh_text(placed.shape)} on {count(placed.size, 'device')} of "
        f"{len(jax.devices())}, {kind}"
    )
    padded = describe_padding(
        source.config, family_of(source.config).generation.rules(), placed.shape
    )
    used += "" if padded is None else f", {padded}"
    print(used, file=sys.stderr)
    model = load(source, placed, jnp.dtype(kind))
    coming = _Coming(stream(model, prompts, max_new, sampling), len(prompts), source.ends)
    try:
        with ctrl_c_says(lambda: f"\nstopped; {coming.summary()}"):
            if json:
                rows = [list(coming.row(row)) for row in range(len(prompts))]
                found = [_result(*each, source) for each in zip(texts, prompts, rows, strict=True)]
                print(jsonlib.dumps({"model": used, "results": found, **coming.speed()}))
            else:
                _print(coming, prompts, source)
    except BrokenPipeError:  # whoever read the text has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    print(coming.summary(), file=sys.stderr)


@dataclasses.dataclass
class _Coming:
    """Tokens as they come, asked for row by row: those of other rows are kept for later."""

    steps: Iterator[tuple[int, int]]
    rows: int
    ends: frozenset[int]

    def __post_init__(self) -> None:
        self.kept: list[collections.deque[int]] = [collections.deque() for _ in range(self.rows)]
        self.started = time.perf_counter()
        self.first: float | None = None
        self.first_tokens = self.tokens = 0
        self.last = self.started

    def row(self, row: int) -> Iterator[int]:
        while True:
            while not self.kept[row]:
                if not self._next():
                    return
            token = self.kept[row].popleft()
            yield token
            if token in self.ends:
                return

    def _next(self) -> bool:
        came = next(self.steps, None)
        if came is None:
            return False
        self.last = time.perf_counter()
        self.tokens += 1
        if self.tokens <= self.rows:  # the first of each row come together
            self.first, self.first_tokens = self.last, self.tokens
        self.kept[came[0]].append(came[1])
        return True

    def speed(self) -> dict[str, Any]:
        """Both programs are compiled when the first tokens come, so speed is counted from there."""
        after = self.tokens - self.first_tokens
        first = self.last if self.first is None else self.first
        return {
            "tokens": self.tokens,
            "seconds_to_first": round(first - self.started, 3),
            "tokens_per_second": round(after / (self.last - first), 1) if after else None,
        }

    def summary(self) -> str:
        speed = self.speed()
        rate = speed["tokens_per_second"]
        fast = "" if rate is None else f", then {rate:,} tokens/s"
        first = f"the first after {speed['seconds_to_first']:.1f} s (with compiling)"
        return f"{count(self.tokens, 'token')}, {first}{fast}"


def _print(coming: _Coming, prompts: list[list[int]], source: Source) -> None:
    """Each prompt with its continuation, text as it comes; the first prompt's first."""
    for row, prompt in enumerate(prompts):
        if row:
            print("\n---")
        # together, since how a token reads may depend on the one before it
        for text in decode_stream(source.tokenizer, itertools.chain(prompt, coming.row(row))):
            print(text, end="", flush=True)
    print(flush=True)


def _result(text: str, prompt: list[int], tokens: list[int], source: Source) -> dict[str, Any]:
    ended = bool(tokens) and tokens[-1] in source.ends
    tokens = tokens[:-1] if ended else tokens
    before = source.tokenizer.decode(prompt)
    return {
        "prompt": text,
        "text": source.tokenizer.decode(prompt + tokens)[len(before) :],
        "prompt_tokens": len(prompt),
        "tokens": tokens,
        "ended": "end" if ended else "length",
    }


def _texts(prompts: tuple[str, ...]) -> list[str]:
    if not prompts:
        raise MeshwrightError('there is nothing to continue; give --prompt "Once upon a time"')
    if prompts.count("-") > 1:
        raise MeshwrightError("--prompt - reads all of standard input; give it once")
    return [_standard_input() if text == "-" else text for text in prompts]


def _standard_input() -> str:
    try:
        return sys.stdin.read().removesuffix("\n")  # which an editor or echo adds
    except UnicodeDecodeError as reason:
        raise MeshwrightError(f"--prompt -: standard input is not text: {reason}") from None
