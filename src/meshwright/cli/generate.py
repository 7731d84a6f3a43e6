"""`meshwright generate`: generate text from prompts, streamed to the terminal."""

import collections
import dataclasses
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from meshwright.cli.flags import simulate
from meshwright.errors import MeshwrightError
from meshwright.interrupt import ctrl_c_says
from meshwright.machines import Machine
from meshwright.present import count, mesh_text

if TYPE_CHECKING:
    from meshwright.serving import Source


@dataclasses.dataclass(frozen=True)
class GenerateSettings:
    """Model, prompts, sampling, placement and output."""

    run: str
    """Folder of a run, of a Hugging Face model or of an adapter of PEFT, or a name on the Hub
    (org/name)."""
    adapter: str | None = None
    """Adapter that is merged into the model: a folder of PEFT or of a run with LoRA, or a name on
    the Hub."""
    prompt: tuple[str, ...] = ()
    """Text to continue; - reads it from standard input. Repeatable."""
    max_new: int = 100
    """Maximum number of new tokens per prompt; an end-of-document token ends it earlier."""
    temperature: float | None = None
    """Sampling temperature; 0 is greedy, 1 samples the model's own distribution. By default as the
    model's generation_config.json says; if it names no sampling: 0.8."""
    top_k: int | None = None
    """Top-k sampling: keep the k most probable tokens."""
    top_p: float | None = None
    """Nucleus sampling: keep the smallest set of tokens whose probability reaches p. By default as
    the model's generation_config.json says; if it names no sampling: 0.95."""
    min_p: float | None = None
    """Keep tokens with at least p times the probability of the most probable token."""
    seed: int = 0
    """Random seed for sampling; the same seed gives the same text on every mesh."""
    mesh: str = "dp=1,fsdp=1,tp=1,sp=1"
    """Mesh axes and sizes: fsdp=-1 uses all devices; auto uses the mesh that the planner expects
    to have the lowest latency. The default is one device."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Data type of weights and KV cache; auto: bfloat16 on accelerators, float32 on CPUs."""
    step: int | None = None
    """Step of the checkpoint to load; the latest by default."""
    tokenizer: str | None = None
    """"bytes", a tokenizer.json or its folder, instead of the run's own."""
    end_token: str | None = None
    """Token that ends a document, if the tokenizer files do not name it."""
    special_tokens: bool | None = None
    """Whether to add the tokenizer's special tokens to prompts, such as begin-of-text; by default
    for a Hugging Face model, and for a run whose data have them."""
    json: bool = False
    """Print JSON at the end instead of streaming text."""
    cpu_devices: int | None = None
    """Simulate this number of devices on the CPU."""


def generate(settings: GenerateSettings) -> None:
    """Generate text with the model of a training run or of a Hugging Face folder.

    meshwright generate runs/first --prompt "Once upon a time" --max-new 200 --mesh fsdp=-1
    """
    texts = _texts(settings.prompt)
    # here, after the settings are read: it imports jax
    import jax
    import jax.numpy as jnp

    from meshwright.launch import keep_compiled_programs
    from meshwright.models import default_dtype, describe_padding, serving_of
    from meshwright.planner import planned_to_serve
    from meshwright.serving import (
        Sampling,
        check_fits,
        check_prompts,
        defaults_of,
        generation_mesh,
        load_weights,
        model_source,
        stream,
    )
    from meshwright.training import AUTO

    settable = ("temperature", "top_k", "top_p", "min_p", "seed")
    named = {name: value for name in settable if (value := getattr(settings, name)) is not None}
    Sampling(**named)  # a mistake is named before anything is read
    keep_compiled_programs()
    simulate(settings.cpu_devices)
    source = model_source(
        settings.run,
        step=settings.step,
        tokenizer=settings.tokenizer,
        end_token=settings.end_token,
        adapter=settings.adapter,
    )
    if settings.special_tokens is not None:
        source = dataclasses.replace(source, special_tokens=settings.special_tokens)
    sampling = dataclasses.replace(defaults_of(source.generation_config).typed, **named)
    prompts = [source.encode(text) for text in texts]
    check_prompts(prompts, settings.max_new, source.config)
    mesh, dtype = settings.mesh, settings.dtype
    if mesh == AUTO:
        longest = max(map(len, prompts)) + settings.max_new
        mesh = planned_to_serve(source.config, Machine.here(), len(prompts), longest, dtype)
    placed = generation_mesh(mesh)
    check_fits(source.config, placed)
    kind = default_dtype(dtype, placed.devices.flat[0].platform)
    used = (
        f"{source.name}, mesh {mesh_text(placed.shape)} on {count(placed.size, 'device')} of "
        f"{len(jax.devices())}, {kind}"
    )
    rules = serving_of(source.config).rules("ep" in placed.shape)
    padded = describe_padding(source.config, rules, placed.shape)
    used += "" if padded is None else f", {padded}"
    print(used, file=sys.stderr)
    model = load_weights(source, placed, jnp.dtype(kind))
    tokens = _TokenStream(
        stream(model, prompts, settings.max_new, sampling, release=True),
        len(prompts),
        source.ends,
    )
    try:
        with ctrl_c_says(lambda: f"\nstopped; {tokens.summary()}"):
            if settings.json:
                generated = [list(tokens.of_prompt(i)) for i in range(len(prompts))]
                results = [
                    _result(*each, source) for each in zip(texts, prompts, generated, strict=True)
                ]
                print(json.dumps({"model": used, "results": results, **tokens.speed()}))
            else:
                _print(tokens, prompts, source)
    except BrokenPipeError:  # the reader of the text has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    print(tokens.summary(), file=sys.stderr)


