"""Load the model of a run's checkpoint or a Hugging Face folder onto any mesh.

model = load_weights(model_source("runs/first"), generation_mesh("fsdp=4,tp=2"))
"""

import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from meshwright.data import Tokenizer, load_tokenizer, tokenizer_from_json
from meshwright.errors import MeshwrightError
from meshwright.files import not_a_model
from meshwright.hub import ADAPTER as HUB_ADAPTER
from meshwright.hub import MODEL, check_folder, hub_name, local_folder, name_of_snapshot
from meshwright.launch import weights_sample
from meshwright.layouts import fit, stored
from meshwright.machines import check_host_memory, host_bytes
from meshwright.meshes import MeshSpec
from meshwright.meshes import mesh as build_mesh
from meshwright.models import (
    PRESETS,
    SOURCE,
    LoraConfig,
    abstract_arrays,
    encodes_prompts,
    family_of,
    from_hf_config,
    is_adapter,
    load_adapter,
    load_hf,
    merged,
    model_from_dict,
    read_adapter_config,
)
from meshwright.serving.abstract_weights import (
    adapter_targets,
    check_fits,
    repeat_kv_heads,
    targets,
)
from meshwright.serving.grammars import Grammars
from meshwright.serving.settings import served_config
from meshwright.training import check_base


@dataclasses.dataclass(frozen=True)
class Source:
    """A model in a folder: its config and tokenizer, with weights still to be read."""

    config: Any
    tokenizer: Tokenizer
    ends: frozenset[int]
    """Token ids that end a document."""
    special_tokens: bool
    """Whether to add the tokenizer's special tokens to a prompt, such as begin-of-text."""
    name: str
    """The source, for messages."""
    read: Callable[[Any], Any]
    """Reads the weights for a tree of abstract arrays with shardings."""
    objective: str = "auto"
    """What a run was trained on; of others auto."""
    generation_config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The fields of generation_config.json; see `defaults_of`."""
    weights: Callable[[], Any] = lambda: None
    """Identifies the weights without reading all of them, as JSON."""
    adapter: "Adapter | None" = None
    """What `read` merges with the weights: what a run with LoRA trained, or a folder of PEFT."""
    adapters: Mapping[str, "Adapter"] = dataclasses.field(default_factory=dict)
    """Adapters that an engine serves beside it, by name; see `with_adapters`."""

    @functools.cached_property
    def grammars(self) -> Grammars:
        """For constrained decoding; engines and the server share it."""
        return Grammars(self.tokenizer, self.ends)

    def encode(self, prompt: str) -> list[int]:
        """The tokens of a prompt."""
        tokens = [int(i) for i in self.tokenizer.encode_batch([prompt], self.special_tokens)[0]]
        if not self.special_tokens and encodes_prompts(self.config):
            tokens.append(self.tokenizer.end_of_document)  # as the encoder's inputs in training
        return tokens


@dataclasses.dataclass(frozen=True)
class Adapter:
    """An adapter in a folder: of a run, or of PEFT."""

    folder: Path
    lora: LoraConfig
    base: Path
    """The weights that it adapts, if they are in a folder here."""
    read: Callable[[Any], Any]
    """As that of a Source, for abstract arrays `{"adapter": …}`."""
    weights: Callable[[], Any]
    """Identifies the factors, as that of a Source."""
    of_weights: Any = None
    """What a run noted of the weights that it adapts, to be compared with a Source's."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A model on a mesh."""

    source: Source
    params: Any
    mesh: Mesh

    @property
    def config(self) -> Any:
        return served_config(self.source.config, self.mesh.shape)


def generation_mesh(text: str = "dp=1,fsdp=1,tp=1,sp=1") -> Mesh:
    """The mesh for a text: missing standard axes have size 1, remaining devices are unused.

    >>> dict(generation_mesh("tp=1").shape)
    {'tp': 1, 'dp': 1, 'fsdp': 1, 'sp': 1}
    """
    spec = MeshSpec.parse(text).with_standard_axes()
    devices = jax.devices()
    if spec.is_resolved:
        devices = devices[: math.prod(spec.sizes)]
    return build_mesh(spec, devices=devices, axis_types="explicit")


