"""All settings of `meshwright serve`, as one value."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from meshwright.errors import MeshwrightError, did_you_mean, explained
from meshwright.hub import hub_name
from meshwright.launch import convert_paths

_KERNELS = ("auto", "cudnn", "triton", "ragged", "plain")
KEY_VARIABLE = "MESHWRIGHT_API_KEY"
_DEFAULT_LENGTH = 8192  # a longer one costs memory: chunks copy the keys that precede them


@explained("mw.EngineConfig(max_batch=32, max_length=8192)")
@dataclasses.dataclass(frozen=True)
class EngineConfig:
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
    weights: Literal["int8", "fp8"] | None = None
    """Quantize weights to int8 or fp8, with a scale per output channel; None: as they are."""
    cache: Literal["fp8"] | None = None
    """Round the KV cache to fp8, which takes half the memory; None: in the dtype of weights."""
    max_waiting: int | None = None
    """Most requests that wait; more are refused."""
    max_adapters: int = 0
    """LoRA adapters that can be loaded at once; those of --adapters by default. Their memory is
    taken when the engine starts."""
    max_adapter_rank: int | None = None
    """Largest rank of an adapter; by default that of --adapters, or 16."""
    prefix_cache: bool = True
    """Reuse the keys and values of prompts that begin alike."""
    kernel: str = "auto"
    """Paged attention: auto, cudnn, triton, ragged or plain."""
    batch_buckets: tuple[int, ...] | None = None
    """Batch sizes that decode is compiled for; the default is 2, 16, 32, 64 … up to max_batch."""
    chunk_shapes: tuple[tuple[int, int], ...] | None = None
    """Shapes (prompts, tokens of each) of prefill programs; the default follows `chunk`."""
    prompt_shapes: tuple[tuple[int, int], ...] | None = None
    """Shapes (prompts, tokens of each) of programs for whole prompts: an encoder's, and on meshes
    with sp those of long prompts; the default follows `chunk` and `max_length`."""
    prompt_logprobs: bool = True
    """Compile the programs that requests with `prompt_logprobs` need."""
    compile_first: bool = True
    """Compile every program before the engine is ready; without, when it is first needed."""
    strict: bool = False
    """Make a compilation after the engine is ready an error."""

    def __post_init__(self) -> None:
        if self.max_adapters < 0:
            raise MeshwrightError(f"max_adapters={self.max_adapters} must be at least 0")
        for name in (
            "max_batch", "page_size", "chunk", "max_length", "pages", "max_adapter_rank"
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise MeshwrightError(f"{name}={value} must be at least 1")
        if self.kernel not in _KERNELS:
            raise MeshwrightError(
                f"kernel={self.kernel!r} is not known{did_you_mean(self.kernel, _KERNELS)}"
            )
        if self.weights is not None or self.cache is not None:
            self._check_dtypes()
        if not 0 < self.memory_fraction <= 1:
            raise MeshwrightError(
                f"memory_fraction={self.memory_fraction} must be above 0 and at most 1"
            )

    def _check_dtypes(self) -> None:
        from meshwright.ops import QUANTIZED_DTYPES  # which imports jax
        from meshwright.ops.attention import CACHE_DTYPES

        for name, dtypes in {"weights": QUANTIZED_DTYPES, "cache": CACHE_DTYPES}.items():
            value = getattr(self, name)
            if value not in (None, *dtypes):
                known = " or ".join(dtypes)
                raise MeshwrightError(f"{name}={value!r} must be {known}, or left out")

    def for_encoder(self) -> "EngineConfig":
        """For a model whose prompts an encoder reads: no prefix of theirs is reused or scored.

        Chunks are of sequences that were preempted.
        """
        chunks = self.chunk_shapes or ((1, self.chunk),)
        return dataclasses.replace(
            self, chunk_shapes=chunks, prefix_cache=False, prompt_logprobs=False
        )

    @property
    def adapter_rank(self) -> int:
        """The rank of slots; without any adapter at first it is a usual one."""
        return self.max_adapter_rank or 16

    @property
    def batches(self) -> tuple[int, ...]:
        """The batch sizes that are decoded, ascending; the last is max_batch. See decode_batch."""
        sizes = self.batch_buckets or (2, 16, 32, 64, 128, 256, 512, 1024)
        return (*sorted(size for size in set(sizes) if 0 < size < self.max_batch), self.max_batch)

    @property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """Shapes (prompts, tokens of each) of the prefill part of a step."""
        if self.chunk_shapes:
            return self.chunk_shapes
        longest = min(self.chunk, self.max_length or self.chunk)
        shapes = {(1, longest)}
        for parts in (4, 16):
            length = min(self.chunk // parts, longest)
            if self.chunk >= 16 * parts and parts <= self.max_batch:
                shapes |= {(parts, length), (1, length)}
        return tuple(sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape)))

    @property
    def longest_chunk(self) -> int:
        return max(length for _, length in self.chunks)


def decode_batch(batch: int, platform: str) -> int:
    """The batch of the program that decodes so many: on a GPU XLA has a slow matmul for one."""
    return max(batch, 2) if platform in ("gpu", "cuda") else batch


@dataclasses.dataclass(frozen=True)
class LimitsConfig:
    requests: int = 1024
    """Sequences that may run or wait at once; a request beyond that is answered with 429."""
    body_bytes: int = 16 * 2**20
    """Largest request body; a larger one is answered with 413."""
    body_values: int = 2**18
    """Most JSON values in a request body (numbers, texts, lists, objects), or twice
    --engine.max-length if that is more; a body with more is answered with 413."""
    messages: int = 8192
    """Most messages of a chat."""
    tools: int = 1024
    """Most tools of a chat."""
    characters: int = 2**21
    """Most characters of a text that is tokenized, or those of --engine.max-length of the
    tokenizer's longest tokens if that is more; a longer text is answered with 413."""
    texts: int = 16_384
    """Most texts in a list of EasyLM's routes."""
    body_seconds: float = 30.0
    """Time for a client to send its body."""
    request_seconds: float = 600.0
    """Time for a request, from its body to its last token; then it is cancelled."""
    send_seconds: float = 60.0
    """Time for a client to read what was sent to it; then its request is cancelled."""
    shutdown_seconds: float = 20.0
    """Time for running requests to finish after SIGTERM or Ctrl-C; Kubernetes ends a process 30 s
    after SIGTERM unless it is told otherwise."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "shutdown_seconds" and value < 0:
                raise MeshwrightError(f"limits.{field.name}={value} must be 0 or more")
            if field.name != "shutdown_seconds" and value < 1e-3:
                raise MeshwrightError(f"limits.{field.name}={value} must be more than 0")


@dataclasses.dataclass(frozen=True)
class EasyLMConfig:
    """Settings of EasyLM's server, for its routes; their names are EasyLM's."""

    input_length: int = 1024
    """Longest prompt in tokens; of a longer one the end is used."""
    seq_length: int = 2048
    """Longest prompt and continuation in tokens, and the window of /loglikelihood-rolling."""
    default_temperature: float = 1.0
    """Sampling temperature of /generate and /chat where the request names none."""
    top_k: int = 50
    """Top-k sampling of /generate and /chat."""
    greedy_until_max_length: int = 5000
    """Maximum number of tokens that /greedy-until generates for a prompt."""
    prepend_to_prefix: str = ""
    append_to_prefix: str = ""
    prepend_to_text: str = ""
    append_to_text: str = ""
    chat_prepend_text: str = ""
    chat_user_prefix: str = ""
    chat_user_suffix: str = ""
    chat_lm_prefix: str = ""
    chat_lm_suffix: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.input_length < self.seq_length:
            raise MeshwrightError(
                f"easylm.input_length={self.input_length} must be from 1 to less than "
                f"easylm.seq_length={self.seq_length}"
            )


@explained("mw.ServeConfig('runs/first', port=8000)")
@dataclasses.dataclass(frozen=True)
class ServeConfig:
    """All settings of a server."""

    model: str
    """Folder of a run, of a Hugging Face model or of an adapter of PEFT, or a name on the Hub
    (org/name)."""
    adapter: str | None = None
    """Adapter that is merged into the model: a folder of PEFT or of a run with LoRA, or a name on
    the Hub."""
    adapters: tuple[str, ...] = ()
    """Adapters to serve beside the model, as NAME=FOLDER, or NAME=org/name on the Hub; a request
    names one as its model."""
    adapter_loading: bool = False
    """Let clients load and unload adapters (/v1/load_lora_adapter) from folders of this machine."""
    mesh: str = "dp=1,fsdp=1,tp=1,sp=1"
    """Mesh axes and sizes: tp=-1 uses all devices. The default is one device."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Data type of weights and KV cache; auto: bfloat16 on accelerators, float32 on CPUs."""
    step: int | None = None
    """Step of the checkpoint to load; the latest by default."""
    tokenizer: str | None = None
    """"bytes", a tokenizer.json or its folder, instead of the model's own."""
    end_token: str | None = None
    """Token that ends a document, if the tokenizer files do not name it."""
    cpu_devices: int | None = None
    """Simulate this number of devices on the CPU, in each process."""
    coordinator: str | None = None
    """Several processes: HOST:PORT of process 0, or auto (Slurm, Kubernetes, TPU pods)."""
    processes: int | None = None
    """Number of processes."""
    process_id: int | None = None
    """Index of this process; process 0 answers the clients."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every network of the machine."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    name: str | None = None
    """Name of the model in requests; the folder's name by default."""
    chat_template: Path | None = None
    """A jinja2 chat template, or "chatml", instead of the model's own."""
    tool_calls: Literal["auto", "hermes", "llama", "none"] = "auto"
    """Format of tool calls in the model's text; auto: by its chat template."""
    generation_config: Literal["auto", "none"] = "auto"
    """Default sampling settings: auto takes those of the model's generation_config.json."""
    api_key: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    """Key that clients must send. Other users of the machine can see flags: prefer a file."""
    api_key_file: Path | None = None
    """File of API keys, one in each line."""
    allow_origin: tuple[str, ...] = ()
    """Web page that may call the server from a browser, such as https://chat.example.org."""
    access_log: bool = True
    """Log each request in one line, on standard error."""
    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    limits: LimitsConfig = dataclasses.field(default_factory=LimitsConfig)
    easylm: EasyLMConfig = dataclasses.field(default_factory=EasyLMConfig)

    def __post_init__(self) -> None:
        convert_paths(self)
        if not 0 <= self.port < 2**16:
            raise MeshwrightError(f"port={self.port} must be from 0 to 65535; 0 takes a free one")
        for origin in self.origins:
            if not _is_origin(origin):
                raise MeshwrightError(
                    f"--allow-origin {origin!r} must be a scheme, a host and perhaps a port, as in "
                    "https://chat.example.org or http://localhost:3000"
                )

    def adapter_folders(self) -> dict[str, str]:
        """The folders of --adapters by name."""
        folders: dict[str, str] = {}
        for text in self.adapters:
            name, equals, folder = text.partition("=")
            if not (name and equals and folder):
                raise MeshwrightError(
                    f"--adapters {text!r} must be NAME=FOLDER, as in sql=runs/sql"
                )
            if name in folders or name == self.served_name:
                raise MeshwrightError(f"--adapters names {name!r} twice, or as the model itself")
            folders[name] = folder
        return folders

    @property
    def origins(self) -> tuple[str, ...]:
        """Web pages that may call the server, as browsers name them."""
        return tuple(origin.rstrip("/") for origin in self.allow_origin)

    @property
    def served_name(self) -> str:
        """The model's name in requests."""
        on_hub = hub_name(self.model)
        return self.name or (on_hub.repo if on_hub else Path(self.model).resolve().name)

    def api_keys(self) -> tuple[str, ...]:
        """The keys of the flag, the file and the environment; without any, clients need none."""
        keys = [*self.api_key, *os.environ.get(KEY_VARIABLE, "").split()]
        if self.api_key_file is not None:
            try:
                keys += self.api_key_file.read_text(encoding="utf-8").split()
            except (OSError, UnicodeDecodeError) as reason:
                raise MeshwrightError(
                    f"--api-key-file {self.api_key_file} cannot be read: {reason}"
                ) from None
            if not keys:
                raise MeshwrightError(
                    f"--api-key-file {self.api_key_file} holds no key; write one in each line"
                )
        if any(not key.strip() for key in keys):
            raise MeshwrightError("an API key is empty; leave --api-key out to need none")
        return tuple(keys)


def _is_origin(text: str) -> bool:
    try:
        parts = urlsplit(text)
        is_address = bool(parts.hostname) and parts.port != 0  # an error if it is no number
    except ValueError:
        return False
    return is_address and text == f"{parts.scheme}://{parts.netloc}"


def longest(config: EngineConfig, model_config: Any) -> int:
    """Most tokens of a prompt and its continuation together."""
    wanted, positions = config.max_length, model_config.max_seq
    if wanted is None:
        return min(_DEFAULT_LENGTH, positions)
    if not 1 <= wanted <= positions:
        raise MeshwrightError(
            f"max_length={wanted} does not fit the model, which has {positions} positions: give 1 "
            f"to {positions}, or leave it out"
        )
    return wanted


def served_config(config: Any, mesh_shape: Mapping[str, int]) -> Any:
    """The model as a mesh holds it: KV heads are repeated where tp is a multiple of their number.

    A device then holds one KV head, which is that of all its query heads.
    """
    tensor = mesh_shape.get("tp", 1)
    if tensor <= config.kv_heads or tensor % config.kv_heads or config.heads % tensor:
        return config
    return dataclasses.replace(config, kv_heads=tensor)
