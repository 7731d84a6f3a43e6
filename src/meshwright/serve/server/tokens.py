"""/tokenize, /detokenize and /tokenizer_info, for clients that count tokens."""

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from meshwright.serve.server.bodies import DetokenizeBody, TokenizeBody
from meshwright.serve.server.errors import bad_request, json_response
from meshwright.serve.server.messages import chat_prompt
from meshwright.serve.server.service import Service
from meshwright.serve.server.transport import read


async def tokenize(http: HttpRequest, service: Service) -> Response:
    body = await read(http, TokenizeBody, service.config.limits)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("send either 'prompt', a text, or 'messages', a chat")
    tokenizer = service.source.tokenizer
    end = tokenizer.end_of_document
    if body.prompt is not None and body.prompt == tokenizer.token_text(end):
        tokens: tuple[int, ...] = (end,)  # also where the tokenizer has no text for it
    elif body.prompt is not None:
        tokens = await service.encode(body.prompt, body.add_special_tokens)
    else:
        _, tokens = await chat_prompt(
            service, body.messages or (), body.tools, generation_prompt=body.add_generation_prompt
        )
    answer: dict[str, Any] = {
        "tokens": tokens,
        "count": len(tokens),
        "max_model_len": service.engine.max_length,
    }
    if body.return_token_strs:
        answer["token_strs"] = [tokenizer.token_text(token) for token in tokens]
    return json_response(answer)


async def detokenize(http: HttpRequest, service: Service) -> Response:
    body = await read(http, DetokenizeBody, service.config.limits)
    service.check_model(body.model)
    service.check_tokens(body.tokens, "tokens")
    return json_response({"prompt": service.source.tokenizer.decode(body.tokens)})


async def tokenizer_info(http: HttpRequest, service: Service) -> Response:
    tokenizer, template = service.source.tokenizer, service.template
    info: dict[str, Any] = {
        "tokenizer_class": type(tokenizer).__name__,
        "eos_token": tokenizer.token_text(tokenizer.end_of_document),
        "eos_token_id": tokenizer.end_of_document,
        "vocab_size": tokenizer.vocab,
        "model_max_length": service.engine.max_length,
    }
    if template is not None:
        info = {**info, **template.tokens, "chat_template": template.text}
    return json_response(info)
