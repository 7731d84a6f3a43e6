"""A Hugging Face folder goes straight onto a mesh: the right values, and no byte too many."""

import collections
import json
import math
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import meshwright as mw
from meshwright import MeshwrightError
from meshwright.models import load_hf, save_hf
from meshwright.models.decoder import DecoderConfig, abstract_arrays, decoder_rules
from meshwright.models.decoder.architectures.llama import TENSORS
from meshwright.models.decoder.hf_config import from_hf_config
from meshwright.models.decoder.hf_folder import hf_model

REFERENCE = Path(__file__).parent / "hf_reference"


def plain_read(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of a folder, read by the safetensors library."""
    tensors: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def shardings_of(config: DecoderConfig, mesh_text: str) -> Any:
    size = math.prod(mw.MeshSpec.parse(mesh_text).sizes)
    mesh = mw.mesh(mesh_text, devices=jax.devices()[:size])
    return mw.shardings(abstract_arrays(config), decoder_rules(), mesh=mesh)


@pytest.mark.parametrize("name", ["llama-mha", "qwen3-sharded", "qwen3-biases"])
@pytest.mark.parametrize("mesh", ["dp=2,fsdp=4,tp=2,sp=1", "dp=1,fsdp=1,tp=1,sp=1"])
def test_values_are_those_of_the_safetensors_library(name: str, mesh: str) -> None:
    theirs = plain_read(REFERENCE / name)
    config = from_hf_config(REFERENCE / name)
    wanted = shardings_of(config, mesh)
    params = load_hf(REFERENCE / name, config, wanted)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, s: a.sharding == s, params, wanted)))
    heads, kv, size = config.heads, config.kv_heads, config.head_dim
    attention, mlp = params["layers"]["attention"], params["layers"]["mlp"]
    for i in range(config.layers):
        at = f"model.layers.{i}."
        same = {
            "self_attn.q_proj.weight": np.asarray(attention["wq"][i]).reshape(-1, heads * size).T,
            "self_attn.k_proj.weight": np.asarray(attention["wk"][i]).reshape(-1, kv * size).T,
            "self_attn.o_proj.weight": np.asarray(attention["wo"][i]).reshape(heads * size, -1).T,
            "mlp.gate_proj.weight": np.asarray(mlp["gate"][i]).T,
            "mlp.down_proj.weight": np.asarray(mlp["down"][i]).T,
            "input_layernorm.weight": np.asarray(attention["norm"][i]),
        }
        for tensor, ours in same.items():
            np.testing.assert_array_equal(ours, theirs[at + tensor].astype(np.float32))
    np.testing.assert_array_equal(
        np.asarray(params["output"]).T, theirs["lm_head.weight"].astype(np.float32)
    )


def test_the_names_are_those_transformers_wrote() -> None:
    for folder in REFERENCE.iterdir():
        arrays = hf_model(from_hf_config(folder)).arrays.values()
        ours = {name: array.shape for array in arrays for name in array.names}
        assert ours == {name: tensor.shape for name, tensor in plain_read(folder).items()}
    assert len({name for name, _ in TENSORS.values()}) == len(TENSORS)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", ["llama-mha", "llama-biases", "llama-linear"])  # F32, F16, BF16
def test_values_are_rounded_to_the_dtype_asked_for(name: str, dtype: Any) -> None:
    params = load_hf(REFERENCE / name, dtype=dtype)
    table = plain_read(REFERENCE / name)["model.embed_tokens.weight"]
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
    np.testing.assert_array_equal(np.asarray(params["embedding"]), table.astype(dtype))


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 21 MB, in three files."""
    config = DecoderConfig(2048, 4, 256, 8, 4, 32, 1024)
    specs = abstract_arrays(config)
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda spec: random.standard_normal(spec.shape, np.float32), specs)
    folder = tmp_path_factory.mktemp("larger") / "model"
    return save_hf(folder, params, config, dtype=jnp.float32, max_file_bytes=8_000_000)


def model_bytes(folder: Path) -> int:
    return sum(tensor.nbytes for tensor in plain_read(folder).values())


