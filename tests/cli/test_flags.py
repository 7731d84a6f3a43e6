"""What all commands read alike: numbers, flags given once, names of commands."""

import contextlib
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright import MeshwrightError
from meshwright.cli.flags import REPEATABLE, check_given_once, integer, take_integer
from meshwright.cli.jax_log import shorten_plugin_errors
from meshwright.cli.main import main
from meshwright.cli.train import settings


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4096", 4096),
        ("8_192", 8192),
        ("1e12", 10**12),
        ("1E3", 1000),
        ("1.5e3", 1500),
        ("2.50e1", 25),
        ("4Ki", 4096),
        ("2Mi", 2**21),
        ("4k", 4000),
        ("1.5M", 1_500_000),
        ("2b", 2 * 10**9),
    ],
)
def test_integers_are_read_as_people_write_them(text: str, number: int) -> None:
    assert integer(text) == number
    assert settings(["tiny", f"--eval.sequences={text}"]).eval.sequences == number


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1.5", "'1.5' is not a whole number, such as 4096, 8_192, 4k or 1e12"),
        ("1.0005k", "is not a whole number"),
        ("4x", "is not a whole number"),
        ("1.25e1", "is not a whole number"),
        ("1e999", "is not a whole number"),
        ("", "is not a whole number"),
        ("9" * 5000, "is not a whole number"),
    ],
)
def test_what_is_no_integer_says_how_to_write_one(text: str, says: str) -> None:
    with pytest.raises(MeshwrightError, match=says):
        integer(text)
    with pytest.raises(MeshwrightError, match=f"--rows: .*{says}"):
        take_integer(["--rows", text], "--rows")
    with pytest.raises(MeshwrightError, match=f"--batch: .*{says}"):
        settings(["tiny", "--batch", text])


def test_of_lengths_and_batches_k_is_1024() -> None:
    config = settings(
        ["tiny", "--seq", "2k", "--batch", "1k", "--steps", "2k", "--loss.chunk", "1k"]
    )
    assert (config.seq, config.batch, config.steps, config.loss.chunk) == (2048, 1024, 2000, 1024)
    assert take_integer(["--prompt", "8k"], "--prompt") == 8192


@given(st.text(max_size=12))
def test_any_text_is_an_integer_or_a_mistake(text: str) -> None:
    with contextlib.suppress(MeshwrightError):
        assert isinstance(integer(text), int)


@pytest.mark.parametrize(
    "words",
    [
        "plan tiny --on cpu:8 --batch 8 --seq 64 --batch 16",
        "plan tiny --on cpu:8 --batch=8 --seq 64 --batch=16",
        "show --mesh fsdp=8 --on cpu:8 --mesh tp=8",
        "train tiny --override layers=2 --override mlp=64",
        "train tiny --init-from a --init_from b",
        "prove tiny --on cpu:8 --on cpu:4",
        "serve a --port 1 --port 2",
        "plan tiny --on cpu:8 --batch 8 --seq 64 --json --json",
    ],
)
def test_a_flag_given_twice_is_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(words.split())
    assert "is given twice; give it once, as in --" in capsys.readouterr().err


def test_flags_that_collect_values_may_be_repeated() -> None:
    for flag in REPEATABLE:
        check_given_once([flag, "a", flag, "b"])
    check_given_once([])


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("trian", "'trian' is not a command; did you mean 'train'?"),
        ("plam", "did you mean 'plan'?"),
        ("finetune", "known: models, machines, show, plan"),
    ],
)
def test_a_mistyped_command_is_answered_with_the_nearest(
    command: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "tiny", "--steps", "3"])
    assert stopped.value.code == 2
    assert says in capsys.readouterr().err


def test_a_plugin_without_its_accelerator_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    shorten_plugin_errors()
    logger = logging.getLogger("jax._src.xla_bridge")
    try:
        raise RuntimeError("Unable to load cuDNN.\nIs it installed?")
    except RuntimeError:
        logger.exception("Jax plugin configuration error: Exception when calling %s", "cuda")
    logger.info("Unable to initialize backend %r", "tpu")
    assert "Traceback" not in caplog.text
    assert caplog.messages[0] == (
        "warning: Jax plugin configuration error: Exception when calling cuda: Unable to load "
        "cuDNN.; it is not used"
    )
