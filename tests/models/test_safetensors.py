"""Our reader and writer of safetensors agree with the library's; a broken file is named."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from meshwright import MeshwrightError
from meshwright.models.safetensors_read import MappedFiles, read_header
from meshwright.models.safetensors_write import PlannedTensor, plan_files, write_safetensors

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "odd": np.arange(3).astype(ml_dtypes.bfloat16),
    "half": np.ones((1, 2, 3), np.float16),
    "scalar": np.array(2.5, np.float32),
    "empty": np.zeros((0, 4), np.float32),
}


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "x.safetensors")
    files = MappedFiles(read_header(tmp_path / "x.safetensors"))
    for name, expected in TENSORS.items():
        files.release()
        got = files.array(name)
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    planned = [PlannedTensor(name, value.dtype, value.shape) for name, value in TENSORS.items()]
    write_safetensors(tmp_path / "x.safetensors", planned, iter(TENSORS.values()))
    again = load_file(tmp_path / "x.safetensors")
    assert again.keys() == TENSORS.keys()
    for name, value in again.items():
        np.testing.assert_array_equal(value, TENSORS[name])


def test_files_are_filled_up_to_the_size() -> None:
    tensors = [
        PlannedTensor(str(i), np.dtype(np.float32), (size,)) for i, size in enumerate((1, 2, 9, 1))
    ]
    files = plan_files(tensors, 12)
    assert {file: [t.name for t in part] for file, part in files.items()} == {
        "model-00001-of-00003.safetensors": ["0", "1"],
        "model-00002-of-00003.safetensors": ["2"],
        "model-00003-of-00003.safetensors": ["3"],
    }
    assert list(plan_files(tensors, 100)) == ["model.safetensors"]


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


def file_of(header: Any, data: bytes = bytes(8)) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


BROKEN = {
    "nothing": (b"", "is not a safetensors file, or is truncated: it has 0 bytes"),
    "seven bytes": (bytes(7), "it has 7 bytes"),
    "a header past the end": ((99).to_bytes(8, "little") + b"{}", "says its header has 99"),
    "a huge header": (bytes([255] * 8) + b"{}", "is not a safetensors file"),
    "no JSON": ((2).to_bytes(8, "little") + b"{x", "has a header that is not JSON"),
    "no text": ((2).to_bytes(8, "little") + b"\xff\xfe", "has a header that is not JSON"),
    "a list": (file_of([]), "not a JSON object"),
    "half the data": (file_of(entry(), bytes(4)), r"is truncated: .* \(tensor 'w'\)"),
    "more data": (file_of(entry(), bytes(9)), "is longer than its header says"),
    "no shape": (file_of({"w": {"dtype": "F32"}}), "tensor 'w' is"),
    "an entry of text": (file_of({"w": "F32"}), "tensor 'w' is"),
    "a shape of text": (file_of(entry(shape="ab")), "tensor 'w' is"),
    "three offsets": (file_of(entry(offsets=(0, 4, 8))), "tensor 'w' is"),
    "negative offsets": (file_of(entry(offsets=(-8, 0))), "lies at bytes -8 to 0"),
    "a shape of another size": (file_of(entry(shape=(3,))), r"\(3,\) needs 12 bytes, and 8 are"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named_with_what_is_broken(name: str, tmp_path: Path) -> None:
    content, message = BROKEN[name]
    file = tmp_path / "w.safetensors"
    file.write_bytes(content)
    with pytest.raises(MeshwrightError, match=message) as raised:
        read_header(file)
    assert str(file) in str(raised.value)


@given(st.binary(max_size=40), st.integers(0, 60), st.integers(0, 3))
def test_any_bytes_give_tensors_or_a_meshwright_error(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, at: int, kind: int
) -> None:
    file = tmp_path_factory.getbasetemp() / "noise.safetensors"
    whole = file_of(entry())
    file.write_bytes([noise, whole[:at], whole[:at] + noise, whole[:at] + noise + whole[at:]][kind])
    try:
        tensors = read_header(file)
    except MeshwrightError as error:
        assert str(file) in str(error)
        return
    for name in tensors:
        MappedFiles(tensors).array(name).copy()