def test_each_shard_reads_its_own_bytes_and_all_of_them_the_model_once(larger: Path) -> None:
    config = from_hf_config(larger)
    shardings = shardings_of(config, "dp=1,fsdp=4,tp=2,sp=1")
    read: dict[str, int] = collections.Counter()

    def on_read(path: str, size: int) -> None:
        read[path] += size

    params = load_hf(larger, config, shardings, on_read=on_read)
    # each element once: eight different shards of every matrix, one copy of each norm
    assert sum(read.values()) == model_bytes(larger)
    gate = params["layers"]["mlp"]["gate"]
    assert read["layers/mlp/gate"] == 8 * gate.addressable_shards[0].data.nbytes


def test_devices_with_the_same_shard_share_the_read(larger: Path) -> None:
    config = from_hf_config(larger)
    sizes: list[int] = []
    shardings = shardings_of(config, "dp=4,fsdp=2,tp=2,sp=1")
    load_hf(larger, config, shardings, on_read=lambda path, size: sizes.append(size))
    assert sum(sizes) == model_bytes(larger)


def test_the_host_holds_a_shard_or_two_and_never_an_array(larger: Path) -> None:
    config = from_hf_config(larger)
    shardings = shardings_of(config, "dp=1,fsdp=8,tp=2,sp=1")
    specs = jax.tree.leaves(abstract_arrays(config))
    shards = [
        math.prod(sharding.shard_shape(spec.shape)) * 4
        for sharding, spec in zip(jax.tree.leaves(shardings), specs, strict=True)
    ]
    load_hf(larger, config, shardings)  # so that jax's own memory is there already
    tracemalloc.start()
    params = load_hf(larger, config, shardings)
    # CPU devices may keep NumPy's memory as their own: what stays is theirs, the rest was the host's
    stays, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert params["norm"].shape == (256,)
    # jax may let go of a block a little late, so two may be there; an array has 16
    assert peak - stays < 3 * max(shards) + 200_000
    assert peak - stays < model_bytes(larger) / 15


def copy_of(name: str, folder: Path) -> Path:
    return Path(shutil.copytree(REFERENCE / name, folder / name))


