"""A file that was cut, lost or altered is an error that says which; values are never silently other."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import meshwright as mw
from meshwright.checkpoint import Checkpoints
from meshwright.checkpoint.record import list_files, read_record, write_record

STEP = "step-00000002"


def tree() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "params": {
            "embed": mw.shard(
                jax.random.normal(keys[0], (64, 64)), "a b -> a@fsdp b@tp", mesh="fsdp=8,tp=2"
            ),
            "wq": mw.shard(
                jax.random.normal(keys[1], (32, 32)), "a b -> a@fsdp b", mesh="fsdp=8,tp=2"
            ),
        },
        "step": mw.shard(jax.numpy.int32(2), "->", mesh="fsdp=8,tp=2"),
    }


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    return tree()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any]) -> Path:
    folder = tmp_path_factory.mktemp("run")
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.save(2, state, {"seed": 3})
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "copy")


def targets_of(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def lose(path: Path) -> None:
    path.unlink()


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("harm", [cut, empty, lose, zero, flip])
def test_harm_to_any_file_is_an_error_or_does_no_harm(
    original: Path, tmp_path: Path, state: dict[str, Any], harm: Callable[[Path], None]
) -> None:
    names = [path.relative_to(original) for path in (original / STEP).rglob("*") if path.is_file()]
    assert len(names) > 8
    seen = []
    for number, name in enumerate(names):
        folder = shutil.copytree(original, tmp_path / str(number))
        harm(folder / name)
        try:
            restored = Checkpoints(folder).restore(2, targets_of(state))
        except mw.MeshwrightError as error:
            assert any(
                part in str(error)
                for part in (name.name, "'params/embed'", "'params/wq'", "'step'")
            )
        else:
            jax.tree.map(np.testing.assert_array_equal, restored, state)
            continue
        seen.append(name)
    assert any(name.parent.name == "d" for name in seen)
    # Orbax leaves a few pages of its index behind that nothing is read from any more; of all
    # other files the damage is seen, but for the last line break of our own
    for name in set(names) - set(seen):
        index_page = name.parent.name == "d" and harm in (zero, flip)
        assert index_page or (name.name == "checkpoint.json" and harm is cut)


@pytest.mark.parametrize("orbax_looks", [True, False])
def test_a_lost_chunk_is_named(folder: Path, state: dict[str, Any], orbax_looks: bool) -> None:
    """TensorStore reads a chunk that is not there as zeros, unless Orbax was told to look.

    It is told by a line in its own metadata. With that line gone the fingerprint alone is left; all
    sizes and checksums are set right here.
    """
    import tensorstore as ts

    step = folder / STEP
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{step}/arrays/"}).result()
    keys = store.list().result()
    chunks = [key for key in keys if key.startswith(b"params.embed/") and b".z" not in key]
    assert len(chunks) == 16
    store.delete_range(ts.KvStore.KeyRange(chunks[5], chunks[5] + b"\0")).result()
    if not orbax_looks:
        metadata = step / "arrays" / "_METADATA"
        line = '"store_array_data_equal_to_fill_value": '
        assert line + "true" in metadata.read_text()
        metadata.write_text(metadata.read_text().replace(line + "true", line + "false"))
    set_right(step)
    said = "cannot be read" if orbax_looks else "differ from those saved"
    with pytest.raises(mw.MeshwrightError, match=f"is damaged.*'params/embed' {said}") as error:
        Checkpoints(folder).restore(2, targets_of(state))
    assert "params/wq" not in str(error.value)
    assert "Intact checkpoints (their records and file sizes were checked): 1" in str(error.value)


def set_right(step: Path) -> None:
    """Write the record anew for the files as they are now."""
    record = read_record(step)
    write_record(step, dataclasses.replace(record, files=list_files(step)))


def test_altered_values_are_named(folder: Path, state: dict[str, Any]) -> None:
    """Chunks written anew by TensorStore, one number changed by its last bit, all checksums right."""
    import tensorstore as ts

    step = folder / STEP
    store = ts.open(
        {
            "driver": "zarr",
            "kvstore": {"driver": "ocdbt", "base": f"file://{step}/arrays/", "path": "params.wq/"},
        }
    ).result()
    value = np.asarray(store[3, 4].read().result())
    store[3, 4] = np.nextafter(value, np.float32(9))
    set_right(step)
    with pytest.raises(
        mw.MeshwrightError, match=r"the values of 'params/wq' differ from those saved"
    ):
        Checkpoints(folder).restore(2, targets_of(state))
    part = {"step": state["step"]}
    assert int(Checkpoints(folder).restore(2, targets_of(part))["step"]) == 2


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda text: text[: len(text) // 2], "not complete JSON"),
        (lambda text: text.replace('"seed": 3', '"seed": 4'), "checksum"),
        (lambda text: "[]", "damaged"),
        (lambda text: "{}", "damaged"),
        (lambda text: "\xff" + text, "damaged"),
    ],
)
def test_an_altered_record_is_an_error(folder: Path, harm: Callable[[str], str], said: str) -> None:
    path = folder / STEP / "checkpoint.json"
    path.write_text(harm(path.read_text()), encoding="latin-1")
    with pytest.raises(mw.MeshwrightError, match=said) as error:
        Checkpoints(folder).meta(2)
    assert "checkpoint.json" in str(error.value)


def test_a_record_of_a_later_format_is_said(folder: Path) -> None:
    import hashlib

    path = folder / STEP / "checkpoint.json"
    content = json.loads(path.read_text())
    content.pop("checksum")
    content["format"] = 2
    body = json.dumps(content, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps({"checksum": hashlib.sha256(body.encode()).hexdigest(), **content}))
    with pytest.raises(mw.MeshwrightError, match="format 2"):
        Checkpoints(folder).meta(2)


def test_a_step_without_a_record_is_not_passed_over_in_silence(folder: Path) -> None:
    (folder / STEP / "checkpoint.json").unlink()
    checkpoints = Checkpoints(folder)
    assert checkpoints.latest() == 2
    with pytest.raises(mw.MeshwrightError, match=r"checkpoint\.json is missing"):
        checkpoints.meta(2)


def test_intact_checkpoints_are_listed_with_the_command_to_use_one(
    folder: Path, state: dict[str, Any]
) -> None:
    """Steps 3 and 4 are complete and damaged, too: they are not offered."""
    for step, harm in ((3, lose), (4, cut)):
        copy = folder / f"step-{step:08d}"
        shutil.copytree(folder / STEP, copy)
        write_record(copy, dataclasses.replace(read_record(copy), step=step))
        harm(next(copy.rglob("d/*")) if harm is lose else copy / "checkpoint.json")
        if harm is cut:
            (copy / "checkpoint.json").write_text("{")
    lose(next((folder / STEP).rglob("d/*")))
    checkpoints = Checkpoints(folder, command=lambda step: f"program --step {step}")
    said = (
        r"Intact checkpoints \(their records and file sizes were checked\): 1\. "
        r"To use step 1: program --step 1$"
    )
    with pytest.raises(mw.MeshwrightError, match=r"is damaged: the file .* is missing\. " + said):
        checkpoints.restore(2, targets_of(state))
    with pytest.raises(mw.MeshwrightError, match=r"is damaged: it is not complete JSON.*" + said):
        checkpoints.meta(4)
    shutil.rmtree(folder / "step-00000001")
    with pytest.raises(mw.MeshwrightError, match=r"No other checkpoint in .* is intact"):
        checkpoints.restore(2, targets_of(state))


def test_a_renamed_checkpoint_is_told_by_the_names_that_are_there(
    folder: Path, state: dict[str, Any]
) -> None:
    (folder / STEP).rename(folder / "step-00000009")
    with pytest.raises(mw.MeshwrightError) as error:
        Checkpoints(folder).restore(9, targets_of(state))
    assert str(error.value) == (
        f"{folder}/step-00000009 holds the checkpoint of step 2: the folder was renamed or copied. "
        f"Rename it to step-00000002, or move it out of {folder}"
    )
    (folder / "step-00000009").rename(folder / "step-000000002")  # a zero too many
    (folder / "step-00000001").rename(folder / "best")
    assert Checkpoints(folder).steps() == []
    with pytest.raises(mw.MeshwrightError, match=r"renamed ones, .*: best, step-000000002$"):
        Checkpoints(folder).restore(2, targets_of(state))
