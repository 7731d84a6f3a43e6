"""A server on loopback with an engine of the tests, and plain HTTP to talk to it."""

import contextlib
import dataclasses
import http.client
import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from tests.patience import PATIENCE_S
from tests.serving.server.bigram_engine import TOKENIZER, BigramEngine

from meshwright.data import ChatTemplate, Tokenizer
from meshwright.models import preset
from meshwright.serving.server import HttpServer, Service
from meshwright.serving.settings import ServeConfig
from meshwright.serving.source import Source

# ChatML, as Qwen has it, with tools
QWEN = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer with <tool_call>{"name": …, "arguments": …}</tool_call><|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}{# </think> #}"""


@dataclasses.dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def data(self) -> Any:
        return json.loads(self.text)

    @property
    def message(self) -> str:
        return self.data["error"]["message"]

    @property
    def events(self) -> list[Any]:
        lines = [line.removeprefix("data: ") for line in self.text.split("\n\n") if line]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


@dataclasses.dataclass(frozen=True)
class Running:
    server: HttpServer
    engine: BigramEngine

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 0

    def get(self, path: str, **headers: str) -> Answer:
        return self.send("GET", path, None, headers)

    def post(self, path: str, **body: Any) -> Answer:
        return self.send("POST", path, json.dumps(body).encode())

    def send(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        with contextlib.closing(
            http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        ) as connection:
            connection.request(method, path, body, dict(headers or {}))
            response = connection.getresponse()
            text = response.read().decode()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, text)


def config(**settings: Any) -> ServeConfig:
    return ServeConfig("runs/bigram", port=0, **settings)


def source(tokenizer: Tokenizer = TOKENIZER, special_tokens: bool = False) -> Source:
    model = dataclasses.replace(preset("tiny"), vocab=320)  # more than the tokenizer has
    ends = frozenset({tokenizer.end_of_document})
    return Source(model, tokenizer, ends, special_tokens, "bigram", lambda _: None)


@contextlib.contextmanager
def serving(
    engine: BigramEngine | None = None,
    template: str | None = QWEN,
    special_tokens: bool = False,
    **settings: Any,
) -> Iterator[Running]:
    """A server that runs inside; fails if a request is left in the engine at its end."""
    engine = engine or BigramEngine()
    chat = None if template is None else ChatTemplate(template)
    model = source(engine.tokenizer, special_tokens)
    with HttpServer(Service(engine, model, config(**settings), chat)) as server:
        yield Running(server, engine)
    assert not engine.active, "requests are left in the engine"
