"""Latency of a running server under Poisson arrivals, as its clients see it.

    python benchmarks/serve_online.py --make /tmp/random-1.5b     # a folder of random weights
    meshwright serve /tmp/random-1.5b --engine.max-batch 128 --no-access-log &
    python benchmarks/serve_online.py http://127.0.0.1:8000 --requests 2000
    python benchmarks/serve_online.py http://127.0.0.1:8000 --rate 20 --write
    python benchmarks/serve_online.py http://127.0.0.1:8000 --plan llama-3.1-8b h200 64 --rate 20

Streamed completions of random tokens; lengths of prompts and answers are uniform from a quarter to
seven quarters of --prompt and --new. Without --rate, the capacity is measured first: requests are
sent as fast as --concurrency allows, and arrivals have --share of the rate that comes out.
Every token of a random folder is a word, so each has an event of its own. With --plan (a model, a
chip and the engine's max_batch), what `meshwright plan --requests` says of the load stands beside.
Only servers on this machine are measured.
"""

import argparse
import asyncio
import dataclasses
import json
import random
import re
import time
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from results import here, write_section

USAGE = re.compile(rb'"choices":\[\].*"completion_tokens":(\d+)')
PERCENTILES = (50, 90, 99)
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclasses.dataclass(frozen=True)
class Result:
    """What one client saw; times are of the deltas with tokens, from the request on."""

    status: int
    times: tuple[float, ...]
    started: float
    prompt: int
    is_whole: bool
    tokens: int = 0  # by the usage at the end: a busy server may send two in one delta

    @property
    def gaps(self) -> np.ndarray:
        return np.diff(self.times)


@dataclasses.dataclass(frozen=True)
class Load:
    host: str
    port: int
    vocab: int
    prompt: int
    new: int
    sampling: dict[str, float]

    def body(self, chance: random.Random) -> tuple[bytes, int]:
        """A request, and the tokens of its prompt."""
        prompt, new = (
            max(1, round(mean * chance.uniform(0.25, 1.75))) for mean in (self.prompt, self.new)
        )
        tokens = [chance.randrange(self.vocab) for _ in range(prompt)]
        asked = {"prompt": tokens, "max_tokens": new, "ignore_eos": True, "stream": True}
        asked["stream_options"] = {"include_usage": True}
        return json.dumps({**asked, **self.sampling}).encode(), prompt


async def measured(load: Load, body: bytes, prompt: int) -> Result:
    """Send a request and read its stream."""
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection(load.host, load.port, limit=2**20)
    try:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        )
        writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
        status, times, is_whole, tokens = 0, [], False, 0
        while line := await reader.readline():
            if not status:
                status = int(line.split()[1])
            elif line.startswith(b"data: [DONE]"):
                is_whole = True
            elif counted := USAGE.search(line):
                tokens = int(counted[1])
            elif line.startswith(b'data: {"id"') and b'"text":""' not in line:
                times.append(time.perf_counter() - started)
        return Result(status, tuple(times), started, prompt, is_whole, tokens)
    finally:
        writer.close()


async def capacity(load: Load, requests: int, concurrency: int) -> float:
    """Requests per second if there are always some waiting."""
    limit, chance = asyncio.Semaphore(concurrency), random.Random(1)

    async def one() -> None:
        async with limit:
            await measured(load, *load.body(chance))

    started = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(requests)))
    return requests / (time.perf_counter() - started)


async def arrivals(load: Load, requests: int, rate: float) -> tuple[list[Result], float]:
    """The results of requests that arrive at random, and the seconds that all took."""
    # tokens of no other load: the server remembers prompts
    chance, tasks = random.Random(f"{load} {rate}"), []
    started = due = time.perf_counter()
    for _ in range(requests):
        due += chance.expovariate(rate)
        await asyncio.sleep(due - time.perf_counter())
        tasks.append(asyncio.create_task(measured(load, *load.body(chance))))
    results = await asyncio.gather(*tasks)
    return results, time.perf_counter() - started


def planned(name: str, chip: str, batch: int, results: list[Result]) -> dict[str, list[float]]:
    """What `meshwright plan --requests` simulates, of the very requests that were sent."""
    from meshwright.machines import CHIPS, machine_sizes
    from meshwright.planner.load import replay
    from meshwright.training import TrainConfig

    machine = next(iter(machine_sizes(CHIPS[chip], 1)))
    waits = replay(TrainConfig(name, batch=batch), machine, sent(results))
    of = {"time to first token": waits.first_token, "between tokens": waits.per_token}
    return {what: [at(p) for p in PERCENTILES] for what, at in of.items()}


def sent(results: list[Result]) -> list[tuple[float, int, int]]:
    """When each request came, and the tokens of its prompt and answer."""
    begun = min(result.started for result in results)
    return sorted((round(one.started - begun, 4), one.prompt, one.tokens) for one in results)