def model_source(
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    tokenizer: str | None = None,
    end_token: str | None = None,
    adapter: str | os.PathLike[str] | None = None,
) -> Source:
    """The model in a run's folder, a Hugging Face folder or on the Hub, without reading weights.

    `tokenizer` and `end_token` replace the folder's own (see load_tokenizer). The folder of an
    `adapter` is merged with it; so is a folder of PEFT with the model that it names.
    """
    folder = local_folder(path, MODEL)
    if adapter is not None:
        base = model_source(folder, step=step, tokenizer=tokenizer, end_token=end_token)
        return _with_merged(base, adapter_source(adapter, base))
    if is_adapter(folder) and not (folder / "config.json").is_file():
        own_tokenizer = (folder / "tokenizer.json").is_file()
        named = tokenizer or (str(folder) if own_tokenizer else None)
        base = model_source(_peft_base(folder), step=step, tokenizer=named, end_token=end_token)
        return _with_merged(base, adapter_source(folder, base))
    fields = _config_file(folder)
    own = None if tokenizer is None else load_tokenizer(tokenizer, end_token)
    if "model_config" in fields:
        return _run(folder, fields, step, own)
    if "architectures" not in fields:
        raise MeshwrightError(
            f"{folder / 'config.json'} belongs neither to a run (it has no 'model_config') nor to "
            "Hugging Face (no 'architectures'); give the folder of a run or of a Hugging Face model"
        )
    if step is not None:
        raise MeshwrightError(
            f"{folder} is a Hugging Face folder, which has no step {step}; leave --step out"
        )
    return _hugging_face(folder, fields, own, end_token)


def adapter_source(folder: str | os.PathLike[str], source: Source) -> Adapter:
    """The adapter in a folder of PEFT or of a run with LoRA, if it is one of this model.

    One of PEFT may also be named on the Hub.
    """
    config = source.config
    path = local_folder(folder, HUB_ADAPTER)
    try:
        is_peft = is_adapter(path)
    except OSError as reason:
        shown = str(path)[:200]
        raise MeshwrightError(f"{shown} cannot be read: {reason.strerror or reason}") from None
    if is_peft:
        lora = read_adapter_config(path, family_of(config).hugging_face.model(config))

        def read(targets: Any) -> Any:
            shardings = jax.tree.map(lambda target: target.sharding, targets)
            return load_adapter(path, config, shardings)[0]

        return Adapter(path, lora, Path(), read, lambda: weights_sample(path))
    is_run = "model_config" in _config_file(path)
    adapter = model_source(path).adapter if is_run else None
    if adapter is None:
        raise MeshwrightError(
            f"{path} holds no adapter; give the folder of a run with LoRA, or one that PEFT wrote "
            "(adapter_config.json)"
        )
    if adapter.of_weights != source.weights():
        raise MeshwrightError(
            f"{path} is an adapter of the weights that were in {adapter.base}, and those of "
            f"{source.name} are others; it needs the same weights"
        )
    return adapter


def chat_folder(path: str | os.PathLike[str]) -> Path:
    """The folder of a model's tokenizer and chat template: a folder of PEFT may lack them."""
    folder = Path(path)
    own = ("config.json", "tokenizer_config.json", "chat_template.jinja")
    if is_adapter(folder) and not any((folder / name).is_file() for name in own):
        return _peft_base(folder)
    return folder


def _peft_base(folder: Path) -> Path:
    """The folder of the model that a folder of PEFT names."""
    fields = _json(folder / "adapter_config.json")
    base, revision = fields.get("base_model_name_or_path"), fields.get("revision")
    if isinstance(base, str) and base:
        if Path(base).is_dir():
            return Path(base)
        if hub_name(base) is not None:
            return local_folder(f"{base}@{revision}" if revision else base, MODEL)
    of = f", of {base!r}, which is no folder here" if base else ", without the model that it adapts"
    raise MeshwrightError(
        f"{folder} is an adapter of PEFT{of}; give the folder of the model, and this one with "
        f"--adapter {folder}"
    )


def _with_merged(source: Source, adapter: Adapter) -> Source:
    """A model with an adapter that is merged when weights are read."""
    if source.adapter is not None:
        raise MeshwrightError(
            f"{source.name} has an adapter of its own, which is merged; export it first: "
            "meshwright export RUN OUT --merge"
        )
    return dataclasses.replace(
        source,
        name=f"{source.name} with {adapter.folder}",
        read=functools.partial(read_merged, source.read, adapter, source.config),
        weights=lambda: {"base": source.weights(), "adapter": adapter.weights()},
        adapter=adapter,
    )


