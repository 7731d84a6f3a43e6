"""What every process of a server must have been started with: settings, model, versions."""

from typing import Any

from meshwright.launch import Fact, by_content, flat_settings, software_facts
from meshwright.models import model_to_dict
from meshwright.serving.settings import ServeConfig
from meshwright.serving.source import Source

# who each process is, and what process 0 alone acts on
MAY_DIFFER = frozenset(
    {
        "coordinator", "processes", "process_id", "host", "port", "name", "chat_template",
        "generation_config", "tool_calls", "api_key", "api_key_file", "allow_origin", "access_log",
        "adapter_loading",
    }
)  # fmt: skip
FREE_GROUPS = ("limits.", "easylm.")  # of process 0 too
CONTENT = frozenset(
    {"model", "tokenizer", "step", "end_token", "adapter", "adapters"}
)  # compared by what they lead to


def settings_facts(config: ServeConfig, source: Source) -> dict[str, Fact]:
    """All that must be the same, by the name a user knows it by."""
    model: dict[str, Any] = model_to_dict(source.config)
    facts = {
        "MODEL": by_content(source.name, [model, source.weights()]),
        "vocabulary of the tokenizer": Fact(str(source.tokenizer.vocab)),
    }
    if source.adapters:
        content = {name: adapter.weights() for name, adapter in source.adapters.items()}
        facts["ADAPTERS"] = by_content(", ".join(config.adapters), list(content.items()))
    for name, value in flat_settings(config).items():
        if name not in MAY_DIFFER | CONTENT and not name.startswith(FREE_GROUPS):
            facts[f"--{name.replace('_', '-')}"] = Fact(str(value))
    return facts | software_facts("jaxlib")
