"""Start a server: a model behind HTTP, with a chat page, in one process or several."""

import logging
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from meshwright.data import load_chat_template
from meshwright.errors import MeshwrightError, explained, not_installed
from meshwright.hub import MODEL, local_folder
from meshwright.interrupt import signal_calls, termination_calls
from meshwright.launch import (
    EXIT_CODE,
    Follower,
    Leader,
    compare_processes,
    coordinator_store,
    end_process,
    join,
    keep_compiled_programs,
    make_room_for_cpu_collectives,
    open_link,
    simulate_devices,
)
from meshwright.models import default_dtype, serving_of
from meshwright.present import count, mesh_text
from meshwright.serving.abstract_weights import check_fits
from meshwright.serving.adapters import with_adapters, with_slots
from meshwright.serving.defaults import Defaults, defaults_of
from meshwright.serving.engine import Engine
from meshwright.serving.lockstep import serve_follower, serve_leader
from meshwright.serving.replicas import Replicas, start_engine
from meshwright.serving.request import EngineStoppedError
from meshwright.serving.same_settings import settings_facts
from meshwright.serving.settings import ServeConfig
from meshwright.serving.source import Source, chat_folder, generation_mesh, model_source
from meshwright.training.run import print_line


@explained("mw.serve(mw.ServeConfig('runs/first'))")
def serve(config: ServeConfig) -> None:
    """Serve a model over HTTP until a signal ends it: OpenAI's API, EasyLM's routes, a chat page.

    The same call in every process of a server.
    """
    try:
        import meshwright.serving.server  # noqa: F401
    except ImportError as reason:
        raise MeshwrightError(f"{reason}: {not_installed('serve')}") from None
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    for name in ("jax", "absl", "orbax"):  # which say much at this level
        logging.getLogger(name).setLevel(logging.WARNING)
    make_room_for_cpu_collectives()
    keep_compiled_programs()
    if config.cpu_devices is not None:
        simulate_devices(config.cpu_devices)
    local_folder(config.model, MODEL)  # before processes join: others wait minutes, not hours
    joined = join(config.coordinator, config.processes, config.process_id)
    store = coordinator_store()
    with open_link(joined, store) as link:
        source = compare_processes(
            lambda: _source(config), lambda source: settings_facts(config, source), store, joined
        )
        try:
            if isinstance(link, Follower):
                _follow(source, config, link)
            else:
                _answer(source, config, link)
        except EngineStoppedError as reason:  # requests were answered; nothing is left to wait for
            if link is not None:
                link.fail(str(reason))
            end_process(str(reason), EXIT_CODE)


def _source(config: ServeConfig) -> Source:
    folders = config.adapter_folders()
    source = model_source(
        config.model, step=config.step, tokenizer=config.tokenizer, end_token=config.end_token,
        adapter=config.adapter,
    )  # fmt: skip
    serving_of(source.config)  # or an error
    source = with_adapters(source, folders)
    if not with_slots(config.engine, source).max_adapters and config.adapter_loading:
        raise MeshwrightError("--adapter-loading needs --engine.max-adapters, such as 8")
    return source


def _answer(source: Source, config: ServeConfig, link: Leader | None) -> None:
    """Serve clients, in process 0."""
    from meshwright.serving.server import (
        HttpServer,
        Service,
        bind,
        longest_shutdown,
        run_until_stopped,
    )

    defaults = Defaults()
    if config.generation_config == "auto":
        defaults = defaults_of(source.generation_config)
    folder = chat_folder(local_folder(config.model, MODEL))
    template = load_chat_template(folder, config.chat_template)
    keys = config.api_keys()
    if config.host not in ("127.0.0.1", "localhost", "::1") and not keys:
        print_line(
            f"warning: whoever reaches {config.host} can use this server; --api-key-file FILE "
            "makes clients need a key",
            sys.stderr,
        )
    service = Service(None, source, config, template, defaults)

    def progress(text: str) -> None:
        print_line(text, sys.stderr)
        service.starting = text

    seconds = longest_shutdown(config.limits)
    too_long = f"the server did not end within {seconds:g} s of the signal: a step still runs"
    watchdog = threading.Timer(seconds, end_process, (too_long,))
    watchdog.daemon = True

    def announce() -> None:
        chat = "the chat page" + ("" if template else " (no chat template: plain text)")
        print_line(f"{config.served_name} is served at {server.url}/v1")
        print_line(f"{chat}: {server.url}/")
        if str(defaults):
            print_line(f"default sampling, by generation_config.json: {defaults}")

    # before the weights are read, which takes long: clients are told to wait
    with bind(config.host, config.port) as bound, HttpServer(service, bound) as server:
        engine = _engine(source, config, link, progress)
        try:
            service.loaded_engine = engine
            if link is not None:
                link.on_stop = server.stop
            run_until_stopped(server, announce, watchdog.start)
        finally:
            engine.close()
            watchdog.cancel()


def _follow(source: Source, config: ServeConfig, link: Follower) -> None:
    """Compute for process 0 until it ends; SIGTERM, SIGHUP and Ctrl-C are passed on to it."""
    mesh, dtype = _mesh(source, config)
    asked = False

    def ask(*_: object) -> bool:
        nonlocal asked
        if asked:
            return False
        asked = True
        link.ask_to_stop()
        return True

    with termination_calls(ask), signal_calls(signal.SIGINT, ask):
        serve_follower(link, source, mesh, dtype, config.engine)


def _mesh(source: Source, config: ServeConfig) -> tuple[Mesh, Any]:
    mesh = generation_mesh(config.mesh)
    check_fits(source.config, mesh)
    dtype = default_dtype(config.dtype, mesh.devices.flat[0].platform)
    processes = jax.process_count()
    print_line(
        f"{source.name}, mesh {mesh_text(mesh.shape)} on {count(mesh.size, 'device')} of "
        f"{len(jax.devices())}, {dtype}"
        + (f", process {jax.process_index()} of {processes}" if processes > 1 else ""),
        sys.stderr,
    )
    return mesh, jnp.dtype(dtype)


def _engine(
    source: Source, config: ServeConfig, link: Leader | None, progress: Callable[[str], None]
) -> Engine | Replicas:
    """The engine with the model on its mesh, compiled."""
    mesh, dtype = _mesh(source, config)
    if link is None:
        return start_engine(source, mesh, dtype, config.engine, progress)
    engine = serve_leader(link, source, mesh, dtype, config.engine, progress)
    link.on_lost = engine.fail
    return engine
