"""Readers: which files are read, which documents come out, and what is said about bad ones."""

import gzip
import json
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data import Encoding, Fields, readers
from meshwright.data.packing import formats_of
from meshwright.data.readers import Reading, find_files, read_documents
from meshwright.errors import MeshwrightError


def read(file: Path, reading: Reading | None = None) -> tuple[list[str], list[str]]:
    bad: list[str] = []
    return list(read_documents(file, reading or Reading(), bad.append)), bad


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes("\ufeffOne.\r\n\r\nTwo é.\r\n".encode())
    assert read(file) == (["One.\n\nTwo é.\n"], [])


def test_a_text_file_can_be_split(tmp_path: Path) -> None:
    file = tmp_path / "a.txt.gz"
    file.write_bytes(gzip.compress(b"One.\nStill one.\n\nTwo.\r\n\r\nThree.\n\n"))
    assert read(file, Reading(split_on="\n\n")) == (["One.\nStill one.", "Two.", "Three."], [])


@given(
    parts=st.lists(st.text("ab é\n", max_size=9), min_size=1), chunk=st.integers(1, 7),
    separator=st.sampled_from(["\n\n", "<|end|>", "a"]), line_end=st.sampled_from(["\n", "\r\n"]),
)  # fmt: skip
def test_splitting_does_not_depend_on_where_chunks_end(
    tmp_path_factory: pytest.TempPathFactory,
    parts: list[str],
    chunk: int,
    separator: str,
    line_end: str,
) -> None:
    text = separator.join(parts)
    file = tmp_path_factory.mktemp("split") / "a.txt"
    file.write_bytes(text.replace("\n", line_end).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "CHUNK", chunk)
        found, bad = read(file, Reading(split_on=separator))
    assert not bad
    # Python's own split of the whole text
    expected = [part.strip("\n") for part in text.split(separator)]
    assert [part for part in found if part] == [part for part in expected if part]


def test_json_lines_give_their_field(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"line {i}\n", "other": i}) for i in range(3)]
    plain, packed = tmp_path / "a.jsonl", tmp_path / "a.jsonl.gz"
    plain.write_text("\n\n".join(lines))
    packed.write_bytes(gzip.compress("\n".join(lines).encode()))
    for file in (plain, packed):
        assert read(file) == (["line 0\n", "line 1\n", "line 2\n"], [])


def test_bad_json_lines_are_named_and_the_others_read(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(
        '{"text": "good"}\n{"text": \n{"txt": "x"}\n["text"]\n{"text": 3}\n{"text": "\\ud800"}\n'
        '{"text": "\\u00e9"}\n' + "[" * 100_000 + "\n"
    )
    documents, bad = read(file)
    assert documents == ["good", "é"]
    assert [re.findall(r"line (\d+)", problem)[0] for problem in bad] == [
        "2",
        "3",
        "4",
        "5",
        "6",
        "8",
    ]
    for words, problem in zip(
        [
            "is not JSON",
            "did you mean 'txt'",
            "not an object",
            "is int, not text",
            "half a char",
            "",
        ],
        bad,
        strict=True,
    ):
        assert words in problem


def test_text_that_is_not_utf8_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"fine\nstill fine\nG\xfcte\n")
    documents, bad = read(file)
    assert documents == []
    assert "line 3 is not UTF-8" in bad[0]
    # split into documents, only the broken one is lost
    assert read(file, Reading(split_on="\n"))[0] == ["fine", "still fine"]


def test_a_gzip_file_cut_short_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl.gz"
    lines = "".join(json.dumps({"text": f"number {i * 7919}"}) + "\n" for i in range(2000))
    file.write_bytes(gzip.compress(lines.encode())[:-3000])
    documents, bad = read(file)
    assert documents[0] == "number 0"
    assert "cannot be read to its end" in bad[0]