@dataclasses.dataclass
class _TokenStream:
    """Tokens as they are generated, read prompt by prompt; those of other prompts are buffered."""

    steps: Iterator[tuple[int, int]]
    prompts: int
    ends: frozenset[int]

    def __post_init__(self) -> None:
        self.buffers: list[collections.deque[int]] = [
            collections.deque() for _ in range(self.prompts)
        ]
        self.started = time.perf_counter()
        self.first = self.warm = self.last = self.started
        self.warm_tokens = self.tokens = 0

    def of_prompt(self, index: int) -> Iterator[int]:
        """The tokens generated for one prompt."""
        while True:
            while not self.buffers[index]:
                if not self._next():
                    return
            token = self.buffers[index].popleft()
            yield token
            if token in self.ends:
                return

    def _next(self) -> bool:
        generated = next(self.steps, None)
        if generated is None:
            return False
        prompt, token = generated
        self.last = time.perf_counter()
        self.tokens += 1
        if self.tokens == 1:
            self.first = self.last
        # prefill is compiled for the first tokens of prompts, decode for the second ones
        if self.tokens <= 2 * self.prompts:
            self.warm, self.warm_tokens = self.last, self.tokens
        self.buffers[prompt].append(token)
        return True

    def speed(self) -> dict[str, Any]:
        """Tokens per second, without the first two of each prompt: those wait for compilation."""
        after = self.tokens - self.warm_tokens
        return {
            "tokens": self.tokens,
            "seconds_to_first": round(self.first - self.started, 3),
            "tokens_per_second": round(after / (self.last - self.warm), 1) if after else None,
        }

    def summary(self) -> str:
        speed = self.speed()
        rate = speed["tokens_per_second"]
        fast = "" if rate is None else f", then {rate:,} tokens/s"
        first = f"first token after {speed['seconds_to_first']:.1f} s (including compilation)"
        return f"{count(self.tokens, 'token')}, {first}{fast}"


def _print(tokens: _TokenStream, prompts: list[list[int]], source: "Source") -> None:
    """Stream each prompt with its continuation, or what was generated from it, in order."""
    from meshwright.data import decode_stream
    from meshwright.models import encodes_prompts

    encoded = encodes_prompts(source.config)
    for index, prompt in enumerate(prompts):
        if index:
            print("\n---")
        # one stream, since the text of a token may depend on the token before it
        for text in decode_stream(
            source.tokenizer, itertools.chain(() if encoded else prompt, tokens.of_prompt(index))
        ):
            print(text, end="", flush=True)
    print(flush=True)


def _result(text: str, prompt: list[int], tokens: list[int], source: "Source") -> dict[str, Any]:
    from meshwright.data import added_text
    from meshwright.models import encodes_prompts

    ended = bool(tokens) and tokens[-1] in source.ends
    tokens = tokens[:-1] if ended else tokens
    begun = [] if encodes_prompts(source.config) else prompt
    return {
        "prompt": text,
        "text": added_text(source.tokenizer, begun, tokens),
        "prompt_tokens": len(prompt),
        "tokens": tokens,
        "ended": "end" if ended else "length",
    }


def _texts(prompts: tuple[str, ...]) -> list[str]:
    if not prompts:
        raise MeshwrightError('no prompt; give --prompt "Once upon a time"')
    if prompts.count("-") > 1:
        raise MeshwrightError("--prompt - reads all of standard input; give it only once")
    return [_standard_input() if text == "-" else text for text in prompts]


def _standard_input() -> str:
    try:
        return sys.stdin.read().removesuffix("\n")  # which an editor or echo adds
    except UnicodeDecodeError as reason:
        raise MeshwrightError(f"--prompt -: standard input is not text: {reason}") from None
