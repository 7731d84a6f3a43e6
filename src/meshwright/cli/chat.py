"""`meshwright chat`: a conversation with a model in the terminal."""

import dataclasses
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from meshwright.cli.flags import simulate
from meshwright.errors import MeshwrightError
from meshwright.interrupt import signal_calls

_ADAPTER = "adapter"  # its name in the engine
_COMMANDS = "/new begins again, /exit ends"
_COMMAND = re.compile(r"/(\?|[A-Za-z]\w*)(?=\s|$)")  # a path of two folders is a message


@dataclasses.dataclass(frozen=True)
class ChatSettings:
    """Model, sampling and placement."""

    model: str
    """Folder of a run, of a Hugging Face model or of an adapter of PEFT, or a name on the Hub
    (org/name)."""
    adapter: str | None = None
    """Adapter of the model: a folder of PEFT or of a run with LoRA, or a name on the Hub."""
    system: str | None = None
    """The system message."""
    max_new: int | None = None
    """Most tokens of an answer; by default what the context has room for."""
    temperature: float | None = None
    """Sampling temperature; 0 is greedy. By default as the model's generation_config.json says;
    if it names no sampling: 0.8."""
    top_p: float | None = None
    """Nucleus sampling: keep the smallest set of tokens whose probability reaches p. By
    default as the model's generation_config.json says; if it names no sampling: 0.95."""
    seed: int = 0
    """Random seed of the first answer; that of each next one is one more."""
    mesh: str = "dp=1,fsdp=1,tp=1,sp=1"
    """Mesh axes and sizes; the default is one device."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Data type of weights and KV cache; auto: bfloat16 on accelerators, float32 on CPUs."""
    step: int | None = None
    """Step of the checkpoint; the latest by default."""
    tokenizer: str | None = None
    """"bytes", a tokenizer.json or its folder, instead of the folder's own."""
    end_token: str | None = None
    """Token that ends a document, if the tokenizer files do not name it."""
    chat_template: Path | None = None
    """File of a chat template, instead of the folder's own."""
    cpu_devices: int | None = None
    """Simulate this number of devices on the CPU."""


def chat(settings: ChatSettings) -> None:
    """Talk with the model of a run or of a Hugging Face folder, in the terminal.

      meshwright chat runs/first

    Ctrl-C stops an answer, and between answers ends; so do /exit and Ctrl-D. /new begins anew.
    """
    from meshwright.launch import keep_compiled_programs
    from meshwright.serving import load

    keep_compiled_programs()
    simulate(settings.cpu_devices)
    settable = {"temperature": settings.temperature, "top_p": settings.top_p}
    sampling = {name: value for name, value in settable.items() if value is not None}
    with load(
        settings.model, settings.mesh, settings.dtype, step=settings.step,
        tokenizer=settings.tokenizer, end_token=settings.end_token,
        chat_template=settings.chat_template,
        adapters={} if settings.adapter is None else {_ADAPTER: settings.adapter},
    ) as loaded:  # fmt: skip
        loaded.check_chat()

        def answer(messages: list[dict[str, str]]) -> Iterator[str]:
            answers = sum(message["role"] == "assistant" for message in messages)
            seed = settings.seed + answers
            adapter = "" if settings.adapter is None else _ADAPTER
            return loaded.stream_chat(
                messages, settings.max_new, adapter=adapter, seed=seed, **sampling
            )

        talk(answer, settings.system)


def talk(answer: Callable[[list[dict[str, str]]], Iterator[str]], system: str | None) -> None:
    """Read messages and print answers, until the end of the input or /exit."""
    begun = [] if system is None else [{"role": "system", "content": system}]
    messages = list(begun)
    if sys.stdin.isatty():
        print(f"{_COMMANDS}; Ctrl-C stops an answer")
    while (text := _read()) is not None:
        line = text.rstrip()
        if line in ("/exit", "/quit"):
            return
        if line == "/new":
            messages = list(begun)
        elif line in ("/help", "/?"):
            print(f"{_COMMANDS}; everything else is said to the model")
        elif command := _COMMAND.match(line):
            word = line if line == command.group() else f"{command.group()} …"
            print(
                f"{word} is no command: {_COMMANDS}; to say it to the model, begin with a space",
                file=sys.stderr,
            )
        elif line:
            messages.append({"role": "user", "content": text})
            try:
                messages.append({"role": "assistant", "content": _print(answer(messages))})
            except MeshwrightError as mistake:  # a context that is full, say
                messages.pop()
                print(f"error: {mistake}", file=sys.stderr)


def _read() -> str | None:
    """A line; None at the end of the input."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None


def _print(pieces: Iterator[str]) -> str:
    """Print an answer as it comes; Ctrl-C stops it, and what came is kept."""
    answer, stopped = "", False

    def stop() -> bool:
        nonlocal stopped
        first, stopped = not stopped, True
        return first  # a second one ends the program

    with signal_calls(signal.SIGINT, stop):
        for piece in pieces:
            answer += piece
            print(piece, end="", flush=True)
            if stopped:
                print(" …", end="")
                break
    closing: Any = pieces
    closing.close()
    print()
    return answer
