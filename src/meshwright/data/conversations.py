"""Records of fine-tuning datasets: which format they have, and the examples they hold.

>>> record = {"instruction": "Add.", "input": "1 2", "output": "3"}
>>> recognize(record)
'instruction'
>>> examples_of(record, "instruction")[0].messages[0]["content"]
'Add.\\n\\n1 2'
"""

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.data.fields import value_of_key
from meshwright.errors import MeshwrightError, did_you_mean

Record = Mapping[str, Any]
Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Messages, of which the assistant's from `first_answer` on are answers."""

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] = ()
    first_answer: int = 0
    plain: "Completion | None" = None  # what is packed where there is no chat template


@dataclass(frozen=True)
class Completion:
    """A text and its continuation, which is the answer."""

    prompt: str
    completion: str
    apart: bool = False  # encoded each by itself, as for an encoder and a decoder


Example = Conversation | Completion


def _conversation(record: Record) -> list[Example]:
    return [Conversation(_with_system(record, _messages(record["messages"])), _tools(record))]


def _with_system(record: Record, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The messages after the system message that a record may have beside them."""
    if not record.get("system"):
        return messages
    return ({"role": "system", "content": _text(record, "system")}, *messages)


def _sharegpt(record: Record) -> list[Example]:
    messages = _with_system(record, _messages(record["conversations"]))
    return [Conversation(messages, _tools(record))]


def _completion(record: Record) -> list[Example]:
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return [Completion(prompt, completion)]
    asked = _messages(prompt)
    return [Conversation((*asked, *_messages(completion)), _tools(record), len(asked))]


def _instruction(record: Record) -> list[Example]:
    instruction, output = (_text(record, name) for name in ("instruction", "output"))
    context = _text(record, "input") if record.get("input") else ""
    question = f"{instruction}\n\n{context}" if context else instruction
    messages = _with_system(
        record,
        ({"role": "user", "content": question}, {"role": "assistant", "content": output}),
    )
    system = f"{_text(record, 'system')}\n\n" if record.get("system") else ""
    plain = Completion(system + alpaca_prompt(instruction, context), output)
    return [Conversation(messages, plain=plain)]


def alpaca_prompt(instruction: str, context: str = "") -> str:
    """The prompt that Stanford Alpaca was trained on, for models without a chat template."""
    paired = ", paired with an input that provides further context" if context else ""
    context = f"### Input:\n{context}\n\n" if context else ""
    return (
        f"Below is an instruction that describes a task{paired}. Write a response that "
        f"appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n{context}"
        "### Response:\n"
    )


def _inputs_targets(record: Record) -> list[Example]:
    return [Completion(_text(record, "inputs"), _text(record, "targets"), apart=True)]


def _preference(record: Record) -> list[Example]:
    """The chosen and the rejected example; what both begin with is no answer."""
    chosen, rejected, prompt = record["chosen"], record["rejected"], record.get("prompt")
    if isinstance(chosen, str) and isinstance(rejected, str):
        if prompt is None:
            prompt, chosen, rejected = _common_prompt(chosen, rejected)
        if not isinstance(prompt, str):
            raise MeshwrightError("'prompt' is not text, and 'chosen' and 'rejected' are")
        return [Completion(prompt, chosen), Completion(prompt, rejected)]
    conversations = [_messages(chosen), _messages(rejected)]
    if isinstance(prompt, list | tuple):
        asked = _messages(prompt)
        conversations = [(*asked, *messages) for messages in conversations]
    elif isinstance(prompt, str) and conversations[0][0]["role"] == "assistant":
        question: Message = {"role": "user", "content": prompt}
        conversations = [(question, *messages) for messages in conversations]
    same = [one == other for one, other in zip(*conversations, strict=False)]
    first = same.index(False) if False in same else len(same)
    return [Conversation(messages, _tools(record), first) for messages in conversations]


def _common_prompt(chosen: str, rejected: str) -> tuple[str, str, str]:
    """What both texts begin with, up to the last space or line end, and the rest of each."""
    end = 0
    while end < min(len(chosen), len(rejected)) and chosen[end] == rejected[end]:
        end += 1
    while end and not chosen[end - 1].isspace():
        end -= 1
    while end and chosen[end - 1].isspace():
        end -= 1  # answers begin with their space, as they do where a model continues the prompt
    return chosen[:end], chosen[end:], rejected[end:]


@dataclass(frozen=True)
class RecordFormat:
    keys: tuple[str, ...]  # that a record must have
    examples: Callable[[Record], list[Example]]


PREFERENCE = "preference"
CONVERSATIONS = ("messages", "sharegpt")  # which a chat template must write
# the first that fits is taken, unless there are pairs too
FORMATS: dict[str, RecordFormat] = {
    "messages": RecordFormat(("messages",), _conversation),
    "sharegpt": RecordFormat(("conversations",), _sharegpt),
    PREFERENCE: RecordFormat(("chosen", "rejected"), _preference),
    "completion": RecordFormat(("prompt", "completion"), _completion),
    "instruction": RecordFormat(("instruction", "output"), _instruction),
    "inputs-targets": RecordFormat(("inputs", "targets"), _inputs_targets),
}


def recognize(record: Record) -> str | None:
    """The name of the format of a record; None if it is none of FORMATS."""
    names = [name for name, one in FORMATS.items() if set(one.keys) <= record.keys()]
    if PREFERENCE in names and len(names) > 1:
        raise MeshwrightError(
            f"records hold pairs ('chosen' and 'rejected') and {names[0]!r}; choose one: --format "
            f"{PREFERENCE} or --format {next(name for name in names if name != PREFERENCE)}"
        )
    return names[0] if names else None


def check_format(name: str) -> str:
    """The name, if it is one of FORMATS."""
    if name not in FORMATS:
        raise MeshwrightError(f"--format {name!r} is not known{did_you_mean(name, FORMATS)}")
    return name


def examples_of(record: Record, name: str) -> list[Example]:
    """The example of a record, or the chosen and the rejected one."""
    for key in FORMATS[name].keys:
        value_of_key(record, key)
    return FORMATS[name].examples(record)


_ROLES = {
    "human": "user", "user": "user", "prompter": "user",
    "gpt": "assistant", "assistant": "assistant", "model": "assistant", "chatgpt": "assistant",
    "bing": "assistant", "bard": "assistant", "claude": "assistant",
    "system": "system", "developer": "developer",
    "tool": "tool", "function": "tool", "observation": "tool", "ipython": "ipython",
}  # fmt: skip


def _messages(value: Any) -> tuple[Message, ...]:
    """Messages with `role` and `content`; ShareGPT has `from` and `value`."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise MeshwrightError("messages are not a list of objects with 'role' and 'content'")
    messages = tuple(map(_message, value))
    if not messages:
        raise MeshwrightError("the list of messages is empty")
    return messages


def _message(value: Any) -> Message:
    if not isinstance(value, Mapping):
        raise MeshwrightError(f"a message is {type(value).__name__}, not an object")
    # tables hold None for what a message does not have; templates would take it for something
    message = {key: part for key, part in value.items() if part is not None or key == "content"}
    if "role" not in message and "from" in message:
        message["role"], message["content"] = message.pop("from"), message.pop("value", None)
        if message["role"] not in _ROLES:
            raise MeshwrightError(
                f"role {message['role']!r} is not known{did_you_mean(str(message['role']), _ROLES)}"
            )
        message["role"] = _ROLES[message["role"]]
    if not isinstance(message.get("role"), str):
        raise MeshwrightError("a message has no 'role'")
    if message.get("content") is None and not set(message) - {"role", "content"}:
        raise MeshwrightError(f"a message of the {message['role']} has no 'content'")
    return message


def _tools(record: Record) -> tuple[Any, ...]:
    tools = record.get("tools") or ()
    if isinstance(tools, str):  # tables hold them as JSON
        with contextlib.suppress(ValueError):
            tools = json.loads(tools)
    if isinstance(tools, str) or not isinstance(tools, Sequence):
        raise MeshwrightError("'tools' is not a list")
    return tuple(tools)


def _text(record: Record, key: str) -> str:
    if not isinstance(record.get(key), str):
        raise MeshwrightError(f"{key!r} is {type(record.get(key)).__name__}, not text")
    return str(record[key])
