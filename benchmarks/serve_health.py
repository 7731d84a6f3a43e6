"""How long /health waits while a server works on large requests, and what memory it keeps.

    python benchmarks/serve_health.py
    python benchmarks/serve_health.py --write

Starts `meshwright serve` on a tiny model with random weights, with the default limits, and sends it
one request after another: large ones, and some with large answers. While the server works on one,
/health is called every 10 ms.
"""

import argparse
import contextlib
import dataclasses
import functools
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from results import here, write_section

PAUSE = 0.01  # seconds between calls of /health
REPOSITORY = Path(__file__).parent.parent
TEMPLATE = """{% for tool in tools or () %}{{ tool | tojson }}{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXT = "The old man walked to the harbour, and nobody asked him why he came. "


def text(characters: int) -> str:
    return (TEXT * (characters // len(TEXT) + 1))[:characters]


def tool(name: str, properties: int) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {f"p{i}": {"type": "string"} for i in range(properties)},
    }
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def strings(characters: int) -> dict[str, Any]:
    return {"prompt": text(characters), "return_token_strs": True}


def parts(number: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * number}]}


def bias(entries: int) -> dict[str, Any]:
    return {"prompt": "a", "logit_bias": {str(index): 1 for index in range(entries)}}


def schema(properties: int) -> dict[str, Any]:
    named = {"name": "s", "schema": tool("f", properties)["function"]["parameters"]}
    return {**HI, "response_format": {"type": "json_schema", "json_schema": named}}


def scored(prompts: int, ids: int, **fields: Any) -> dict[str, Any]:
    """Prompts of tokens, each with the log-probabilities of 20 candidates in the answer."""
    prompt = [[(index * 7 + token) % 4000 for token in range(ids)] for index in range(prompts)]
    return {"prompt": prompt, "max_tokens": 0, **fields}


def nested(depth: int) -> bytes:
    return b'{"messages": ' + b"[" * depth + b"]" * depth + b"}"


MESSAGE = {"role": "user", "content": "a"}
HI = {"messages": [MESSAGE], "max_tokens": 1}
ECHO, PROMPT = {"echo": True, "logprobs": 20}, {"prompt_logprobs": 20}
CHOICES = {"n": 32, "max_tokens": 500, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# what is sent, where, and what makes its body
REQUESTS: list[tuple[str, str, Callable[[], Any]]] = [
    ("300,000 messages", CHAT, lambda: {"messages": [MESSAGE] * 300_000}),
    ("8,000 messages", CHAT, lambda: {"messages": [MESSAGE] * 8_000}),
    ("3M ids", "/detokenize", lambda: {"tokens": [1234] * 3_000_000}),
    ("260,000 ids", "/detokenize", lambda: {"tokens": [1234] * 260_000}),
    ("4 MB with token strings", "/tokenize", lambda: strings(4_000_000)),
    ("2 MB with token strings", "/tokenize", lambda: strings(2_000_000)),
    ("15 MB", "/tokenize", lambda: {"prompt": text(15_000_000)}),
    ("4M ids", COMPLETIONS, lambda: {"prompt": [12] * 4_000_000}),
    ("60,000 tools", CHAT, lambda: {**HI, "tools": [tool("f", 0)] * 60_000}),
    ("1,000 tools", CHAT, lambda: {**HI, "tools": [tool(f"f{i}", 20) for i in range(1000)]}),
    ("prompt of 15 MB", COMPLETIONS, lambda: {"prompt": text(15_000_000), "max_tokens": 1}),
    ("message of 15 MB", CHAT, lambda: {"messages": [MESSAGE | {"content": text(15_000_000)}]}),
    ("prompt of 400 kB", COMPLETIONS, lambda: {"prompt": text(400_000), "max_tokens": 1}),
    ("15 MB of escapes", COMPLETIONS, lambda: b'{"prompt": "' + rb"\n" * 7_500_000 + b'"}'),
    ("message of 200,000 parts", CHAT, lambda: parts(200_000)),
    ("60,000 parts", CHAT, lambda: parts(60_000)),
    ("100,000 prompts", COMPLETIONS, lambda: {"prompt": ["a"] * 100_000, "max_tokens": 1}),
    ("logit_bias of 1M entries", COMPLETIONS, lambda: bias(1_000_000)),
    ("logit_bias of 100,000 entries", COMPLETIONS, lambda: bias(100_000)),
    ("2M stop texts", COMPLETIONS, lambda: {"prompt": "a", "stop": ["x"] * 2_000_000}),
    ("200,000 stop texts", COMPLETIONS, lambda: {"prompt": "a", "stop": ["x"] * 200_000}),
    ("schema of 40,000 properties", CHAT, lambda: schema(40_000)),
    ("tool of 60,000 properties", CHAT, lambda: {**HI, "tools": [tool("f", 60_000)]}),
    ("200,000 other values", COMPLETIONS, lambda: {"prompt": "a", "metadata": [[]] * 100_000}),
    ("lists in lists, 8M deep", CHAT, lambda: nested(8_000_000)),
    ("lists in lists, 100,000 deep", CHAT, lambda: nested(100_000)),
    ("2M fields", COMPLETIONS, lambda: b"{" + b'"n": 1,' * 2_000_000 + b'"prompt": "a"}'),
    ("100,000 texts", "/loglikelihood", lambda: {"text": ["a"] * 100_000}),
    ("text of 2 MB", "/loglikelihood", lambda: {"text": [text(2_000_000)]}),
    ("prefix of 2 MB", "/generate", lambda: {"prefix_text": [text(2_000_000)]}),
    ("16 x 8,000 ids, echo, 20 logprobs", COMPLETIONS, lambda: scored(16, 8_000, **ECHO)),
    ("the same in a stream", COMPLETIONS, lambda: scored(16, 8_000, **ECHO, stream=True)),
    ("200 x 500 ids, echo, 20 logprobs", COMPLETIONS, lambda: scored(200, 500, **ECHO)),
    ("8 x 8,000 ids, 20 prompt_logprobs", COMPLETIONS, lambda: scored(8, 8_000, **PROMPT)),
    ("32 choices of 500 tokens, 20 logprobs", CHAT, lambda: {**HI, **CHOICES}),
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Result:
    name: str
    path: str
    body_bytes: int
    status: int
    seconds: float
    calls: int
    longest: float  # seconds that a call of /health took
    resident_bytes: int  # of the server, afterwards


def measure(port: int, pid: int, name: str, path: str, value: Any) -> Result:
    body = value if isinstance(value, bytes) else json.dumps(value, separators=(",", ":")).encode()
    answers: list[int] = []

    def send() -> None:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
            connection.request("POST", path, body)
            response = connection.getresponse()
            response.read()
            answers.append(response.status)

    waits = []
    sender = threading.Thread(target=send)
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        started = time.perf_counter()
        sender.start()
        while sender.is_alive() or len(waits) < 3:
            asked = time.perf_counter()
            connection.request("GET", "/health")
            if connection.getresponse().read() != b'{"status":"ok"}':
                raise SystemExit(f"{name}: /health did not answer")
            waits.append(time.perf_counter() - asked)
            sender.join(PAUSE)
    seconds = time.perf_counter() - started
    return Result(
        name, path, len(body), answers[0], seconds, len(waits), max(waits), resident_bytes(pid)
    )


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def make_folder(folder: Path) -> None:
    """A Hugging Face folder: a tiny model, and a tokenizer trained on the documentation."""
    import jax
    import jax.numpy as jnp
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    import meshwright.models as families
    from meshwright.layouts import create
    from meshwright.serving import generation_mesh
    from meshwright.serving.abstract_weights import targets

    # as small as can be: its steps are not what is measured
    small = {"layers": 1, "embed": 16, "heads": 1, "kv_heads": 1, "head_dim": 16, "mlp": 16}
    config = dataclasses.replace(families.preset("tiny"), vocab=4096, max_seq=8192, **small)
    shardings = jax.tree.map(lambda x: x.sharding, targets(config, generation_mesh(), jnp.float32))
    params = create(families.abstract_arrays(config, jnp.float32), shardings)
    families.save_hf(str(folder), params, config)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    pages = [page.read_text() for page in sorted((REPOSITORY / "docs").rglob("*.md"))]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=4096, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(pages, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": SPECIAL[0], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@contextlib.contextmanager
def serving() -> Iterator[tuple[int, int]]:
    """(port, process id) of a server with the default limits, once it is ready."""
    with tempfile.TemporaryDirectory() as folder:
        make_folder(Path(folder))
        program = str(Path(sys.executable).with_name("meshwright"))
        command = [program, "serve", folder, "--port", "0"]
        command += ["--no-access-log", "--engine.max-batch", "4"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            addresses = (re.search(r"127\.0\.0\.1:(\d+)", line) for line in lines)
            address = next(filter(None, addresses), None)
            if address is None:
                raise SystemExit("the server did not start; its error is above")
            port = int(address[1])
            while not is_ready(port):
                time.sleep(0.1)
            yield port, process.pid
        finally:
            process.terminate()
            process.wait()


def is_ready(port: int) -> bool:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except ConnectionRefusedError:
            return False


def table(results: list[Result], before: int) -> list[str]:
    lines = [
        "| request | route | body | status | seconds | longest /health | memory after |",
        "|---|---|---|---|---|---|---|",
        f"| (before) | | | | | | {before / 1e9:.2f} GB |",
    ]
    for each in results:
        lines.append(
            f"| {each.name} | `{each.path}` | {each.body_bytes / 1e6:.1f} MB | {each.status} | "
            f"{each.seconds:.2f} | {each.longest * 1e3:.0f} ms | "
            f"{each.resident_bytes / 1e9:.2f} GB |"
        )
    worst = max(each.longest for each in results)
    calls = sum(each.calls for each in results)
    return [*lines, "", f"Longest wait of {calls:,} calls: {worst * 1e3:.0f} ms."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    options = parser.parse_args()
    show = functools.partial(print, flush=True)
    with serving() as (port, pid):
        before = resident_bytes(pid)
        results = []
        for name, path, make_body in REQUESTS:
            results.append(measure(port, pid, name, path, make_body()))
            show(table(results[-1:], before)[-3])
    lines = table(results, before)
    show("\n".join(lines))
    if options.write:
        conditions = f"`python benchmarks/serve_health.py --write`, {here()}; default limits."
        write_section("/health during large requests", conditions, lines)


if __name__ == "__main__":
    main()
