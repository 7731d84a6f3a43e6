"""Settings of an inference engine."""

import dataclasses

from meshwright.errors import MeshwrightError
from meshwright.ops import QUANTIZED_DTYPES


@dataclasses.dataclass(frozen=True)
class ServeConfig:
    """Settings of an engine; see docs/serve/engine.md."""

    max_batch: int = 32
    """Most requests that are decoded together."""
    max_length: int | None = None
    """Most tokens of a prompt and its continuation together; the default is 8,192, or the model's
    if that is less."""
    page_size: int = 64
    """Tokens per page of the KV cache."""
    pages: int | None = None
    """Pages of the KV cache; the default fills `memory_fraction` of the device's memory."""
    memory_fraction: float = 0.9
    """Part of the device's memory that weights and KV cache may use together."""
    chunk: int = 512
    """Most tokens of prompts that are computed in one step."""
    weights: str | None = None
    """Quantize weights to int8 or fp8, with a scale per output channel; None: as they are."""
    max_waiting: int | None = None
    """Most requests that wait; more are refused."""
    prefix_cache: bool = True
    """Reuse the keys and values of prompts that begin alike."""
    kernel: str = "auto"
    """Paged attention: auto, cudnn, ragged or plain."""
    batch_buckets: tuple[int, ...] | None = None
    """Batch sizes that decode is compiled for; the default is 1, 8, 32 … up to max_batch."""
    chunk_shapes: tuple[tuple[int, int], ...] | None = None
    """Shapes (prompts, tokens of each) of prefill programs; the default follows `chunk`."""
    prompt_logprobs: bool = True
    """Compile the programs that requests with `prompt_logprobs` need."""
    compile_first: bool = True
    """Compile every program before the engine is ready; without, when it is first needed."""
    strict: bool = False
    """Make a compilation after the engine is ready an error."""

    def __post_init__(self) -> None:
        for name in ("max_batch", "page_size", "chunk"):
            if getattr(self, name) < 1:
                raise MeshwrightError(f"{name}={getattr(self, name)} must be at least 1")
        if self.weights not in (None, *QUANTIZED_DTYPES):
            known = " or ".join(QUANTIZED_DTYPES)
            raise MeshwrightError(f"weights={self.weights!r} must be {known}, or left out")
        if not 0 < self.memory_fraction <= 1:
            raise MeshwrightError(
                f"memory_fraction={self.memory_fraction} must be above 0 and at most 1"
            )

    @property
    def batches(self) -> tuple[int, ...]:
        """The batch sizes of decode programs, ascending; the last is max_batch."""
        sizes = self.batch_buckets or (1, 8, 32, 64, 128, 256, 512, 1024)
        return (*sorted(size for size in set(sizes) if 0 < size < self.max_batch), self.max_batch)

    @property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """Shapes (prompts, tokens of each) of the prefill part of a step."""
        if self.chunk_shapes:
            return self.chunk_shapes
        shapes = {(1, self.chunk)}
        for parts in (4, 16):
            if self.chunk >= 16 * parts and parts <= self.max_batch:
                shapes |= {(parts, self.chunk // parts), (1, self.chunk // parts)}
        return tuple(sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape)))
