"""Serve a model: the inference engine, and generation with a fixed batch of prompts."""

from meshwright.serve.abstract_step import Part, ServedStep
from meshwright.serve.defaults import Defaults, defaults_of
from meshwright.serve.engine import Engine
from meshwright.serve.generate import check_prompts, stream
from meshwright.serve.grammars import Grammar, Grammars
from meshwright.serve.load import (
    Model,
    Source,
    check_fits,
    generation_mesh,
    has_encoder,
    load,
    look_into,
    serving_of,
)
from meshwright.serve.lockstep import follow, lead
from meshwright.serve.replicas import Replicas, start_engine
from meshwright.serve.request import (
    AnyEngine,
    Completion,
    Delta,
    EngineStats,
    EngineStoppedError,
    FinishReason,
    OverloadedError,
    Request,
    TokenLogprobs,
)
from meshwright.serve.same_settings import look_into_together
from meshwright.serve.sampling import Sampling
from meshwright.serve.settings import EngineConfig, ServeConfig

__all__ = [
    "AnyEngine",
    "Completion",
    "Defaults",
    "Delta",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "EngineStoppedError",
    "FinishReason",
    "Grammar",
    "Grammars",
    "Model",
    "OverloadedError",
    "Part",
    "Replicas",
    "Request",
    "Sampling",
    "ServeConfig",
    "ServedStep",
    "Source",
    "TokenLogprobs",
    "check_fits",
    "check_prompts",
    "defaults_of",
    "follow",
    "generation_mesh",
    "has_encoder",
    "lead",
    "load",
    "look_into",
    "look_into_together",
    "serving_of",
    "start_engine",
    "stream",
]