def test_a_folder_gives_its_files_in_order_and_names_the_others(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.JSONL", "a/a.txt.gz", "README.md", ".hidden/x.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    files, others = find_files(tmp_path)
    assert [str(file.relative_to(tmp_path)) for file in files] == [
        "a/a.txt.gz",
        "a/z.JSONL",
        "b.txt",
    ]
    assert [file.name for file in others] == ["README.md"]


def test_a_folder_gives_what_its_links_lead_to_and_no_stores(tmp_path: Path) -> None:
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "data"
    for file in (elsewhere / "b.txt", folder / "a.txt", folder / "a.txt.1a2b.store" / "tokens.bin"):
        file.parent.mkdir(exist_ok=True)
        file.write_text("x")
    for name in ("meta.json", "saved_tokenizer.json"):
        (folder / "a.txt.1a2b.store" / name).write_text("{}")
    (folder / "linked").symlink_to(elsewhere)
    (folder / "again").symlink_to(folder)  # a loop
    (elsewhere / "up").symlink_to(tmp_path)
    files, others = find_files(folder)
    assert [file.name for file in files] == ["a.txt", "b.txt"]
    assert others == []


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = [arrow.array(["a"]), arrow.array(["b"])]
    parquet.write_table(arrow.Table.from_arrays(columns, ["text", "text"]), tmp_path / "a.parquet")
    with pytest.raises(MeshwrightError, match="more than one column 'text'"):
        read(tmp_path / "a.parquet")


def test_parquet_arrow_and_saved_datasets_give_their_column(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"text": ["one", "two", None, "four"], "n": [1, 2, 3, 4]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    saved = tmp_path / "saved"
    saved.mkdir()
    for i in range(2):
        with arrow.ipc.new_stream(saved / f"data-{i}.arrow", table.schema) as writer:
            writer.write_table(table.slice(2 * i, 2))
    (saved / "dataset_info.json").write_text("{}")
    (saved / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": "data-0.arrow"}, {"filename": "data-1.arrow"}]})
    )
    with arrow.ipc.new_file(tmp_path / "file.arrow", table.schema) as writer:
        writer.write_table(table)
    for source in ("a.parquet", "saved", "file.arrow"):
        documents, problems = [], []
        for file in find_files(tmp_path / source)[0]:
            more, bad = read(file)
            documents += more
            problems += bad
        assert documents == ["one", "two", "four"], source
        assert len(problems) == 1
        assert "is NoneType, not text" in problems[0]
    with pytest.raises(MeshwrightError, match="no column 'txt'; did you mean 'text'"):
        read(tmp_path / "a.parquet", Reading(field="txt"))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    assert "cannot be read after row 0" in read(tmp_path / "broken.parquet")[1][0]
    (saved / "data-1.arrow").unlink()
    with pytest.raises(MeshwrightError, match=r"lacks 1 file of 2: data-1\.arrow"):
        find_files(saved)


def test_without_pyarrow_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(MeshwrightError, match="pip install"):
        read(tmp_path / "a.parquet")


def test_mistakes_about_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "x.rst").write_text("x")
    (tmp_path / "splits").mkdir()
    (tmp_path / "splits" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "state.json").write_text("[]")
    (tmp_path / "empty").mkdir()
    for name, words in [
        ("nowhere", "does not exist"),
        ("x.rst", "unsupported file type; it can be '.txt'"),
        ("splits", "choose one with --split: train, test"),
        ("state", "does not list data files"),
        ("empty", "holds no file of a supported type"),
    ]:
        with pytest.raises(MeshwrightError) as said:
            find_files(tmp_path / name)
        assert words in str(said.value)


def test_a_document_too_large_for_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "LARGEST_DOCUMENT", 100)
    monkeypatch.setattr(readers, "CHUNK", 10)
    (tmp_path / "a.txt").write_text("x" * 101)
    with pytest.raises(MeshwrightError, match="--split-on"):
        read(tmp_path / "a.txt")
    with pytest.raises(MeshwrightError, match="the separator between"):
        read(tmp_path / "a.txt", Reading(split_on="y"))


