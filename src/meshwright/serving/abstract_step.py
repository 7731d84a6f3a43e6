"""A step of an engine on any mesh, without weights: what `meshwright prove --serve` compiles.

    step = ServedStep("tp=8", batch=32, seq=2048)
    lowered = step.lower(model_config, mesh, "prefill")

The devices of the mesh may be of a machine that is not here.
"""

import dataclasses
from typing import Any, Literal

from jax.sharding import Mesh

from meshwright.errors import MeshwrightError
from meshwright.models import default_dtype, encodes_prompts
from meshwright.serving.abstract_weights import check_fits
from meshwright.serving.program_inputs import Shape
from meshwright.serving.programs import Steps
from meshwright.serving.replicas import replica_meshes
from meshwright.serving.settings import EngineConfig, decode_batch, served_config

Part = Literal["decode", "prefill"]


@dataclasses.dataclass(frozen=True)
class ServedStep:
    """What an engine would serve."""

    mesh: str
    batch: int  # sequences that are decoded together, by all replicas
    seq: int  # most tokens of each
    weights: Any = None  # as in EngineConfig, as is cache
    dtype: str = "auto"
    cache: Any = None

    def __post_init__(self) -> None:
        for name in ("batch", "seq"):
            if getattr(self, name) < 1:
                raise MeshwrightError(f"{name}={getattr(self, name)} must be at least 1")

    def lower(self, model: Any, mesh: Mesh, part: Part) -> tuple[Any, str]:
        """A replica's step, lowered, and its attention kernel.

        Prefill is a chunk of one prompt that continues, beside all sequences.
        """
        if encodes_prompts(model):
            raise MeshwrightError(
                "prove --serve compiles steps of decoders; the encoder and the decoder of this "
                "model have programs of their own: meshwright serve runs them"
            )
        replica = replica_meshes(mesh)[0]
        check_fits(model, replica)
        max_batch = -(-self.batch // mesh.shape.get("dp", 1))
        config = EngineConfig(
            max_batch=max_batch, max_length=self.seq, weights=self.weights, cache=self.cache
        )
        platform = mesh.devices.flat[0].platform
        dtype = default_dtype(self.dtype, platform)
        steps = Steps(served_config(model, replica.shape), replica, dtype, config, self.seq)
        shape = Shape(decode_batch(max_batch, platform))
        if part == "prefill":
            shape = Shape(max_batch, 1, min(config.chunk, self.seq), first=False)
        return steps.lower(shape, max_batch * steps.width + 1), steps.kernel