def load_weights(source: Source, mesh: Mesh, dtype: Any = jnp.float32) -> Model:
    """Load the weights onto the mesh, matrices in `dtype`; each device reads its shard."""
    check_fits(source.config, mesh)
    arrays = abstract_arrays(source.config)
    padded = targets(served_config(source.config, mesh.shape), mesh, dtype)
    check_host_memory(
        host_bytes(padded),
        f"{source.name} in {jnp.dtype(dtype).name}",
        "use --dtype bfloat16, or fewer devices if some hold copies",
    )
    on_disk = jax.tree.map(lambda target, spec: stored(target, spec.shape), padded, arrays)
    params = jax.tree.map(repeat_kv_heads, source.read(on_disk), padded, arrays)
    return Model(source, fit(params, padded), mesh)


def _config_file(folder: Path) -> dict[str, Any]:
    if str(folder) in PRESETS and not folder.exists():
        raise MeshwrightError(
            f"{folder} is a preset, which has sizes and no weights; train it (meshwright train "
            f"{folder} --run FOLDER), or give a folder with weights or a name on the Hub"
        )
    check_folder(folder)
    file = folder / "config.json"
    if not file.is_file():
        raise MeshwrightError(
            f"{folder} holds no config.json, so it is neither a run nor a Hugging Face model; "
            f"{not_a_model(folder)}"
        )
    fields = _json(file)
    if not isinstance(fields, dict):
        raise MeshwrightError(f"{file} is not a JSON object")
    return fields


def _run(
    folder: Path, fields: dict[str, Any], step: int | None, tokenizer: Tokenizer | None
) -> Source:
    from meshwright.checkpoint import (
        Checkpoints,
        folders,
        holds_pieces,
        load_piece_tree,
        read_intact_step,
    )

    try:
        config = model_from_dict(fields["model_config"])
        config = dataclasses.replace(config, hf_config=fields.get("hf_config"))
    except (KeyError, TypeError, ValueError) as reason:
        raise MeshwrightError(
            f"{folder / 'config.json'}: 'model_config' does not match this version: {reason}"
        ) from None
    if tokenizer is None:
        tokenizer = _run_tokenizer(folder / "tokenizer_state.json")
    _check_vocabulary(tokenizer, config, folder)

    def command(other: int) -> str:
        return f"the same command with --step {other}"

    checkpoints = Checkpoints(folder / "checkpoints", command=command)
    chosen = checkpoints.latest() if step is None else step
    if chosen is None:
        raise MeshwrightError(
            f"{folder / 'checkpoints'} holds no complete checkpoint; the run saves one when it "
            f"ends and every --checkpoint.every steps{_renamed(checkpoints.folder)}"
        )
    checkpoints.arrays(chosen)  # or an error that lists them

    lora = LoraConfig(**_lora_fields(fields))
    noted: Any = fields.get("base")
    if lora.rank and not isinstance(noted, Mapping):
        raise MeshwrightError(
            f"{folder / 'config.json'} does not say which weights the run's adapter is of"
        )
    base = Path(noted["folder"]) if noted else Path()
    own = Path((config.hf_config or {}).get(SOURCE) or "")  # if it has the same tokenizer
    generation_config = _generation_config(own)

    def read_saved(targets: Any) -> Any:
        """The weights of the checkpoint, or its adapter."""
        if holds_pieces(folders.complete_folder(checkpoints.folder, chosen)):
            record = read_intact_step(checkpoints.folder, chosen, command)
            place = checkpoints.folder
            return load_piece_tree(place, record, config, "params", targets, lora=lora)
        return checkpoints.restore(chosen, {"params": targets}, cast=True)["params"]

    def read(targets: Any) -> Any:
        if adapter is None:
            return read_saved(targets)
        here = _base_folder(base)
        moved = f"give the folder where they are now as the model, and --adapter {folder}"
        check_base(noted, here, f"{folder} is an adapter", moved)
        return read_merged(functools.partial(_read_hf, here, config), adapter, config, targets)

    def fingerprints() -> dict[str, Any]:
        return {name: array.fingerprint for name, array in checkpoints.arrays(chosen).items()}

    adapter = None
    if lora.rank:
        adapter = Adapter(folder, lora, base, read_saved, fingerprints, noted["weights"])
    return Source(
        config=config,
        tokenizer=tokenizer,
        ends=frozenset({tokenizer.end_of_document})
        | _hf_ends(config.hf_config or {}, generation_config),
        objective=str(fields.get("objective", "auto")),
        generation_config=generation_config,
        special_tokens=fields.get("special_tokens") is True,  # as in the data; none in old runs
        name=f"step {chosen} of {folder}",
        read=read,
        weights=lambda: (
            fingerprints() | ({"base": weights_sample(_base_folder(base))} if lora.rank else {})
        ),
        adapter=adapter,
    )