def rewrite(folder: Path, change: Any) -> None:
    """Change the tensors of a folder with one file, by the safetensors library."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


K = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(K), f"lacks tensor '{K}'"),
        (lambda t: t.pop("lm_head.weight"), r"lacks tensor 'lm_head.weight'.*tie_word_embeddings"),
        (lambda t: [t.pop(name) for name in list(t) if ".1." in name], r"lacks tensor .* and \d more"),
        (lambda t: t.update(extra=t[K]), r"model.safetensors has tensor 'extra', which the config does not ask for"),
        (lambda t: t.update({K: t[K][:-1]}), rf"'{K}' in .*model.safetensors has shape \[31, 32\]; .* \[32, 32\]"),
        (lambda t: t.update({K: t[K].astype(np.int8)}), rf"'{K}' in .*model.safetensors is I8; only BF16, F16, F32"),
    ],
)  # fmt: skip
def test_tensors_that_are_not_the_models_are_named(
    tmp_path: Path, change: Any, message: str
) -> None:
    folder = copy_of("llama-mha", tmp_path)
    rewrite(folder, change)
    reads: list[str] = []
    with pytest.raises(MeshwrightError, match=message):
        load_hf(folder, on_read=lambda path, size: reads.append(path))
    assert not reads


def test_rotary_frequencies_of_older_files_do_not_matter(tmp_path: Path) -> None:
    folder = copy_of("llama-mha", tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(folder, lambda tensors: tensors.update({name: np.ones(4, np.float32)}))
    assert load_hf(folder)["norm"].shape == (32,)


def test_a_tied_head_may_be_in_the_file_if_it_is_the_embedding(tmp_path: Path) -> None:
    folder = copy_of("qwen2.5-tied", tmp_path)
    table = "model.embed_tokens.weight"
    rewrite(folder, lambda t: t.update({"lm_head.weight": t[table]}))
    assert "output" not in load_hf(folder)
    rewrite(folder, lambda t: t.update({"lm_head.weight": t[table] + t[table]}))
    with pytest.raises(MeshwrightError, match=r"'lm_head.weight' in .* is not the same"):
        load_hf(folder)


def test_a_config_of_another_model_is_an_error() -> None:
    config = DecoderConfig(48, 2, 32, 4, 4, 8, 48)
    with pytest.raises(MeshwrightError, match=r"gate_proj.weight' in .* has shape \[40, 32\]"):
        load_hf(REFERENCE / "llama-mha", config)


def test_what_is_no_folder_or_no_dtype_for_weights_is_an_error() -> None:
    with pytest.raises(MeshwrightError, match="None is not the path of a folder"):
        load_hf(None)  # type: ignore[arg-type]
    with pytest.raises(MeshwrightError, match="weights cannot be read as"):
        load_hf(REFERENCE / "llama-mha", dtype=jnp.int32)


def test_shardings_of_another_model_are_an_error() -> None:
    config = from_hf_config(REFERENCE / "llama-mha")
    other = from_hf_config(REFERENCE / "qwen3-biases")
    with pytest.raises(MeshwrightError, match="differ in layers/attention/bk, layers"):
        load_hf(REFERENCE / "llama-mha", config, shardings_of(other, "dp=1,fsdp=2,tp=2,sp=1"))


def test_shardings_that_do_not_divide_are_an_error() -> None:
    config = from_hf_config(REFERENCE / "llama-mha")
    sharding = mw.sharding(("dp",), mesh=mw.mesh("dp=16"))  # type: ignore[arg-type]
    with pytest.raises(MeshwrightError, match=r"array 'layers/attention/norm' \(2, 32\) cannot be"):
        load_hf(REFERENCE / "llama-mha", config, sharding)


def test_files_that_an_index_does_not_describe_are_named(tmp_path: Path) -> None:
    folder = copy_of("qwen3-sharded", tmp_path)
    index = folder / "model.safetensors.index.json"
    second = folder / "model-00002-of-00002.safetensors"
    said = json.loads(index.read_text())
    moved = {"weight_map": dict.fromkeys(said["weight_map"], second.name)}
    index.write_text(json.dumps(moved))
    with pytest.raises(MeshwrightError, match=r"is not in .*model-00002-of-00002.safetensors"):
        load_hf(folder)
    index.write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    with pytest.raises(MeshwrightError, match="files must lie beside it"):
        load_hf(folder)
    for broken in ("{", "[]", '{"weight_map": 3}', "{}"):
        index.write_text(broken)
        with pytest.raises(MeshwrightError, match="is not JSON with a weight_map"):
            load_hf(folder)
    index.write_text(json.dumps(said))
    shutil.copy(second, folder / "model-00001-of-00002.safetensors")
    with pytest.raises(MeshwrightError, match=r"is in .*00001.* and in .*00002"):
        load_hf(folder)
    second.unlink()
    with pytest.raises(
        MeshwrightError, match=r"00002.safetensors is not there; .* holds \d+ tensors"
    ):
        load_hf(folder)


def test_a_single_file_beside_an_index_is_read_first_as_in_transformers(tmp_path: Path) -> None:
    """A model that was saved again in a folder: the old parts are there, or gone."""
    torch: Any = pytest.importorskip("torch", reason="the outside reader needs torch")
    transformers: Any = pytest.importorskip("transformers", reason="the outside reader")
    from meshwright.torch.load import tensor_files

    folder = copy_of("qwen3-sharded", tmp_path)
    changed = {name: value + value for name, value in plain_read(folder).items()}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    table = "model.embed_tokens.weight"
    for parts in (2, 0):
        assert len(list(folder.glob("model-*.safetensors"))) == parts
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        theirs = model.state_dict()[table].numpy()
        np.testing.assert_array_equal(theirs, changed[table].astype(np.float32))
        np.testing.assert_array_equal(np.asarray(load_hf(folder)["embedding"]), theirs)
        assert tensor_files(folder) == dict.fromkeys(changed, folder / "model.safetensors")
        for part in folder.glob("model-*.safetensors"):
            part.unlink()


def test_a_folder_without_safetensors_says_what_it_has(tmp_path: Path) -> None:
    config = from_hf_config(REFERENCE / "llama-mha")
    with pytest.raises(MeshwrightError, match="it has nothing"):
        load_hf(tmp_path, config)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(MeshwrightError, match=r"pytorch_model.bin: pickled weights are not read"):
        load_hf(tmp_path, config)
    with pytest.raises(MeshwrightError, match="is not a folder"):
        load_hf(tmp_path / "nothing", config)
