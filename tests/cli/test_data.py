"""`meshwright data`: what it prints, writes and refuses."""

import json
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.data import TokenStore


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "books").mkdir()
    (tmp_path / "books/a.txt").write_text("One.\n\nTwo.\n")
    (tmp_path / "books/notes.rst").write_text("x")
    (tmp_path / "lines.jsonl").write_text('{"body": "Three."}\n{"body": ""}\n{"bo\n')
    return tmp_path


def test_pack_writes_a_store_and_says_what_is_in_it(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["data", "pack", "books", "--out", "a.store", "--split-on", r"\n\n"])
    assert capsys.readouterr().out == (
        "wrote a.store: 10 tokens, 2 documents from 1 file\nignored files of other types: notes.rst\n"
    )
    store = TokenStore.open("a.store")
    assert [store.text(i) for i in range(2)] == ["One.", "Two."]


def test_pack_takes_several_sources_a_field_and_leaves_out_bad_lines(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["lines.jsonl", "books/a.txt", "--out", "a.store", "--field", "body", "--skip-bad"]
    main(["data", "pack", *arguments])
    printed = capsys.readouterr()
    assert "2 documents from 2 files; skipped 1 empty document and 1 bad document" in printed.out
    assert "skipped: 'lines.jsonl', line 3 is not JSON" in printed.err


def test_info_shows_a_store_and_its_documents(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["data", "pack", "books", "--out", "a.store"])
    capsys.readouterr()
    main(["data", "info", "a.store", "--seq", "4", "--verify"])
    shown = " ".join(capsys.readouterr().out.split())
    for part in ("tokens 12 (uint16)", "sequences 3 of 4", "bytes, vocabulary 257", "verified"):
        assert part in shown
    main(["data", "info", "a.store", "--document", "0"])
    assert capsys.readouterr().out == "One.\n\nTwo.\n\n"
    main(["data", "info", "embedded"])
    assert "640" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["pack", "--out", "a.store"],
            ["FILES is missing; write meshwright data pack FILES --out FOLDER"],
        ),
        (["pack", "nowhere", "--out", "a.store"], ["'nowhere' does not exist"]),
        (["pack", "books", "--out", "books"], ["'books' already exists", "--overwrite"]),
        (["pack", "books", "--out", "books", "--overwrite"], ["is not overwritten"]),
        (["pack", "lines.jsonl", "--out", "a.store"], ["line 1 has no field 'text'", "--field"]),
        (["pack", "books", "--out", "a.store", "--tokenizer", "gpt"], ["tokenizer 'gpt'"]),
        (["pack", "books", "--out", "a.store", "--split-on", ""], ["--split-on is empty"]),
        (["pack", "books", "--out", "a.store", "--split-on", "\\"], ["--split-on"]),
        (["pack", "books", "--out", "books/a.txt/b"], ["cannot be written: Not a directory"]),
        (["info", "nowhere"], ["'nowhere' does not exist", "meshwright data pack"]),
        (["info", "books"], ["'books' is not a token store"]),
        (["info", "embedded", "--document", "640"], ["no document 640"]),
        (["info", "embedded", "--seq", "0"], ["--seq 0"]),
        (["show", "embedded", "--document", "640"], ["holds 640 documents", "from 640 on"]),
        (["pack", "lines.jsonl", "--out", "a.store", "--fields", "[a,b]"], ["'[a' is not a field"]),
    ],
)
def test_mistakes_are_one_readable_message_and_status_2(
    here: Path, arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["data", *arguments])
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    for word in words:
        assert word in message
    assert not (here / "a.store").exists()


def test_meta_json_is_plain_data(here: Path) -> None:
    main(["data", "pack", "books", "--out", "a.store"])
    meta = json.loads((here / "a.store/meta.json").read_text())
    assert meta["sources"] == [{"path": "books", "documents": 1}]
    assert meta["version"] == 2


def test_conversations_are_packed_and_shown_with_their_loss(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "<b>né</b>"}]
    (here / "chat.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    main(["data", "pack", "chat.jsonl", "--out", "chat.store", "--chat-template", "chatml"])
    assert capsys.readouterr().out == (
        "format: messages, chat template of chatml, answers by {% generation %}\n"
        "wrote chat.store: 75 tokens, 1 example from 1 file\n"
        "loss on 27% of the tokens; the longest example has 75\n"
    )
    main(["data", "show", "chat.store"])
    assert capsys.readouterr().out == (
        "example 0: 75 tokens, 20 with loss\n"
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n⟦<b>né</b><|im_end|>⟧\n\n"
    )
    main(["data", "show", "chat.store", "--html", "chat.html"])
    page = (here / "chat.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "<b>n" not in page, "texts are data, not markup"
    main(["data", "info", "chat.store", "--seq", "32"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "1 of 32 tokens; 1 are longer, and cut" in shown
    assert "loss on 27% of the tokens, messages" in shown


def test_fields_of_easylm_are_packed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "a.jsonl").write_text('{"q": "ab", "p": "c", "a": "de"}\n')
    main(["data", "pack", "a.jsonl", "--out", "a.store", "--fields", "[q+p],a"])
    assert "format: fields\n" in capsys.readouterr().out
    store = TokenStore.open("a.store")
    assert store.document(0).tolist() == [*b"ab cde", 256]
    assert store.document_weights(0).tolist() == [0, 0, 0, 0, 1, 1, 1]