def test_a_json_file_is_a_list_of_records_or_lines(tmp_path: Path) -> None:
    records = [{"text": "one"}, {"text": "two"}]
    forms = [
        json.dumps(records, indent=1),
        json.dumps({"data": records}),
        *map(json.dumps, records),
    ]
    forms.append("\n".join(forms[2:]))
    expected = [["one", "two"], ["one", "two"], ["one"], ["two"], ["one", "two"]]
    for number, (text, texts) in enumerate(zip(forms, expected, strict=True)):
        file = tmp_path / f"{number}.json.gz"
        file.write_bytes(gzip.compress(text.encode()))
        assert read(file) == (texts, []), text
    (tmp_path / "bad.json").write_text("[1, ")
    assert "is not JSON" in read(tmp_path / "bad.json")[1][0]
    (tmp_path / "bad.json").write_text("[1, {}]")
    documents, bad = read(tmp_path / "bad.json")
    assert documents == []
    assert "record 1 is not an object" in bad[0]
    assert "record 2 has no field 'text'" in bad[1]


def test_zstd_files_are_read_with_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrow = pytest.importorskip("pyarrow")
    for name, data in {
        "a.md.zst": b"# One\r\n\r\n# Two\n",
        "a.jsonl.zst": b'{"text": "# One"}\n{"text": "# Two"}\n',
        "a.json.zst": b'[{"text": "# One"}, {"text": "# Two"}]',
    }.items():
        with arrow.output_stream(str(tmp_path / name), compression="zstd") as out:
            out.write(data)
        assert read(tmp_path / name, Reading(split_on="\n\n")) == (["# One", "# Two"], [])
    (tmp_path / "bad.jsonl.zst").write_bytes(b"no zstd")
    assert "cannot be read to its end" in read(tmp_path / "bad.jsonl.zst")[1][0]
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MeshwrightError, match="compressed with zstd need pyarrow"):
        read(tmp_path / "a.md.zst")


def test_what_describes_a_dataset_is_no_data(tmp_path: Path) -> None:
    record = '{"text": "x"}'
    contents = dict.fromkeys(("README.md", "data.jsonl", "dataset_infos.json", "notes.md"), record)
    contents |= {
        "config.json": record,
        "list.json": f"[{record}]",
        "lines.json": f"{record}\n{record}",
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    files, others = find_files(tmp_path)
    assert [file.name for file in files] == ["data.jsonl", "lines.json", "list.json", "notes.md"]
    assert [file.name for file in others] == ["README.md", "config.json", "dataset_infos.json"]


def test_a_conversation_where_text_is_looked_for_is_named_as_one(tmp_path: Path) -> None:
    record = '{"messages": [{"role": "user", "content": "a"}]}'
    (tmp_path / "chat.jsonl").write_text(record + "\n")
    (said,) = read(tmp_path / "chat.jsonl")[1]
    assert "line 1 is a conversation, which has no field 'text'; leave out --field" in said


def test_a_line_that_is_not_json_is_named_with_its_column(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": }\n')
    (said,) = read(tmp_path / "bad.jsonl")[1]
    assert "line 2 is not JSON, at column 10: Expecting value" in said


def test_lines_of_json_under_another_name_may_begin_with_a_mark(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_bytes('\ufeff{"text": "a"}\r\n{"text": "b"}\r\n'.encode())
    assert read(file) == (["a", "b"], [])


@pytest.mark.parametrize(
    ("name", "reading", "encoding", "flag"),
    [
        ("a.txt", Reading(), Encoding(fields=Fields("text")), "--fields"),
        ("a.txt", Reading(), Encoding(fields=Fields(from_example="k")), "--fields-from-example"),
        ("a.txt", Reading(format="messages"), Encoding(), "--format"),
        ("a.txt", Reading(field="body"), Encoding(), "--field"),
        ("a.jsonl", Reading(split_on="x"), Encoding(), "--split-on"),
    ],
)
def test_an_option_for_files_of_another_kind_is_refused(
    name: str, reading: Reading, encoding: Encoding, flag: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text('{"text": "a"}\n')
    with pytest.raises(MeshwrightError, match=f"^{flag} is for .*; leave it out"):
        formats_of([tmp_path / name], reading, encoding)
