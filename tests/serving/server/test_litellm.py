"""LiteLLM, unmodified. `pip install litellm mcp`, which needs an environment of its own."""

import json
import os

import pytest
from tests.serving.server.bigram_engine import TOKENIZER, BigramEngine, greedy
from tests.serving.server.serving import Running, serving

pytestmark = pytest.mark.filterwarnings("ignore")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it asks the network for prices
litellm = pytest.importorskip("litellm", reason="litellm is not installed")

HI = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}


def test_chats_streams_and_completions(server: Running) -> None:
    where = {"api_base": f"{server.url}/v1", "api_key": "x"}
    once = litellm.completion("openai/bigram", HI, max_tokens=8, seed=3, **where)
    parts = litellm.completion("openai/bigram", HI, max_tokens=8, seed=3, stream=True, **where)
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == once.choices[0].message.content
    assert once.usage.completion_tokens == 8
    done = litellm.text_completion(
        model="text-completion-openai/bigram", prompt="The old", max_tokens=5, temperature=0,
        **where,
    )  # fmt: skip
    assert done.choices[0].text == TOKENIZER.decode(greedy(list(b"The old"), 5))
    with pytest.raises(litellm.BadRequestError, match="would fit"):
        litellm.completion("openai/bigram", HI, max_tokens=9999, **where)


def test_tools() -> None:
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'
    with serving(BigramEngine(answer=lambda _: call)) as server:
        done = litellm.completion(
            "openai/bigram", HI, tools=[WEATHER], api_base=f"{server.url}/v1", api_key="x"
        )
        (made,) = done.choices[0].message.tool_calls
        assert json.loads(made.function.arguments) == {"city": "Ulm"}