def _base_folder(folder: Path) -> Path:
    """The folder of an adapter's weights; what was in another cache of the Hub, from the Hub."""
    name = None if folder.is_dir() else name_of_snapshot(folder)
    return folder if name is None else local_folder(str(name), MODEL)


def _lora_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of LoRA in a run's config.json; earlier versions have none."""
    lora = dict(fields.get("lora") or {})
    return {**lora, "targets": tuple(lora.get("targets", ()))}


def read_merged(read: Callable[[Any], Any], adapter: Adapter, config: Any, targets: Any) -> Any:
    """What `read` gives for the targets, with an adapter merged."""
    mesh = targets["embedding"].sharding.mesh
    weights = read(targets)
    factors = adapter.read(adapter_targets(config, adapter.lora, mesh))
    with jax.set_mesh(mesh):
        return merged({**weights, **factors}, adapter.lora.scale)


def _renamed(checkpoints: Path) -> str:
    from meshwright.checkpoint import misnamed

    names = misnamed(checkpoints)
    return f"; renamed ones are not read: {', '.join(names[:4])}" if names else ""


def _hugging_face(
    folder: Path, fields: dict[str, Any], tokenizer: Tokenizer | None, end_token: str | None
) -> Source:
    config = from_hf_config(folder)
    generation_config = _generation_config(folder)
    if tokenizer is None:
        if not (folder / "tokenizer.json").is_file():
            raise MeshwrightError(
                f"{folder} holds no tokenizer.json; name one with --tokenizer: 'bytes', a "
                "tokenizer.json or a folder that holds one"
            )
        tokenizer = load_tokenizer(folder, end_token)
    _check_vocabulary(tokenizer, config, folder)

    return Source(
        config=config,
        tokenizer=tokenizer,
        ends=frozenset({tokenizer.end_of_document}) | _hf_ends(fields, generation_config),
        special_tokens=True,
        name=str(folder),
        read=functools.partial(_read_hf, folder, config),
        generation_config=generation_config,
        weights=lambda: weights_sample(folder),
    )


def _read_hf(folder: Path, config: Any, targets: Any) -> Any:
    shardings = jax.tree.map(lambda target: target.sharding, targets)
    return load_hf(folder, config, shardings, targets["embedding"].dtype)


def _generation_config(folder: Path) -> dict[str, Any]:
    """The fields of a folder's generation_config.json; none if there is no such file."""
    file = folder / "generation_config.json"
    fields = _json(file) if file.is_file() else {}
    if not isinstance(fields, dict):
        raise MeshwrightError(f"{file} is not a JSON object")
    return fields


def _run_tokenizer(file: Path) -> Tokenizer:
    if not file.is_file():
        raise MeshwrightError(f"{file} does not exist; name the run's tokenizer with --tokenizer")
    try:
        return tokenizer_from_json(_json(file))
    except (KeyError, TypeError, AttributeError):
        raise MeshwrightError(f"{file} does not describe a tokenizer") from None


def _check_vocabulary(tokenizer: Tokenizer, config: Any, folder: Path) -> None:
    if tokenizer.vocab > config.vocab:
        raise MeshwrightError(
            f"the tokenizer has {tokenizer.vocab} tokens, the model in {folder} {config.vocab}: "
            "they do not match; name the model's tokenizer with --tokenizer"
        )


def _hf_ends(*files: Mapping[str, Any]) -> frozenset[int]:
    """The eos_token_id (one or several) of config.json and generation_config.json."""
    ends: set[int] = set()
    for fields in files:
        value = fields.get("eos_token_id")
        ends |= {i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)}
    return frozenset(ends)


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as reason:
        raise MeshwrightError(f"{file} cannot be read: {reason.strerror or reason}") from None
    except (ValueError, RecursionError) as reason:
        raise MeshwrightError(f"{file} is not readable JSON: {reason}") from None