def measured_waits(results: list[Result]) -> dict[str, list[float]]:
    """Seconds at the percentiles."""
    whole = [result for result in results if result.is_whole]
    of = {
        "time to first token": np.array([result.times[0] for result in whole]),
        "between tokens": np.concatenate([result.gaps for result in whole]),
    }
    return {what: [float(np.percentile(x, p)) for p in PERCENTILES] for what, x in of.items()}


def table(
    results: list[Result], seconds: float, rate: float, plan: dict[str, list[float]]
) -> list[str]:
    """Markdown, in milliseconds."""
    tokens = sum(result.tokens for result in results if result.is_whole)
    lost = sum(not result.is_whole for result in results)
    rows = {}
    for what, values in measured_waits(results).items():
        rows[f"{what}, ms"] = values
        if plan:
            rows[f"{what}, planned"] = plan[what]
    return [
        f"{len(results):,} requests at {rate:.2f}/s, {lost} lost; "
        f"{tokens / seconds:,.0f} tokens/s.",
        "",
        "| | p50 | p90 | p99 |",
        "|---|---|---|---|",
        *(f"| {row} | {' | '.join(f'{1000 * x:.1f}' for x in rows[row])} |" for row in rows),
    ]


def metric(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return float(next(line for line in lines if line.startswith(f"{name} ")).split()[-1])


def make_folder(folder: str, name: str) -> None:
    """A Hugging Face folder: random weights of a size of serve.py, and a word for each token."""
    import jax
    import jax.numpy as jnp
    from tokenizers import Tokenizer, models, pre_tokenizers

    import meshwright.models as families
    from meshwright.layouts import create
    from meshwright.serving import generation_mesh
    from meshwright.serving.abstract_weights import targets
    from serve import SIZES

    config = families.DecoderConfig(**SIZES[name], max_seq=8192)
    shardings = jax.tree.map(lambda x: x.sharding, targets(config, generation_mesh(), jnp.bfloat16))
    params = create(families.abstract_arrays(config, jnp.bfloat16), shardings)
    families.save_hf(folder, params, config)
    words = {f"w{i}": i for i in range(config.vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(f"{folder}/tokenizer.json")
    Path(folder, "tokenizer_config.json").write_text('{"eos_token": "w0"}')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", nargs="?")
    parser.add_argument(
        "--make", metavar="FOLDER", help="write a folder of random weights, and end"
    )
    parser.add_argument("--size", default="1.5b", help="of that folder: 8b, 1.5b or tiny")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--prompt", type=int, default=256, help="mean tokens of a prompt")
    parser.add_argument("--new", type=int, default=128, help="mean tokens of an answer")
    parser.add_argument("--rate", type=float, help="arrivals per second")
    parser.add_argument("--share", type=float, default=0.8, help="of the capacity, without --rate")
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument(
        "--plan", nargs=3, metavar=("MODEL", "CHIP", "BATCH"), help="plan the load too"
    )
    parser.add_argument("--save", metavar="FILE", help="requests and waits, as JSON")
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    options = parser.parse_args()
    if options.make:
        make_folder(options.make, options.size)
        return
    if not options.url:
        parser.error("give the URL of a server, or --make FOLDER")
    where = urlsplit(options.url)
    if where.hostname not in LOOPBACK:
        raise SystemExit(f"{options.url} is not on this machine; measure a server of your own")
    with urllib.request.urlopen(f"{options.url}/tokenizer_info") as answer:
        info: dict[str, Any] = json.load(answer)
    load = Load(
        where.hostname, where.port or 80, info["vocab_size"], options.prompt, options.new,
        {"temperature": options.temperature},
    )  # fmt: skip
    rate = options.rate
    if rate is None:
        most = asyncio.run(capacity(load, min(options.requests, 400), options.concurrency))
        rate = options.share * most
        print(f"capacity {most:.2f} requests/s")
    results, seconds = asyncio.run(arrivals(load, options.requests, rate))
    plan = {}
    if options.plan:
        name, chip, batch = options.plan
        plan = planned(name, chip, int(batch), results)
    lines = table(results, seconds, rate, plan)
    if options.save:
        about = {"rate": rate, "prompt": load.prompt, "new": load.new}
        record = {**about, "measured": measured_waits(results), "requests": sent(results)}
        Path(options.save).write_text(json.dumps(record) + "\n")
    late = metric(options.url, "meshwright_compilations_after_ready_total")
    lines += ["", f"Compilations after the server was ready: {late:.0f}."]
    print("\n".join(lines))
    if options.write:
        asked = f"`python benchmarks/serve_online.py URL --requests {options.requests} --write`"
        write_section("Serving online", f"{asked}, {here()}.", lines)
    refused = [result.status for result in results if not result.is_whole]
    if refused:
        raise SystemExit(f"{len(refused)} requests were lost: {sorted(set(refused))}")


if __name__ == "__main__":
    main()
