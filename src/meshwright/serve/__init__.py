"""Serve a model: the inference engine, which also generates for a list of prompts."""

from meshwright.serve.abstract_step import Part, ServedStep
from meshwright.serve.defaults import Defaults, defaults_of
from meshwright.serve.engine import Engine
from meshwright.serve.generate import stream
from meshwright.serve.grammars import Grammar, Grammars
from meshwright.serve.job import check_prompts
from meshwright.serve.load import (
    Model,
    Source,
    check_fits,
    generation_mesh,
    has_encoder,
    load,
    look_into,
    served_config,
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
from meshwright.serve.same_settings import settings_facts
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
    "served_config",
    "settings_facts",
    "start_engine",
    "stream",
]
