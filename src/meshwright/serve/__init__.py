"""Text generation with the model of a run or a Hugging Face folder: KV cache, sampling."""

from meshwright.serve.generate import check_prompts, stream
from meshwright.serve.load import Model, Source, check_fits, generation_mesh, load, look_into
from meshwright.serve.request import AnyEngine
from meshwright.serve.sampling import Sampling
from meshwright.serve.settings import ServeConfig

__all__ = [
    "AnyEngine",
    "Model",
    "Sampling",
    "ServeConfig",
    "Source",
    "check_fits",
    "check_prompts",
    "generation_mesh",
    "load",
    "look_into",
    "stream",
]
