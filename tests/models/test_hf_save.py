"""A folder appears whole or not at all, from one process or several."""

import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.patience import PATIENCE_S
from tests.processes import free_port

import meshwright as mw
from meshwright import MeshwrightError
from meshwright.models import load_hf, save_hf
from meshwright.models.decoder import DecoderConfig, abstract_arrays, decoder_rules
from meshwright.models.decoder.hf_config import from_hf_config

REFERENCE = Path(__file__).parent / "hf_reference"
LLAMA = REFERENCE / "llama-mha"


def test_one_file_has_no_index_and_several_have(tmp_path: Path) -> None:
    config, params = from_hf_config(LLAMA), load_hf(LLAMA)
    one = save_hf(tmp_path / "one", params, config)
    assert sorted(path.name for path in one.iterdir()) == ["config.json", "model.safetensors"]
    several = save_hf(tmp_path / "several", params, config, dtype="bfloat16", max_file_bytes=20_000)
    files = sorted(several.glob("*.safetensors"))
    index = json.loads((several / "model.safetensors.index.json").read_text())
    assert [file.name for file in files] == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    held = {name: file.name for file in files for name in load_file(file)}
    assert index["weight_map"] == held
    sizes = [sum(value.nbytes for value in load_file(file).values()) for file in files]
    assert max(sizes) <= 20_000
    assert index["metadata"]["total_size"] == sum(sizes)


@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
def test_arrays_on_a_mesh_are_written_as_those_on_one_device(
    axis_types: Any, tmp_path: Path
) -> None:
    config = from_hf_config(LLAMA)
    mesh = mw.mesh("dp=2,fsdp=4,tp=2,sp=1", axis_types=axis_types)
    shardings = mw.shardings(abstract_arrays(config), decoder_rules(), mesh=mesh)
    on_host = jax.tree.map(np.asarray, load_hf(LLAMA))
    expected = load_file(save_hf(tmp_path / "host", on_host, config) / "model.safetensors")
    with jax.set_mesh(mesh):
        params = load_hf(LLAMA, config, shardings)
        save_hf(tmp_path / "mesh", params, config)
    got = load_file(tmp_path / "mesh" / "model.safetensors")
    for name, value in load_file(LLAMA / "model.safetensors").items():
        np.testing.assert_array_equal(expected[name], value)
        np.testing.assert_array_equal(got[name], expected[name])


def test_layers_split_over_a_mesh_axis_are_written_too(tmp_path: Path) -> None:
    config, params = from_hf_config(LLAMA), load_hf(LLAMA)
    mesh = mw.mesh("stage=2", devices=jax.devices()[:2], axis_types="explicit")
    params["layers"] = mw.shard(params["layers"], "layers ... -> layers@stage ...", mesh=mesh)
    save_hf(tmp_path / "model", params, config, dtype=jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, params, load_hf(tmp_path / "model"))


def test_the_tokenizer_and_its_special_tokens_come_along(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    (source / "config.json").write_text('{"bos_token_id": 5, "eos_token_id": [6, 7], "other": 1}')
    config, params = from_hf_config(LLAMA), load_hf(LLAMA)
    folder = save_hf(tmp_path / "model", params, config, tokenizer=source)
    assert (folder / "tokenizer.json").read_text() == "{}"
    fields = json.loads((folder / "config.json").read_text())
    assert (fields["bos_token_id"], fields["eos_token_id"]) == (5, [6, 7])
    assert "other" not in fields
    with pytest.raises(MeshwrightError, match="has no tokenizer file"):
        save_hf(tmp_path / "another", params, config, tokenizer=LLAMA)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "source"]


def test_arrays_are_written_in_their_own_dtype_unless_told_otherwise(tmp_path: Path) -> None:
    config = from_hf_config(LLAMA)
    for dtype in ("float32", "bfloat16", "float16"):
        params = load_hf(LLAMA, config, dtype=dtype)
        folder = save_hf(tmp_path / dtype, params, config)
        written = load_file(folder / "model.safetensors")
        assert {value.dtype.name for value in written.values()} == {dtype}
        assert json.loads((folder / "config.json").read_text())["dtype"] == dtype
        jax.tree.map(np.testing.assert_array_equal, params, load_hf(folder, config, dtype=dtype))
    params = load_hf(LLAMA, config)
    told = save_hf(tmp_path / "told", params, config, dtype=jnp.bfloat16)
    assert load_file(told / "model.safetensors")["lm_head.weight"].dtype == jnp.bfloat16
    assert json.loads((told / "config.json").read_text())["dtype"] == "bfloat16"
    params["norm"] = params["norm"].astype("bfloat16")
    mixed = load_file(save_hf(tmp_path / "mixed", params, config) / "model.safetensors")
    assert mixed["model.norm.weight"].dtype == jnp.bfloat16
    assert mixed["lm_head.weight"].dtype == np.float32
    params["norm"] = params["norm"].astype("int32")
    with pytest.raises(MeshwrightError, match="'norm' is int32, which is not written"):
        save_hf(tmp_path / "whole", params, config)


