"""Read a Hugging Face folder straight onto a mesh.

Each array is made shard by shard, each shard from the bytes of the files that are in it: no host
holds the model, and none reads what its devices do not need.

    params = load_folder(folder, hf_model(config), shardings, jnp.bfloat16)
"""

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.sharding import Sharding, SingleDeviceSharding

from meshwright.errors import MeshwrightError
from meshwright.layouts import ArraySpec, tree_paths
from meshwright.models.huggingface.arrays import HfArray, HfModel
from meshwright.models.huggingface.mxfp4 import PackedTensor, TensorSource, UnpackedFiles
from meshwright.models.safetensors_read import (
    INDEX,
    SINGLE,
    MappedFiles,
    StoredTensor,
    read_folder,
    tensor_dtype,
)

_log = logging.getLogger("meshwright")

Slices = tuple[slice, ...]
OnRead = Callable[[str, int], None]
OnLayer = Mapping[str, Callable[[jax.Array], Any]]
"""By the path of a stack of layers, what is made of each of them, [1, ..], as it is read."""
_SLICES = 64  # at once, of a matrix that is transposed: so many stay in the processor's cache


def load_folder(
    folder: str | os.PathLike[str],
    model: HfModel,
    shardings: Any = None,
    dtype: Any = jnp.float32,
    on_read: OnRead | None = None,
    on_layer: OnLayer | None = None,
) -> dict[str, Any]:
    """The parameter tree of a Hugging Face folder, every array placed as `shardings` says.

    `shardings` is a tree like the model's arrays, or one sharding for all; without it, the first
    device. `on_read`, if given, is called with (path of the array, bytes) after each read. A path
    in `on_layer` is read a layer at a time, and holds what that makes of them.
    """
    if not isinstance(folder, str | os.PathLike):
        raise MeshwrightError(f"{folder!r} is not the path of a folder")
    folder = Path(folder)
    tensors = read_folder(folder)
    return load_tensors(MappedFiles(tensors), folder, model, shardings, dtype, on_read, on_layer)


def load_tensors(
    files: TensorSource,
    folder: Path,
    model: HfModel,
    shardings: Any = None,
    dtype: Any = jnp.float32,
    on_read: OnRead | None = None,
    on_layer: OnLayer | None = None,
) -> dict[str, Any]:
    """The parameter tree of these tensors; `folder` is for messages. See `load_folder`."""
    specs = jax.tree.map(lambda spec: dataclasses.replace(spec, dtype=dtype), model.specs)
    paths, leaves = tree_paths(specs), jax.tree.leaves(specs)
    if not jnp.issubdtype(leaves[0].dtype, jnp.floating):
        raise MeshwrightError(f"weights cannot be read as {dtype!r}; give jnp.bfloat16 or the like")
    targets = _targets(specs, leaves, paths, shardings)
    files = UnpackedFiles(files)
    if model.prefix and not any(name.startswith(model.prefix) for name in files.tensors):
        model = model.without_prefix()
    check_tensors(files.tensors, model, folder)
    _check_copies(files, files.tensors, model.copies)
    loaded = []
    for path, spec, target in zip(paths, leaves, targets, strict=True):
        note = (lambda read: None) if on_read is None else _noting(on_read, path)
        if on_layer and path in on_layer:
            read = functools.partial(_load_array, target=target, files=files, note=note)
            loaded.append(_load_layers(model.arrays[path], spec, read, on_layer[path]))
        else:
            loaded.append(_load_array(model.arrays[path], spec, target, files, note))
        files.release()
    params: dict[str, Any] = jax.tree.unflatten(jax.tree.structure(specs), loaded)
    return params


def has_tensor(folder: Path, name: str) -> bool | None:
    """Whether a folder's files hold a tensor of that name; None where there are no files."""
    if not any((folder / file).exists() for file in (INDEX, SINGLE)):
        return None
    return name in read_folder(folder)


