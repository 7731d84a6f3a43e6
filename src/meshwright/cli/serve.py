"""`meshwright serve`: settings from the command line, then the server."""

from meshwright.serving import ServeConfig

MOST_USED = (
    "mesh", "host", "port", "api_key_file", "adapters", "engine.max_batch", "engine.max_length",
    "engine.weights", "name", "dtype", "cpu_devices",
)  # fmt: skip


def serve_command(settings: ServeConfig) -> None:
    """Serve a model over HTTP: OpenAI's API, EasyLM's routes and a chat page.

      meshwright serve runs/first --mesh tp=2 --port 8000

    SIGTERM, SIGHUP or Ctrl-C finishes the requests that run and refuses new ones, for
    --limits.shutdown-seconds at most; a second one ends at once.
    """
    from meshwright.serving import serve  # imports jax

    serve(settings)
