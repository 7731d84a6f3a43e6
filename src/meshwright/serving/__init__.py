"""Serve a model: the inference engine, which also generates for a list of prompts."""

from typing import TYPE_CHECKING

from meshwright.lazy import import_when_used

if TYPE_CHECKING:
    from meshwright.serving.abstract_step import ServedStep
    from meshwright.serving.abstract_weights import check_fits
    from meshwright.serving.adapters import with_adapters
    from meshwright.serving.defaults import Defaults, answer_stops, defaults_of
    from meshwright.serving.engine import Engine
    from meshwright.serving.from_trainer import trained_weights
    from meshwright.serving.generate import stream
    from meshwright.serving.grammars import Grammar, Grammars
    from meshwright.serving.job import check_prompts
    from meshwright.serving.model import LanguageModel, load
    from meshwright.serving.pages import PagePool
    from meshwright.serving.replicas import Replicas, start_engine
    from meshwright.serving.request import (
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
    from meshwright.serving.run_export import export
    from meshwright.serving.samples import TextSampler
    from meshwright.serving.sampling import Sampling
    from meshwright.serving.scheduler import IN_FLIGHT, Scheduler
    from meshwright.serving.scheduler import Sequence as ScheduledSequence
    from meshwright.serving.scheduler import Step as ScheduledStep
    from meshwright.serving.settings import EngineConfig, ServeConfig, served_config
    from meshwright.serving.source import (
        Model,
        Source,
        chat_folder,
        generation_mesh,
        load_weights,
        model_source,
    )
    from meshwright.serving.start import serve

__all__ = [
    "IN_FLIGHT", "AnyEngine", "Completion", "Defaults", "Delta", "Engine", "EngineConfig",
    "EngineStats", "EngineStoppedError", "FinishReason", "Grammar", "Grammars", "LanguageModel",
    "Model", "OverloadedError", "PagePool", "Replicas", "Request", "Sampling", "ScheduledSequence",
    "ScheduledStep", "Scheduler", "ServeConfig", "ServedStep", "Source", "TextSampler",
    "TokenLogprobs", "answer_stops", "chat_folder", "check_fits", "check_prompts", "defaults_of",
    "export", "generation_mesh", "load", "load_weights", "model_source", "serve", "served_config",
    "start_engine", "stream", "trained_weights", "with_adapters",
]  # fmt: skip

import_when_used(__name__)