def check_tensors(tensors: Mapping[str, StoredTensor], model: HfModel, folder: Path) -> None:
    """Every tensor is there, in its shape and a dtype that is read, and no other is."""
    expected = {name: array.shape for array in model.arrays.values() for name in array.names}
    missing = [name for name in expected if name not in tensors]
    if missing:
        hint = ""
        if missing == ["lm_head.weight"]:
            hint = "; if the model uses its embedding there, set tie_word_embeddings to true"
        raise MeshwrightError(f"{folder} lacks {_first(missing)}, which the config asks for{hint}")
    for name, shape in expected.items():
        tensor = tensors[name]
        tensor_dtype(tensor)
        if tensor.shape != shape:
            raise MeshwrightError(
                f"tensor {name!r} in {tensor.file} has shape {list(tensor.shape)}; the config "
                f"makes it {list(shape)}"
            )
    extra = [
        name
        for name in tensors
        if name not in expected and name not in model.copies and not name.endswith(model.ignored)
    ]
    if model.beyond and any(name.startswith(model.beyond) for name in extra):
        _log.info("%s: layers that predict further tokens are not read (%s…)", folder, model.beyond)
        extra = [name for name in extra if not name.startswith(model.beyond)]
    if extra:
        raise MeshwrightError(
            f"{tensors[extra[0]].file} has {_first(extra)}, which the config does not ask for; "
            "reading the rest would give another model"
        )


def _targets(specs: Any, leaves: list[ArraySpec], paths: list[str], shardings: Any) -> list[Any]:
    """A sharding for each array, each checked to fit."""
    if shardings is None:
        shardings = SingleDeviceSharding(jax.local_devices()[0])
    if isinstance(shardings, Sharding):
        shardings = jax.tree.map(lambda _: shardings, specs)
    given = tree_paths(shardings)
    if given != paths:
        differ = sorted(set(given) ^ set(paths))
        raise MeshwrightError(
            f"shardings and the model's arrays differ in {', '.join(differ)}; make them with "
            "mw.shardings(abstract_arrays(config), rules, mesh=mesh)"
        )
    targets = jax.tree.leaves(shardings)
    for path, spec, target in zip(paths, leaves, targets, strict=True):
        try:
            target.shard_shape(spec.shape)
        except (ValueError, AttributeError) as error:
            raise MeshwrightError(
                f"array {path!r} {spec.shape} cannot be placed as {target}: {error}"
            ) from None
    return targets


def _check_copies(
    files: TensorSource, tensors: Mapping[str, StoredTensor], copies: Mapping[str, str]
) -> None:
    """A head beside a tied embedding must be the embedding: else one of the two would be lost."""
    for name, original in copies.items():
        if name not in tensors or _are_equal(files, tensors[name], tensors[original]):
            continue
        hint = ""
        if name == "lm_head.weight":
            hint = "; set tie_word_embeddings to false to use it"
        raise MeshwrightError(
            f"{name!r} in {tensors[name].file} is not the same as {original!r}, which the config "
            f"says{hint}"
        )


