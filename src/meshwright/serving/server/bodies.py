"""Bodies of requests: their fields, types and ranges. Everything else is a 400."""

import re
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from meshwright.errors import did_you_mean
from meshwright.serving.server.errors import ApiError, bad_request, field_of

Natural = Annotated[int, Meta(ge=0, lt=2**31)]
Positive = Annotated[int, Meta(ge=1, lt=2**31)]
TokenId = Natural
MOST_CHOICES = 128
MOST_LOGPROBS = 20
LONGEST_SALT = 1024  # characters
# fields of vLLM that are not supported, with the value that changes nothing, if there is one
NEUTRAL: dict[str, Any] = {
    "priority": 0,
    "use_beam_search": False,
    "length_penalty": 1,
    "early_stopping": False,
    "spaces_between_special_tokens": True,
    "logits_processors": None,
    "guided_grammar": None,
    "guided_decoding_backend": None,
    "guided_whitespace_pattern": None,
    "return_token_ids": False,
    "return_tokens_as_token_ids": False,
    "kv_transfer_params": None,
    "vllm_xargs": None,
}
_Stop = str | list[str]
_Choice = Annotated[list[str], Meta(min_length=1)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: Any = None
    continuous_usage_stats: bool | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's way to ask for JSON, a regular expression, or one of some texts."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: _Choice | None = None


class GenerationBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What completions and chats have in common."""

    model: str | None = None
    max_tokens: Natural | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None  # as OpenAI and vLLM limit it
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] | None = None
    stop: _Stop | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    # vLLM's
    min_tokens: Natural | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int, Meta(ge=-1, le=MOST_LOGPROBS)] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    bad_words: list[str] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=LONGEST_SALT)] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: _Choice | None = None
    # vLLM's too: see NEUTRAL
    priority: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    early_stopping: Any = None
    spaces_between_special_tokens: Any = None
    logits_processors: Any = None
    guided_grammar: Any = None
    guided_decoding_backend: Any = None
    guided_whitespace_pattern: Any = None
    return_token_ids: Any = None
    return_tokens_as_token_ids: Any = None
    kv_transfer_params: Any = None
    vllm_xargs: Any = None
    # accepted and without effect here
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None


class LoadAdapterBody(msgspec.Struct, forbid_unknown_fields=True):
    """/v1/load_lora_adapter, as vLLM's."""

    lora_name: str
    lora_path: str


class UnloadAdapterBody(msgspec.Struct, forbid_unknown_fields=True):
    """/v1/unload_lora_adapter, as vLLM's."""

    lora_name: str


class CompletionBody(GenerationBody, kw_only=True):
    """/v1/completions."""

    prompt: str | list[str | TokenId | list[TokenId]]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MOST_LOGPROBS)] | None = None
    best_of: Positive | None = None
    add_special_tokens: bool | None = None


class ChatBody(GenerationBody, kw_only=True):
    """/v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: Natural | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MOST_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    modalities: list[str] | None = None
    # accepted and without effect here
    verbosity: Any = None


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """/tokenize: a text, or messages for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    tokens: list[TokenId]


class ScoreBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """EasyLM's /loglikelihood and /loglikelihood-rolling."""

    text: list[str]
    prefix_text: list[str] | None = None
    until: Any = None
    temperature: Any = None


class GenerateBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """EasyLM's /generate."""

    prefix_text: list[str]
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    text: Any = None
    until: Any = None


class GreedyUntilBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """EasyLM's /greedy-until."""

    prefix_text: list[str]
    until: list[str | list[str]]
    text: Any = None
    temperature: Any = None


class EasyLMChatBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """EasyLM's /chat."""

    prompt: str
    context: str = ""
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None


_Body = TypeVar("_Body", bound=msgspec.Struct)


def decoded(data: bytes, kind: type[_Body], most_values: int) -> _Body:
    """The JSON in `data` as a body of this kind, or a 400 that names the field.

    A body of more than `most_values` is refused before it is decoded, which no other thread can
    interrupt.
    """
    if not data or data.isspace():
        raise bad_request("the request has no body; send a JSON object")
    values = json_values(data) if len(data) > most_values else 0
    if values > most_values:
        raise ApiError(
            413,
            f"the request body has {values:,} JSON values; the server takes {most_values:,} "
            "(--limits.body-values); send less at once",
        )
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as reason:
        raise _invalid(str(reason), kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as reason:
        raise bad_request(f"the request body is not valid JSON: {reason}") from None
    except RecursionError:
        raise bad_request("the request body is nested too deeply") from None


def json_values(data: bytes) -> int:
    r"""How many values a JSON text has, including objects and lists; empty ones count as two.

    >>> json_values(rb'{"a, \"[": [1, 2], "b": "c"}')
    5
    """
    # numpy lets other threads run; a backslash is only in strings
    text = data.replace(rb"\\", b"__").replace(rb"\"", b"__") if b"\\" in data else data
    number, in_string = 1, False
    for at in range(0, len(text), _BLOCK):
        block = np.frombuffer(text, np.uint8, min(_BLOCK, len(text) - at), at)
        quotes = np.add.accumulate(block == ord('"'), dtype=np.uint8) + np.uint8(in_string)
        begins = (block == ord(",")) | (block == ord("[")) | (block == ord("{"))
        number += int(np.count_nonzero(begins & (quotes % 2 == 0)))
        in_string = bool(quotes[-1] % 2)
    return number


_BLOCK = 1 << 20


def _invalid(message: str, kind: type[msgspec.Struct]) -> ApiError:
    unknown = message.startswith("Object contains unknown field")
    if unknown and " - at " not in message:
        name = message.split("`")[1]
        known = kind.__struct_fields__
        return bad_request(f"unknown field '{name}'{did_you_mean(name, known)}", name)
    if message.startswith("Object missing required field") and " - at " not in message:
        name = message.split("`")[1]
        return bad_request(f"the request body has no field '{name}', which is required", name)
    readable = _QUOTED_TYPE.sub(_type_in_words, message[0].lower() + message[1:])
    readable = readable.replace("`$.", "`").replace("`", "'")
    return bad_request(f"request body: {readable}", field_of(message))


_TYPES = {
    "str": "a text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_QUOTED_TYPE = re.compile(rf"`((?:{'|'.join(_TYPES)})(?: \| \w+)*)`")


def _type_in_words(found: re.Match[str]) -> str:
    """The types that msgspec names.

    >>> _QUOTED_TYPE.sub(_type_in_words, "Expected `str | array | null`, got `int`")
    'Expected a text, a list or null, got a whole number'
    """
    *first, last = (_TYPES.get(name, name) for name in found[1].split(" | "))
    return f"{', '.join(first)} or {last}" if first else last
