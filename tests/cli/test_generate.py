"""`meshwright generate`: what it prints, streams and refuses."""

import io
import json
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.checkpoint import Checkpoints
from meshwright.cli.main import main
from meshwright.models import model_to_dict
from meshwright.models.decoder import DecoderConfig, abstract_arrays

CONFIG = DecoderConfig(258, 1, 16, 2, 2, 8, 32, max_seq=200)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run whose model has learned to say the alphabet."""
    params = jax.tree.map(lambda spec: jnp.zeros(spec.shape), abstract_arrays(CONFIG))
    # the embedding numbers the tokens on a circle; the head asks for the next number; z ends
    angle = 2 * np.pi * np.arange(258) / 258
    circle = np.stack([np.cos(angle), np.sin(angle)], -1)
    after = np.roll(circle, 1, axis=0)  # where a token's predecessor lies
    after[256] = circle[ord("z")]
    after[ord("{")] = 0
    params["embedding"] = params["embedding"].at[:, :2].set(circle)
    params["output"] = params["output"].at[:2].set(50 * after.T)
    params["norm"] = jnp.ones(16)
    folder = tmp_path_factory.mktemp("alphabet")
    with Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.save(7, {"params": params}, {}, wait=True)
    (folder / "config.json").write_text(json.dumps({"model_config": model_to_dict(CONFIG)}))
    (folder / "tokenizer_state.json").write_text('{"kind": "bytes"}')
    return str(folder)


def test_it_continues_the_prompt_and_says_how_fast(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["generate", run, "--prompt", "abc", "--max-new", "5", "--temperature", "0"])
    printed = capsys.readouterr()
    assert printed.out == "abcdefgh\n"
    first, last = printed.err.splitlines()
    assert first == (f"step 7 of {run}, mesh dp=1,fsdp=1,tp=1,sp=1 on 1 device of 16, float32")
    assert last.startswith("5 tokens, first token after ")
    assert last.endswith(" tokens/s")


def test_several_prompts_come_in_order_each_ended_where_it_ends(
    run: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("klm\n"))
    prompts = ["--prompt", "wx", "--prompt", "-", "--prompt", "A"]
    main(
        ["generate", run, *prompts, "--max-new", "4", "--temperature", "0", "--mesh", "fsdp=2,tp=2"]
    )
    assert capsys.readouterr().out == "wxyz\n---\nklmnopq\n---\nABCDE\n"


def test_json_is_plain_data(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--prompt",
        "wx",
        "--prompt",
        "a",
        "--max-new",
        "4",
        "--temperature",
        "0",
        "--json",
    ]
    main(["generate", run, *arguments])
    data = json.loads(capsys.readouterr().out)
    assert data["results"] == [
        {"prompt": "wx", "text": "yz", "prompt_tokens": 2, "tokens": [121, 122], "ended": "end"},
        {"prompt": "a", "text": "bcde", "prompt_tokens": 1, "tokens": [98, 99, 100, 101],
         "ended": "length"},
    ]  # fmt: skip
    assert data["tokens"] == 7  # with the one that ended the first
    assert data["tokens_per_second"] > 0


def test_the_seed_decides(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    def text(*arguments: str) -> str:
        main(
            ["generate", run, "--prompt", "a", "--temperature", "30", "--max-new", "12", *arguments]
        )
        return capsys.readouterr().out

    assert text("--seed", "1") == text("--seed", "1") != text("--seed", "2")
    assert text("--top-k", "1") == "abcdefghijklm\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["no prompt", "--prompt"]),
        (["--prompt", ""], ["prompt 1 is empty"]),
        (["--prompt", "-", "--prompt", "-"], ["give it only once"]),
        (["--prompt", "a", "--max-new", "200"], ["prompt 1 has 1 token", "max_new=199 would fit"]),
        (["--prompt", "a", "--temperature", "-1"], ["temperature=-1.0"]),
        (["--prompt", "a", "--top-p", "2"], ["top_p=2.0 must be a probability"]),
        (["--prompt", "a", "--step", "8"], ["no checkpoint of step 8", "7"]),
        (["--prompt", "a", "--mesh", "tp=4"], ["tp=4 does not divide the model's heads=2"]),
        (["--prompt", "a", "--mesh", "fsdp=64"], ["needs 64 devices, 16 are here"]),
        (["--prompt", "a", "--mesh", "tq=2"], ["axis 'tq'", "the axes are dp, fsdp, tp, sp"]),
        (["--prompt", "a", "--cpu-devices", "0"], ["--cpu-devices 0"]),
        (["--prompt", "a", "--cpu-devices", "4"], ["--cpu-devices 4 comes too late"]),
    ],
)
def test_mistakes_are_one_readable_message_and_status_2(
    run: str, arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["generate", run, *arguments])
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert not printed.out
    for word in words:
        assert word in printed.err


def test_text_comes_as_it_is_made_and_a_closed_pipe_ends_it_quietly(run: str) -> None:
    arguments: list[Any] = ["--prompt", "a", "--max-new", "150", "--temperature", "30"]
    with subprocess.Popen(
        [sys.executable, "-m", "meshwright.cli.main", "generate", run, *arguments,
         "--cpu-devices", "2", "--mesh", "fsdp=-1"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as command:  # fmt: skip
        assert command.stdout is not None
        assert command.stderr is not None
        assert command.stdout.read(1) == b"a"
        command.stdout.close()
        said = command.stderr.read().decode()
    assert command.returncode == 0
    assert "on 2 devices of 2" in said
    assert "Error" not in said
