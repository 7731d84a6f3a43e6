"""/v1/models, the card of the chat page, and vLLM's routes that load and unload adapters."""

import asyncio
from pathlib import Path
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

from meshwright.models import parameter_counts
from meshwright.present import count_text
from meshwright.serving.server.bodies import LoadAdapterBody, UnloadAdapterBody
from meshwright.serving.server.errors import ApiError, json_response
from meshwright.serving.server.service import Service
from meshwright.serving.server.transport import finish, read


async def models(http: HttpRequest, service: Service) -> Response:
    adapters = service.engine.adapters.items()
    cards = [_card(service), *(_card(service, name, one.folder) for name, one in adapters)]
    return json_response({"object": "list", "data": cards})


async def model(http: HttpRequest, service: Service) -> Response:
    name = service.check_model(http.path_params["name"])
    adapter = service.engine.adapters.get(name)
    card = _card(service) if adapter is None else _card(service, name, adapter.folder)
    return json_response(card)


def _card(service: Service, adapter: str = "", folder: Path | None = None) -> dict[str, Any]:
    """The model, or one of its adapters."""
    return {
        "id": adapter or service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "meshwright",
        "root": str(folder or service.config.model),
        "parent": service.name if adapter else None,
        "max_model_len": service.engine.max_length,
    }


def model_card(service: Service) -> list[tuple[str, str]]:
    """What the chat page says of the model, names and values; little to clients without a key."""
    if service.keys:
        return [("model", service.name)]
    config, tokenizer = service.source.config, service.source.tokenizer
    axes = service.config.mesh.split(",")
    facts = {
        "model": service.name,
        "architecture": config.hf_config.get("model_type", "") if config.hf_config else "",
        "parameters": count_text(parameter_counts(config)[0]),
        "context": f"{service.engine.max_length:,} tokens",
        "vocabulary": f"{tokenizer.vocab:,} tokens",
        "tokenizer": tokenizer.kind,
        "mesh": ",".join(axis for axis in axes if not axis.endswith("=1")) or "one device",
        "dtype": "" if service.config.dtype == "auto" else service.config.dtype,
        "chat template": "yes" if service.template is not None else "none: texts are continued",
        "adapters": ", ".join(service.engine.adapters),
    }
    return [(name, value) for name, value in facts.items() if value]


async def load_adapter(http: HttpRequest, service: Service) -> Response:
    _check_allowed(service)
    body = await read(http, LoadAdapterBody, service)
    name, folder = body.lora_name, body.lora_path
    if name == service.name:
        raise ApiError(400, f"'{name}' is the model's own name; send another", param="lora_name")
    # a Path is never a name on the Hub: clients choose no downloads
    load = asyncio.to_thread(service.engine.load_adapter, name, Path(folder))
    await finish(http, service, load)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def unload_adapter(http: HttpRequest, service: Service) -> Response:
    _check_allowed(service)
    body = await read(http, UnloadAdapterBody, service)
    name = body.lora_name
    if name not in service.engine.adapters:
        known = ", ".join(f"'{each}'" for each in service.engine.adapters) or "none"
        reason = f"no adapter is called '{name}'; loaded: {known}"
        raise ApiError(404, reason, param="lora_name", code="model_not_found")
    await finish(http, service, asyncio.to_thread(service.engine.unload_adapter, name))
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def _check_allowed(service: Service) -> None:
    service.check_ready()
    if not service.config.adapter_loading:
        raise ApiError(
            403,
            "this server does not let clients load and unload adapters, which reads folders of its "
            "machine; start it with --adapter-loading",
        )
