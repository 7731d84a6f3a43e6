"""Bodies of requests: their fields, types and ranges. Everything else is a 400."""

import re
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from meshwright.errors import did_you_mean
from meshwright.serving.server.errors import ApiError, bad_request, field_of
from meshwright.serving.server.unsupported import (
    Unsupported,
    not_supported,
    refuse_unsupported,
    unsupported_fields,
)

Natural = Annotated[int, Meta(ge=0, lt=2**31)]
Positive = Annotated[int, Meta(ge=1, lt=2**31)]
TokenId = Natural
MOST_CHOICES = 128
MOST_LOGPROBS = 20
LONGEST_SALT = 1024  # characters
_FORMATS = "send structured_outputs with json, regex or choice instead"
_KINDS = "send json, regex or choice instead"
_DOCUMENTS = "a chat template that reads documents has them from chat_template_kwargs"
_TEMPLATE = "start the server with --chat-template FILE"
_SPECIAL = "the chat template writes special tokens"
_UNRANKED = "choices are not ranked"
_TEXT_ONLY = Unsupported(instead="this model takes text only")
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
    grammar: Annotated[Any, Unsupported(instead=_KINDS)] = None
    structural_tag: Annotated[Any, Unsupported(instead=_KINDS)] = None
    whitespace_pattern: Annotated[Any, Unsupported()] = None
    disable_fallback: Annotated[Any, Unsupported(neutral=False)] = None
    disable_any_whitespace: Annotated[Any, Unsupported(neutral=False)] = None
    disable_additional_properties: Annotated[Any, Unsupported(neutral=False)] = None


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
    # vLLM's too, of this and earlier versions
    priority: Annotated[Any, Unsupported(neutral=0)] = None
    request_id: Annotated[Any, Unsupported(instead="the answer has an id of its own")] = None
    use_beam_search: Annotated[Any, Unsupported(neutral=False)] = None
    length_penalty: Annotated[Any, Unsupported(neutral=1)] = None
    early_stopping: Annotated[Any, Unsupported(neutral=False)] = None
    repetition_detection: Annotated[Any, Unsupported()] = None
    thinking_token_budget: Annotated[Any, Unsupported(neutral=-1)] = None
    logits_processors: Annotated[Any, Unsupported()] = None
    spaces_between_special_tokens: Annotated[Any, Unsupported(neutral=True)] = None
    truncation_side: Annotated[Any, Unsupported(neutral="left")] = None
    return_token_ids: Annotated[Any, Unsupported(neutral=False)] = None
    return_tokens_as_token_ids: Annotated[Any, Unsupported(neutral=False)] = None
    return_token_offsets: Annotated[Any, Unsupported(neutral=False)] = None
    guided_grammar: Annotated[Any, Unsupported(instead=_FORMATS)] = None
    structural_tag: Annotated[Any, Unsupported(instead=_FORMATS)] = None
    guided_decoding_backend: Annotated[Any, Unsupported()] = None
    guided_whitespace_pattern: Annotated[Any, Unsupported()] = None
    kv_transfer_params: Annotated[Any, Unsupported()] = None
    ec_transfer_params: Annotated[Any, Unsupported()] = None
    vllm_xargs: Annotated[Any, Unsupported()] = None
    # accepted and without effect here
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
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
    # vLLM's too
    prompt_embeds: Annotated[Any, Unsupported(instead="send a text or token ids as prompt")] = None
    prompt_token_ids: Annotated[Any, Unsupported(instead="send the token ids as prompt")] = None


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
    # OpenAI's too
    functions: Annotated[Any, Unsupported(instead="send tools instead")] = None
    function_call: Annotated[Any, Unsupported(instead="send tool_choice instead")] = None
    audio: Annotated[Any, Unsupported(instead="this model generates text only")] = None
    prediction: Annotated[Any, Unsupported(instead="it changes no answer")] = None
    moderation: Annotated[Any, Unsupported()] = None
    web_search_options: Annotated[Any, Unsupported()] = None
    # vLLM's too
    best_of: Annotated[Any, Unsupported(neutral=1, instead=_UNRANKED)] = None
    echo: Annotated[Any, Unsupported(neutral=False)] = None
    documents: Annotated[Any, Unsupported(instead=_DOCUMENTS)] = None
    chat_template: Annotated[Any, Unsupported(instead=_TEMPLATE)] = None
    add_special_tokens: Annotated[Any, Unsupported(neutral=False, instead=_SPECIAL)] = None
    include_reasoning: Annotated[Any, Unsupported(neutral=True)] = None
    mm_processor_kwargs: Annotated[Any, _TEXT_ONLY] = None
    media_io_kwargs: Annotated[Any, _TEXT_ONLY] = None
    return_prompt_text: Annotated[Any, Unsupported(neutral=False)] = None
    return_assistant_tokens_mask: Annotated[Any, Unsupported(neutral=False)] = None
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
        body = msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as reason:
        raise _invalid(str(reason), kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as reason:
        raise bad_request(f"the request body is not valid JSON: {reason}") from None
    except RecursionError:
        raise bad_request("the request body is nested too deeply") from None
    refuse_unsupported(body)
    return body


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
        return _unknown(message.split("`")[1], kind)
    if message.startswith("Object missing required field") and " - at " not in message:
        name = message.split("`")[1]
        return bad_request(f"the request body has no field '{name}', which is required", name)
    readable = _QUOTED_TYPE.sub(_type_in_words, message[0].lower() + message[1:])
    readable = readable.replace("`$.", "`").replace("`", "'")
    return bad_request(f"request body: {readable}", field_of(message))


def _unknown(name: str, kind: type[msgspec.Struct]) -> ApiError:
    for other, route in _ROUTES.items():
        if kind not in _ROUTES or name not in other.__struct_fields__:
            continue
        if name in unsupported_fields(other):
            return not_supported(name, Unsupported())
        instead = f"send {_COUNTERPARTS[name]}" if name in _COUNTERPARTS else "leave it out"
        return bad_request(
            f"'{name}' is a field of {route}, not of {_ROUTES[kind]}; {instead}", name
        )
    hint = did_you_mean(name, kind.__struct_fields__, at_least=_TYPO)
    return bad_request(f"unknown field '{name}'{hint}", name)


_TYPO = 0.75  # likeness: fields of other servers are often alike and mean something else
_ROUTES: dict[type[msgspec.Struct], str] = {
    CompletionBody: "/v1/completions",
    ChatBody: "/v1/chat/completions",
}
# fields that the other route has by another name
_COUNTERPARTS = {
    "prompt": "messages",
    "messages": "prompt",
    "max_completion_tokens": "max_tokens",
    "top_logprobs": "logprobs",
}
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
