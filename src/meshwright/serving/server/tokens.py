"""/tokenize, /detokenize and /tokenizer_info, for clients that count tokens."""

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from meshwright.serving.server.bodies import DetokenizeBody, TokenizeBody
from meshwright.serving.server.errors import bad_request, json_response
from meshwright.serving.server.messages import chat_prompt
from meshwright.serving.server.service import Service
from meshwright.serving.server.transport import off_loop, read


async def tokenize(http: HttpRequest, service: Service) -> Response:
    body = await read(http, TokenizeBody, service)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("send either 'prompt', a text, or 'messages', a chat")
    return await off_loop(http, lambda: json_response(_tokenized(service, body)))


def _tokenized(service: Service, body: TokenizeBody) -> dict[str, Any]:
    tokenizer = service.source.tokenizer
    end = tokenizer.end_of_document
    if body.prompt is not None and body.prompt == tokenizer.token_text(end):
        tokens: tuple[int, ...] = (end,)  # also where the tokenizer has no text for it
    elif body.prompt is not None:
        tokens = service.encode(body.prompt, body.add_special_tokens)
    else:
        _, tokens = chat_prompt(
            service,
            body.messages or (),
            body.tools,
            generation_prompt=body.add_generation_prompt,
            any_length=True,
        )
    answer: dict[str, Any] = {
        "tokens": tokens,
        "count": len(tokens),
        "max_model_len": service.engine.max_length,
    }
    if body.return_token_strs:
        texts = {token: tokenizer.token_text(token) for token in set(tokens)}
        answer["token_strs"] = [texts[token] for token in tokens]
    return answer


async def detokenize(http: HttpRequest, service: Service) -> Response:
    body = await read(http, DetokenizeBody, service)
    service.check_model(body.model)
    service.check_tokens(body.tokens, "tokens")
    decode = service.source.tokenizer.decode
    return await off_loop(http, lambda: json_response({"prompt": decode(body.tokens)}))


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