def _are_equal(files: TensorSource, one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors have the same bytes."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    a, b = files.array(one.name), files.array(other.name)
    assert isinstance(a, np.ndarray)
    assert isinstance(b, np.ndarray)
    size = max(1, 2**24 // max(1, a[:1].nbytes))
    starts = range(0, a.shape[0], size)
    equal = all(a[i : i + size].tobytes() == b[i : i + size].tobytes() for i in starts)
    files.release()
    return equal


def _load_array(
    array: HfArray,
    spec: ArraySpec,
    target: Sharding,
    files: TensorSource,
    note: Callable[[int], None],
) -> jax.Array:
    """One array, one shard in host memory at a time; devices with the same shard share the read."""
    same: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, parts in target.addressable_devices_indices_map(spec.shape).items():
        parts = parts or (slice(None),) * len(spec.shape)
        key = tuple(part.indices(size)[:2] for part, size in zip(parts, spec.shape, strict=True))
        same.setdefault(key, []).append(device)
    shards = {}
    for bounds, devices in same.items():
        index = tuple(slice(*bound) for bound in bounds)
        block = read_block(array, index, spec.dtype, files, note)
        for device in devices:
            place = SingleDeviceSharding(device, memory_kind=target.memory_kind)
            shards[device] = jax.device_put(block, place)
        jax.block_until_ready([shards[device] for device in devices])
        del block  # before the next one is made (jax may hold it a little longer)
    return jax.make_array_from_single_device_arrays(
        spec.shape, target, list(shards.values()), dtype=spec.dtype
    )


def _load_layers(
    array: HfArray, spec: ArraySpec, read: Callable[..., jax.Array], convert: Callable[..., Any]
) -> Any:
    """A stack of what `convert` makes of each layer; of the layers themselves one is there."""
    stack = None
    of_layer = dataclasses.replace(spec, shape=(1, *spec.shape[1:]))
    for index, name in enumerate(array.names):
        made = convert(read(dataclasses.replace(array, name=name, layers=1), of_layer))
        if stack is None:
            stack = jax.tree.map(functools.partial(_room, layers=len(array.names)), made)
        stack = _put(stack, made, jnp.int32(index))
    return stack


def _room(layer: jax.Array, layers: int) -> jax.Array:
    """Zeros for a stack of arrays that are like this one, [1, ..]."""
    shape = (layers, *layer.shape[1:])
    return jnp.zeros(shape, layer.dtype, device=layer.sharding)


@functools.partial(jax.jit, donate_argnums=0)
def _put(stack: Any, layer: Any, index: jax.Array) -> Any:
    return jax.tree.map(
        lambda whole, part: lax.dynamic_update_slice_in_dim(whole, part, index, 0), stack, layer
    )


def read_block(
    array: HfArray,
    index: Slices,
    dtype: Any,
    files: TensorSource,
    note: Callable[[int], None] = lambda read: None,
) -> np.ndarray:
    """A block of one of our arrays, `index` in its dims, from the bytes of their tensors."""
    block = np.empty([part.stop - part.start for part in index], dtype)
    apart = len(array.stacked)
    if not apart:
        note(_read_into(block, array, index, files.array(array.name)))
        return block
    names = np.array(array.names).reshape(array.stacked)[index[:apart]]
    stored = [files.array(str(name)) for name in names.flat]
    # NumPy copies without Python's lock, so layers are read side by side
    with ThreadPoolExecutor() as threads:
        for read in threads.map(
            lambda out, tensor: _read_into(out, array, index[apart:], tensor),
            block.reshape(-1, *block.shape[apart:]),
            stored,
        ):
            note(read)
    return block


def _read_into(
    out: np.ndarray, array: HfArray, index: Slices, stored: np.ndarray | PackedTensor
) -> int:
    """Copy a block of one tensor of theirs, transposed into our dims; gives back the bytes read."""
    order = array.order
    inverse = [order.index(dim) for dim in range(len(order))]
    if isinstance(stored, PackedTensor):
        return _unpack_into(out.transpose(inverse), array, [index[i] for i in inverse], stored)
    part = stored.reshape(array.unfolded)[array.window]
    wanted = part[tuple(index[dim] for dim in inverse)]
    transposed = out.transpose(inverse)
    if wanted.dtype == out.dtype:  # bits are faster to copy than bfloat16
        bits = np.dtype(f"u{out.dtype.itemsize}")
        wanted, transposed = wanted.view(bits), transposed.view(bits)
    step = max(1, _SLICES * array.unfolded[0] // array.shape[0])
    for i in range(0, len(wanted), step):
        # in two steps: cast in their order, then transpose a piece that is in the cache
        transposed[i : i + step] = _cast(wanted[i : i + step], transposed.dtype)
    return wanted.nbytes


def _unpack_into(
    out: np.ndarray, array: HfArray, index: Sequence[slice], stored: PackedTensor
) -> int:
    """The same of a packed tensor, one expert at a time; its first dim is of experts."""
    experts = range(array.unfolded[0])[index[0]]
    for own, expert in zip(out, experts, strict=True):
        part = stored.expert(expert).reshape(array.unfolded[1:])[array.window[1:]]
        own[...] = part[tuple(index[1:])]
    return stored.nbytes * len(experts) // array.unfolded[0]


def _cast(piece: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    if piece.dtype == ml_dtypes.bfloat16 and dtype == np.float32:
        return (piece.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return piece.astype(dtype)


def _noting(on_read: OnRead, path: str) -> Callable[[int], None]:
    return lambda read: on_read(path, read)


def _first(names: list[str]) -> str:
    more = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
    return f"tensor {names[0]!r}{more}"
