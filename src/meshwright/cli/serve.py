"""`meshwright serve`: settings from the command line, then the server."""

from collections.abc import Sequence

import tyro

from meshwright.cli.flags import NUMBERS
from meshwright.serving import ServeConfig, serve

_DESCRIPTION = """Serve a model over HTTP: OpenAI's API, EasyLM's routes and a chat page.

meshwright serve runs/first --mesh tp=2 --port 8000

SIGTERM, SIGHUP or Ctrl-C finishes the requests that run and refuses new ones, for
--limits.shutdown-seconds at most; a second one ends at once.
"""


def serve_command(arguments: Sequence[str]) -> None:
    serve(
        tyro.cli(
            ServeConfig,
            prog="meshwright serve",
            description=_DESCRIPTION,
            args=arguments,
            config=(tyro.conf.PositionalRequiredArgs,),
            registry=NUMBERS,
        )
    )
