"""Generate tokens from prompts, streamed, on any mesh.

source = model_source("runs/first")
model = load_weights(source, generation_mesh("tp=2"))
for prompt, token in stream(model, [source.encode("Once"), source.encode("The end of")]):
    …

An engine runs for the prompts of a call, with programs for their number and lengths; `mw.load`
has one for any number of calls.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import Any

from meshwright.arithmetic import round_up
from meshwright.errors import MeshwrightError
from meshwright.models import encodes_prompts
from meshwright.serving.job import check_prompts, check_request
from meshwright.serving.replicas import engine_of
from meshwright.serving.request import Delta, Request
from meshwright.serving.sampling import Sampling
from meshwright.serving.settings import EngineConfig
from meshwright.serving.source import Model

_BLOCK = 64  # lengths are multiples of this, so that few programs are compiled
_MOST_SEQUENCES = 256  # of a replica that are decoded together; more wait


def stream(
    model: Model,
    prompts: Sequence[Sequence[int]],
    max_new: int = 100,
    sampling: Sampling | None = None,
    *,
    release: bool = False,
) -> Iterator[tuple[int, int]]:
    """Yield (prompt index, token) as tokens are generated; a prompt's last may be its end token.

    Prompts are token ids, of any lengths; prompt i is sampled with the seed `sampling.seed + i`.
    The call itself refuses wrong prompts and settings; the first token starts the engine.
    `release` frees the model's own weights, of which the engine has a copy.
    """
    check_prompts(prompts, max_new, model.config)
    sampling = sampling or Sampling()
    replicas = model.mesh.shape.get("dp", 1)
    config = config_for(model.config, [len(prompt) for prompt in prompts], max_new, replicas)
    requests = [
        Request(
            tuple(int(token) for token in prompt),
            dataclasses.replace(sampling, seed=(sampling.seed + index) % 2**32),
            max_new,
        )
        for index, prompt in enumerate(prompts)
    ]
    assert config.max_length is not None
    for request in requests:
        check_request(request, model.config, config, config.max_length)
    return _tokens(model, config, requests, release)


def _tokens(
    model: Model, config: EngineConfig, requests: list[Request], release: bool
) -> Iterator[tuple[int, int]]:
    deltas: SimpleQueue[tuple[int, Delta]] = SimpleQueue()
    with engine_of(model, config, release=release) as engine:
        engine.submit(requests, lambda index, delta: deltas.put((index, delta)))
        running = len(requests)
        while running:
            index, delta = deltas.get()
            if delta.finish_reason == "error":
                raise MeshwrightError(delta.error)
            running -= delta.finish_reason is not None
            for token in delta.tokens:
                yield index, token


def config_for(
    model_config: Any, lengths: Sequence[int], max_new: int, replicas: int = 1
) -> EngineConfig:
    """Settings of an engine for prompts of these lengths: one shape of decode, one of prefill."""
    longest = max(lengths)
    most = max(longest, max_new) if encodes_prompts(model_config) else longest + max_new
    max_batch = min(-(-len(lengths) // replicas), _MOST_SEQUENCES)
    chunk = EngineConfig.chunk
    length = min(round_up(longest, _BLOCK), chunk)
    return EngineConfig(
        max_batch=max_batch,
        max_length=min(round_up(most, _BLOCK), model_config.max_seq),
        batch_buckets=(max_batch,),
        chunk_shapes=((min(chunk // length, max_batch), length),),
        compile_first=False,
    )
