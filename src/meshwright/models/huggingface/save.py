"""Write a model as a Hugging Face folder that transformers reads.

One tensor at a time comes to the host, so a model larger than its memory can be written. The folder
appears when it is whole.
"""

import contextlib
import functools
import itertools
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshwright.errors import MeshwrightError
from meshwright.files import check_no_mount_point, final_folder
from meshwright.hub import TOKENIZER
from meshwright.interrupt import whatever_ends
from meshwright.layouts import ArraySpec, tree_paths
from meshwright.models.huggingface.arrays import HfArray, HfModel
from meshwright.models.huggingface.fields import SPECIAL_TOKENS, read_hf_config
from meshwright.models.safetensors_dtypes import DTYPES
from meshwright.models.safetensors_write import (
    PlannedTensor,
    plan_files,
    write_index,
    write_json,
    write_safetensors,
)

logger = logging.getLogger("meshwright")


def save_folder(
    folder: str | os.PathLike[str],
    params: Any,
    model: HfModel,
    *,
    dtype: Any = None,
    max_file_bytes: int = 5 * 10**9,
    tokenizer: str | os.PathLike[str] | None = None,
) -> Path:
    """Write config.json and the weights, in files of at most `max_file_bytes`, into a new folder.

    Arguments:
        dtype: of the weights in the files; by default each array is written in its own.
        tokenizer: a folder whose tokenizer files, generation_config.json and special tokens (of
            its config.json) are copied; by default the folder that the config was read from.

    config.json has every field of the one that the config was read from. With
    several processes all of them call this; the first writes.
    """
    if not isinstance(folder, str | os.PathLike):
        raise MeshwrightError(f"{folder!r} is not the path of a folder")
    folder = Path(folder)
    kind = None if dtype is None else _checked_dtype(dtype)
    if not isinstance(max_file_bytes, int) or max_file_bytes < 1:
        raise MeshwrightError(f"max_file_bytes={max_file_bytes!r} must be a whole number from 1")
    leaves = _checked_leaves(params, model.specs)
    dtypes = {path: kind or _stored_dtype(path, leaf) for path, leaf in leaves.items()}
    arrays = dict(model.arrays)
    fields = model.write_config(dtypes[next(iter(arrays))].name)
    source: dict[str, list[tuple[HfArray, int]]] = {}  # the parts of each tensor
    for array in arrays.values():
        for i, name in enumerate(array.names):
            source.setdefault(name, []).append((array, i))
    planned = [
        PlannedTensor(name, dtypes[source[name][0][0].path], source[name][0][0].shape)
        for name in dict.fromkeys(_in_order(arrays))
    ]
    files = plan_files(planned, max_file_bytes, model.weights_file)

    writes = jax.process_index() == 0
    target = final_folder(folder)
    partial = target.with_name(f".{target.name}.part-{os.getpid()}")

    def remove() -> None:
        if writes:
            shutil.rmtree(partial, ignore_errors=True)

    problem = None
    ended = contextlib.ExitStack()
    try:
        ended.enter_context(whatever_ends(remove))
        if writes:
            beside = _tokenizer_folder(model.source) if tokenizer is None else Path(tokenizer)
            problem = _try(folder, lambda: _start(folder, partial, fields, beside, model))
        _raise_everywhere(problem)
        for file, part in files.items():
            values = _values(part, source, leaves)
            if writes and problem is None:
                write = functools.partial(write_safetensors, partial / file, part, values)
                problem = _try(folder, write)
            for _ in values:  # every process takes part in every gather, also after a failure
                pass
        if writes and problem is None:
            problem = _try(folder, lambda: _finish(target, partial, files))
        _raise_everywhere(problem)
    finally:
        ended.close()
        remove()
    return folder


def hf_tensors(params: Any, model: HfModel) -> Iterator[tuple[str, np.ndarray]]:
    """Their tensors by name, one at a time, of a model without tensors of several parts."""
    leaves = _checked_leaves(params, model.specs)
    for path, array in model.arrays.items():
        dtype = _stored_dtype(path, leaves[path])
        for layer, name in enumerate(array.names):
            yield name, _fetch(leaves[path], array, layer, dtype).reshape(array.shape)


