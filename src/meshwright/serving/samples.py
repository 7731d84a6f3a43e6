"""Texts of a model in training: an engine that takes the trainer's weights each time."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from meshwright.data import Mixture
from meshwright.meshes import STANDARD_AXES
from meshwright.serving.abstract_weights import check_fits
from meshwright.serving.engine import Engine
from meshwright.serving.from_trainer import check_plain, trained_weights
from meshwright.serving.generate import config_for
from meshwright.serving.job import check_prompts
from meshwright.serving.replicas import replica_meshes
from meshwright.serving.request import Request
from meshwright.serving.sampling import Sampling
from meshwright.serving.source import Source, generation_mesh, load_weights
from meshwright.training import AbstractStep

NEW_TOKENS = 64


class TextSampler:
    """Continues prompts greedily with parameters of a train step; see `train --eval.prompts`.

    The engine starts with the first call. It has pages for the prompts alone, and a copy of the
    weights in the dtype of matmuls, on the devices of one replica.
    """

    def __init__(self, step: AbstractStep, mixture: Mixture, prompts: Sequence[str]) -> None:
        tokenizer = mixture.tokenizer
        self._step = step
        self._mesh = generation_mesh()
        if {*STANDARD_AXES} <= {*step.mesh.axis_names}:
            self._mesh = replica_meshes(step.mesh)[0]
        check_fits(step.model, self._mesh)
        check_plain(step.state.params)
        ends = frozenset({tokenizer.end_of_document})
        self._source = Source(
            step.model, tokenizer, ends, mixture.special_tokens, "the run", trained_weights
        )
        new = min(NEW_TOKENS, step.model.max_seq // 2)
        tokens = [tuple(self._source.encode(text)) for text in prompts]
        check_prompts(tokens, new, step.model)
        self._config = config_for(step.model, [len(one) for one in tokens], new)
        self._requests = [Request(one, Sampling(temperature=0.0), new) for one in tokens]
        self._engine: Engine | None = None

    def __call__(self, params: Any) -> list[str]:
        """The continuation of each prompt."""
        scale = self._step.compute.adapter_scale
        if self._engine is None:
            source = dataclasses.replace(self._source, read=trained_weights(params, scale))
            model = load_weights(source, self._mesh, self._step.compute.dtype)
            self._engine = Engine(model, self._config, release=True)
        else:
            self._engine.update_weights(params, scale)
        return [done.text for done in self._engine.generate(self._requests)]

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