SPECIAL = {"bos_token_id": 5, "eos_token_id": [6, 7], "pad_token_id": 8}
BESIDE = (
    "tokenizer.json", "tokenizer.model", "tokenizer.model.v3", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "chat_template.jinja", "additional_chat_templates/tool_use.jinja", "generation_config.json",
)  # fmt: skip


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model as it is published, with a tokenizer and special tokens."""
    folder = tmp_path / "source"
    shutil.copytree(LLAMA, folder)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | SPECIAL))
    (folder / "additional_chat_templates").mkdir()
    for name in BESIDE:
        (folder / name).write_text(json.dumps({"name": name}))
    return folder


def test_tokens_and_files_of_the_source_come_along_without_being_asked_for(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, params = from_hf_config(source), load_hf(source)
    folder = save_hf(tmp_path / "model", params, config)
    assert json.loads((folder / "config.json").read_text()).items() >= SPECIAL.items()
    for name in BESIDE:
        assert (folder / name).read_text() == (source / name).read_text()
    assert not (folder / "tokens.npy").exists()
    shutil.rmtree(source)
    again = save_hf(tmp_path / "again", params, config)
    assert json.loads((again / "config.json").read_text()).items() >= SPECIAL.items()
    assert "is not there any more" in caplog.text
    assert sorted(path.name for path in again.iterdir()) == ["config.json", "model.safetensors"]


def test_special_tokens_of_a_tokenizer_alone_are_found(source: Path, tmp_path: Path) -> None:
    config, params = from_hf_config(source), load_hf(source)
    (source / "config.json").unlink()
    added = [{"content": "<s>", "id": 11}, {"content": "</s>", "id": 12}]
    (source / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    named = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None}
    (source / "tokenizer_config.json").write_text(json.dumps(named))
    folder = save_hf(tmp_path / "model", params, config, tokenizer=source)
    fields = json.loads((folder / "config.json").read_text())
    assert (fields["bos_token_id"], fields["eos_token_id"], fields["pad_token_id"]) == (11, 12, 8)


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    config, params = from_hf_config(LLAMA), load_hf(LLAMA)
    (tmp_path / "empty").mkdir()
    save_hf(tmp_path / "empty", params, config)
    with pytest.raises(MeshwrightError, match="is there already"):
        save_hf(tmp_path / "empty", params, config)
    (tmp_path / "file").touch()
    with pytest.raises(MeshwrightError, match="is there already"):
        save_hf(tmp_path / "file", params, config)


@pytest.fixture
def files_of_20_kb() -> Iterator[None]:
    """The operating system refuses longer files, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_folder_is_written_where_a_link_leads(tmp_path: Path) -> None:
    (tmp_path / "disk" / "model").mkdir(parents=True)
    (tmp_path / "model").symlink_to("disk/model")
    save_hf(tmp_path / "model", load_hf(LLAMA), from_hf_config(LLAMA))
    assert (tmp_path / "model").is_symlink()
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["model"]
    assert from_hf_config(tmp_path / "model") == from_hf_config(LLAMA)


@pytest.mark.usefixtures("files_of_20_kb")
def test_a_disk_that_is_full_leaves_nothing_behind(tmp_path: Path) -> None:
    config, params = from_hf_config(LLAMA), load_hf(LLAMA)
    with pytest.raises(MeshwrightError, match="cannot be written: File too large"):
        save_hf(tmp_path / "model", params, config)
    assert list(tmp_path.iterdir()) == []


def test_parameters_of_another_model_are_refused(tmp_path: Path) -> None:
    params, config = load_hf(LLAMA), from_hf_config(LLAMA)
    tied = DecoderConfig(48, 2, 32, 4, 4, 8, 40, tied_embeddings=True)
    with pytest.raises(MeshwrightError, match="they differ in output"):
        save_hf(tmp_path / "model", params, tied)
    wider = DecoderConfig(48, 2, 32, 4, 4, 8, 44)
    with pytest.raises(MeshwrightError, match=r"'layers/mlp/down' has shape \(2, 40, 32\)"):
        save_hf(tmp_path / "model", params, wider)
    with pytest.raises(MeshwrightError, match=r"jnp.bfloat16 and jnp.float32 are"):
        save_hf(tmp_path / "model", params, config, dtype=jnp.int8)
    with pytest.raises(MeshwrightError, match="max_file_bytes=0"):
        save_hf(tmp_path / "model", params, config, max_file_bytes=0)
    assert list(tmp_path.iterdir()) == []


PROGRAM = """
import resource
import sys
from pathlib import Path
import jax
import numpy as np
process, port, source, target = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=process)
import meshwright as mw
from meshwright.models.decoder import abstract_arrays, decoder_rules
from meshwright.models.decoder.hf_config import from_hf_config
from meshwright.models import load_hf
from meshwright.models import save_hf
config = from_hf_config(source)
mesh = mw.mesh("dp=1,fsdp=4,tp=2,sp=1", axis_types="explicit")
shardings = mw.shardings(abstract_arrays(config), decoder_rules(), mesh=mesh)
sizes = {}
def on_read(path, size):
    sizes[path] = sizes.get(path, 0) + size
params = load_hf(source, config, shardings, on_read=on_read)
save_hf(target, params, config, dtype="float32", max_file_bytes=20_000)
if process == 0:  # as a full disk would
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
for folder in (target, target.with_name("full")):
    try:
        save_hf(folder, params, config)
    except mw.MeshwrightError as error:
        print("refused:", error)
print("read", sizes["layers/mlp/gate"], "of", params["layers"]["mlp"]["gate"].nbytes)
"""


def test_two_processes_read_half_each_and_write_one_folder(tmp_path: Path) -> None:
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(i), port, LLAMA, tmp_path / "model"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    for process in processes:
        out, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, err[-3000:]
        # process 0 alone found these, and both heard of them
        assert out.count("refused:") == 2
        assert "is there already" in out
        assert "cannot be written: File too large" in out
        assert "read 5120 of 10240" in out
    jax.tree.map(np.testing.assert_array_equal, load_hf(LLAMA), load_hf(tmp_path / "model"))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