def _in_order(arrays: dict[str, HfArray]) -> list[str]:
    """Names as a reader would expect them in the files: the embedding, layer by layer, the rest."""
    ordered: list[str] = []
    # arrays of the same layers stand together
    for _, stack in itertools.groupby(arrays.values(), lambda array: array.stack):
        by_layer = zip(*(array.names_by_layer for array in stack), strict=True)
        ordered += [name for arrays in by_layer for names in arrays for name in names]
    return ordered


def _values(
    part: list[PlannedTensor],
    source: dict[str, list[tuple[HfArray, int]]],
    leaves: dict[str, Any],
) -> Iterator[np.ndarray]:
    for tensor in part:
        first, *others = source[tensor.name]
        if not others:
            yield _fetch(leaves[first[0].path], *first, tensor.dtype).reshape(tensor.shape)
            continue
        joined = np.empty(first[0].unfolded, tensor.dtype)
        for array, layer in (first, *others):
            joined[array.window] = _fetch(leaves[array.path], array, layer, tensor.dtype)
        yield joined.reshape(tensor.shape)


def _fetch(value: Any, array: HfArray, tensor: int, dtype: np.dtype[Any]) -> np.ndarray:
    """What an array of ours is in a tensor of theirs, on this host, wherever the array lies."""
    theirs = tuple(array.order.index(dim) for dim in range(len(array.order)))
    index = np.unravel_index(tensor, array.stacked) if array.stacked else ()
    if not isinstance(value, jax.Array):
        return np.asarray(value)[index].transpose(theirs).astype(dtype)
    mesh, value = _on_automatic_axes(value)
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        found = _transpose(value, tuple(map(int, index)), theirs, dtype)
        if mesh is not None and not found.is_fully_addressable:
            # other processes have shards of it: all-gathered, every device has all of it
            found = jax.device_put(found, NamedSharding(mesh, PartitionSpec()))
            found = found.addressable_data(0)
    # without the padding of a vocabulary that the mesh does not divide
    return np.asarray(found)[tuple(slice(size) for size in array.part_shape)]


@functools.partial(jax.jit, static_argnums=(2, 3))
def _transpose(
    value: jax.Array, index: tuple[jax.Array, ...], order: tuple[int, ...], dtype: Any
) -> jax.Array:
    """One layer, or one of its experts, in their dims and dtype, sharded as before."""
    for number in index:
        value = jax.lax.dynamic_index_in_dim(value, number, axis=0, keepdims=False)
    return value.astype(dtype).transpose(order)


def _on_automatic_axes(value: jax.Array) -> tuple[Mesh | None, jax.Array]:
    """The same array on the same devices, its mesh with automatic axes: jit may gather at will."""
    sharding = value.sharding
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return None, value
    names = sharding.mesh.axis_names
    mesh = Mesh(sharding.mesh.devices, names, axis_types=(AxisType.Auto,) * len(names))
    shards = [shard.data for shard in value.addressable_shards]
    return mesh, jax.make_array_from_single_device_arrays(
        value.shape, NamedSharding(mesh, sharding.spec), shards, dtype=value.dtype
    )


def _checked_dtype(dtype: Any) -> np.dtype[Any]:
    try:
        kind = np.dtype(jnp.dtype(dtype))
    except TypeError:
        kind = np.dtype(object)
    if kind.name not in ("bfloat16", "float32"):
        raise MeshwrightError(f"dtype {dtype!r} is not written; jnp.bfloat16 and jnp.float32 are")
    return kind


def _stored_dtype(path: str, value: Any) -> np.dtype[Any]:
    kind = np.dtype(value.dtype)
    if kind not in DTYPES.values():
        raise MeshwrightError(
            f"array {path!r} is {kind.name}, which is not written; give dtype=jnp.float32 or "
            "dtype=jnp.bfloat16"
        )
    return kind


def _checked_leaves(params: Any, specs: Any) -> dict[str, Any]:
    """The arrays by path, each of the shape the config gives it."""
    wanted = dict(zip(tree_paths(specs), jax.tree.leaves(specs), strict=True))
    given = dict(zip(tree_paths(params), jax.tree.leaves(params), strict=True))
    differ = sorted(wanted.keys() ^ given.keys())
    if differ:
        raise MeshwrightError(
            f"these parameters are not of this config: they differ in {', '.join(differ)}"
        )
    for path, spec in wanted.items():
        shape = getattr(given[path], "shape", None)
        if shape != spec.shape and not _is_padded(given[path], spec):
            raise MeshwrightError(f"array {path!r} has shape {shape}, the config says {spec.shape}")
    return given


