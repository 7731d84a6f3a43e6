"""The HTTP server: OpenAI's and EasyLM's routes, metrics, and a chat page."""

from meshwright.serve.server.app import application
from meshwright.serve.server.run import HttpServer, bind, longest_shutdown, run_until_stopped
from meshwright.serve.server.service import Service

__all__ = [
    "HttpServer", "Service", "application", "bind", "longest_shutdown", "run_until_stopped",
]  # fmt: skip
