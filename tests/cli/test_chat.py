"""`meshwright chat`: history, commands, an answer that is stopped."""

import io
import signal
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

import meshwright as mw
from meshwright.cli.chat import talk
from meshwright.cli.commands import run
from meshwright.errors import MeshwrightError
from meshwright.models import abstract_arrays, save_hf
from meshwright.models.decoder import DecoderConfig
from meshwright.serving.request import Request
from meshwright.serving.sampling import Sampling


def conversation(
    monkeypatch: pytest.MonkeyPatch, lines: str, system: str | None = None
) -> list[list[str]]:
    """What the model was asked with, message by message, when these lines are typed."""
    asked: list[list[str]] = []

    def answer(messages: list[dict[str, str]]) -> Iterator[str]:
        asked.append([f"{message['role']}: {message['content']}" for message in messages])
        if messages[-1]["content"] == "long":
            raise MeshwrightError("the context is full")
        yield from ("an", "swer ", str(len(asked)))

    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    talk(answer, system)
    return asked


def test_a_conversation_is_kept_until_it_begins_anew(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = conversation(monkeypatch, "one\n\ntwo\n/new\nthree\n/exit\nfour\n", "Be brief.")
    assert asked == [
        ["system: Be brief.", "user: one"],
        ["system: Be brief.", "user: one", "assistant: answer 1", "user: two"],
        ["system: Be brief.", "user: three"],
    ]
    assert capsys.readouterr().out == "answer 1\nanswer 2\nanswer 3\n"


def test_an_unknown_command_is_answered_with_the_known_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = conversation(
        monkeypatch,
        "/reset\n/system Be brief.\n/help\n/usr/bin?\n/new idea\n/exit the loop?\n /tmp is\n/exit \n",
    )
    assert asked == [
        ["user: /usr/bin?"], ["user: /usr/bin?", "assistant: answer 1", "user:  /tmp is"],
    ]  # fmt: skip
    said = capsys.readouterr()
    words = ("/reset", "/system …", "/new …", "/exit …")
    for word, line in zip(words, said.err.splitlines(), strict=True):
        assert line.startswith(f"{word} is no command: /new begins again, /exit ends")
    assert said.out.startswith("/new begins again, /exit ends; everything else")


def test_a_message_that_is_refused_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = conversation(monkeypatch, "one\nlong\ntwo")
    assert asked[-1] == ["user: one", "assistant: answer 1", "user: two"]
    assert capsys.readouterr().err == "error: the context is full\n"


def test_a_signal_stops_the_answer_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    closed = []

    def answer(messages: list[dict[str, str]]) -> Iterator[str]:
        try:
            yield "a"
            if messages[-1]["content"] == "stop":
                signal.raise_signal(signal.SIGINT)
            yield "b"
            yield "c"
        finally:
            closed.append(len(messages))

    monkeypatch.setattr("sys.stdin", io.StringIO("stop\ngo on"))
    talk(answer, None)
    assert capsys.readouterr().out == "ab …\nabc\n"
    assert closed == [1, 3]


def test_a_model_is_asked_by_its_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = DecoderConfig(320, 1, 16, 2, 2, 8, 16, max_seq=64)
    params = jax.tree.map(
        lambda spec: jax.random.normal(jax.random.key(0), spec.shape), abstract_arrays(config)
    )
    folder = str(save_hf(tmp_path / "model", params, config))
    words = ["chat", folder, "--tokenizer", "bytes", "--max-new", "3"]
    with pytest.raises(SystemExit):
        run(words)
    assert "has no chat template" in capsys.readouterr().err
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}|{% endfor %}")
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi"))
    run([*words, "--chat-template", str(template)])
    with mw.load(folder, tokenizer="bytes", chat_template=template) as model:
        calm = Sampling(0.8, top_p=0.95)
        answer = model.engine.generate([Request(tuple(b"Hi|"), calm, max_new=3)])[0].text
    assert capsys.readouterr().out == f"{answer}\n"