def _is_padded(value: Any, spec: ArraySpec) -> bool:
    """Whether an array has only zeros beyond the vocabulary, fewer than its mesh has devices."""
    sharding = getattr(value, "sharding", None)
    if not isinstance(sharding, NamedSharding) or value.ndim != spec.ndim:
        return False
    sizes = zip(value.shape, spec.shape, spec.dims, strict=True)
    if not all(size == wanted or dim == "vocab" for size, wanted, dim in sizes):
        return False
    vocab = spec.dims.index("vocab")
    if not 0 < value.shape[vocab] - spec.shape[vocab] < sharding.mesh.size:
        return False
    mesh, value = _on_automatic_axes(value)
    assert mesh is not None
    with jax.set_mesh(mesh):
        return not _any_from(value, vocab, spec.shape[vocab])


@functools.partial(jax.jit, static_argnums=1)
def _any_from(value: jax.Array, dim: int, start: jax.Array) -> jax.Array:
    """Whether there is a number other than 0 from `start` on along a dim."""
    beyond = jax.lax.broadcasted_iota(jnp.int32, value.shape, dim) >= start
    return jnp.any(beyond & (value != 0))


def _start(
    folder: Path, partial: Path, fields: dict[str, Any], beside: Path | None, model: HfModel
) -> None:
    """The folder to write into, with the config and the tokenizer's files in it."""
    check_no_mount_point(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise MeshwrightError(f"{folder} is there already; give a folder that is new or empty")
    copied = [] if beside is None else tokenizer_files_of(beside)
    if beside is not None and not copied:
        raise MeshwrightError(f"{beside} has no tokenizer file; looked for {', '.join(TOKENIZER)}")
    whole = model.config_file == HfModel.config_file  # an adapter's names no special tokens
    special = {} if beside is None or not whole else _special_tokens(beside)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial.mkdir()
    write_json(partial / model.config_file, fields | special)
    for file in copied:
        assert beside is not None
        target = partial / file.relative_to(beside)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, target)


def _finish(folder: Path, partial: Path, files: dict[str, list[PlannedTensor]]) -> None:
    write_index(partial, files)
    os.replace(partial, folder)


def _tokenizer_folder(source: str | None) -> Path | None:
    """The folder that the config was read from, if it has files of a tokenizer."""
    if source is None:
        return None
    if not Path(source).is_dir():
        logger.warning(
            "%s, which the model was read from, is not there any more: its tokenizer files are not "
            "copied; give their folder as tokenizer=",
            source,
        )
        return None
    return Path(source) if tokenizer_files_of(Path(source)) else None


def tokenizer_files_of(folder: Path) -> list[Path]:
    """The files of a folder that are a tokenizer's, with generation_config.json."""
    matches = (file for pattern in TOKENIZER for file in sorted(folder.glob(pattern)))
    return [file for file in matches if file.is_file()]


def _special_tokens(folder: Path) -> dict[str, Any]:
    """The special tokens that the config.json beside a tokenizer names, or its own files."""
    if (folder / "config.json").is_file():
        fields, _ = read_hf_config(folder)
        return {name: fields[name] for name in sorted(SPECIAL_TOKENS) if name in fields}
    if not all((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return {}
    added = read_hf_config(folder / "tokenizer.json")[0].get("added_tokens") or []
    ids = {token["content"]: token["id"] for token in added}
    named = read_hf_config(folder / "tokenizer_config.json")[0]
    found = {}
    for name in sorted(SPECIAL_TOKENS):
        token = named.get(name.removesuffix("_id"))
        token = token.get("content") if isinstance(token, dict) else token
        if token in ids:
            found[name] = ids[token]
    return found


def _try(folder: Path, act: Callable[[], None]) -> str | None:
    """Do it; what went wrong, as text, for every process to hear."""
    try:
        act()
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror or error}; nothing was kept"
    except MeshwrightError as error:
        return str(error)
    return None


def _raise_everywhere(problem: str | None) -> None:
    """Raise in every process what went wrong in the first, so that none waits for it forever."""
    text = (problem or "").encode()[:1000]
    if jax.process_count() > 1:
        sent = np.zeros(1000, np.uint8)
        sent[: len(text)] = np.frombuffer(text, np.uint8)
        text = multihost_utils.broadcast_one_to_all(sent).tobytes().rstrip(b"\0")
    if text:
        raise MeshwrightError(text.decode(errors="replace"))
