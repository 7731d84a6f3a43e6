"""`meshwright serve`: a model behind an HTTP server, with a chat page."""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import tyro

from meshwright.data import load_chat_template
from meshwright.errors import MeshwrightError
from meshwright.launch import (
    keep_compiled_programs,
    make_room_for_cpu_collectives,
    simulate_devices,
)
from meshwright.models import default_dtype
from meshwright.present import count, mesh_text
from meshwright.serve import (
    AnyEngine,
    Defaults,
    ServeConfig,
    Source,
    check_fits,
    defaults_of,
    generation_mesh,
    look_into,
    serving_of,
    start_engine,
)


def serve(config: tyro.conf.OmitArgPrefixes[ServeConfig]) -> None:
    """Serve a model over HTTP: OpenAI's API, EasyLM's routes and a chat page.

    meshwright serve runs/first --mesh tp=2 --port 8000

    SIGTERM or Ctrl-C finishes the requests that run and refuses new ones; a second ends at once.
    """
    try:
        from meshwright.serve.server import HttpServer, Service, bind, run_until_stopped
    except ImportError as reason:
        raise MeshwrightError(f"{reason}; pip install 'meshwright[serve]' has it") from None
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    for name in ("jax", "absl", "orbax"):  # which say much at this level
        logging.getLogger(name).setLevel(logging.WARNING)
    make_room_for_cpu_collectives()
    keep_compiled_programs()
    if config.cpu_devices is not None:
        simulate_devices(config.cpu_devices)
    source = look_into(
        config.model, step=config.step, tokenizer=config.tokenizer, end_token=config.end_token
    )
    serving_of(source.config)  # or an error
    defaults = Defaults()
    if config.generation_config == "auto":
        defaults = defaults_of(source.generation_config)
    template = load_chat_template(Path(config.model), config.chat_template)
    keys = config.api_keys()
    if config.host not in ("127.0.0.1", "localhost", "::1") and not keys:
        print(
            f"warning: whoever reaches {config.host} can use this server; --api-key-file FILE "
            "makes clients need a key",
            file=sys.stderr,
        )
    with bind(config.host, config.port) as bound:  # before the weights are read, which takes long
        engine = _engine(source, config)
        try:
            service = Service(engine, source, config, template, defaults)
            with HttpServer(service, bound) as server:
                chat = "the chat page" + ("" if template else " (no chat template: plain text)")
                print(f"{config.served_name} is served at {server.url}/v1", flush=True)
                print(f"{chat}: {server.url}/", flush=True)
                if str(defaults):
                    print(f"default sampling, by generation_config.json: {defaults}", flush=True)
                run_until_stopped(server)
        finally:
            engine.close()


def _engine(source: Source, config: ServeConfig) -> AnyEngine:
    """The engine with the model on its mesh, compiled."""
    mesh = generation_mesh(config.mesh)
    check_fits(source.config, mesh)
    dtype = default_dtype(config.dtype, mesh.devices.flat[0].platform)
    print(
        f"{source.name}, mesh {mesh_text(mesh.shape)} on {count(mesh.size, 'device')} of "
        f"{len(jax.devices())}, {dtype}",
        file=sys.stderr,
    )

    def progress(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    return start_engine(source, mesh, jnp.dtype(dtype), config.engine, progress)


def serve_command(arguments: Sequence[str]) -> None:
    serve(
        tyro.cli(
            ServeConfig,
            prog="meshwright serve",
            description=serve.__doc__,
            args=arguments,
            config=(tyro.conf.PositionalRequiredArgs, tyro.conf.UseAppendAction),
        )
    )
