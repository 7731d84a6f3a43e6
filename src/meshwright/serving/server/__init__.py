"""The HTTP server: OpenAI's and EasyLM's routes, metrics, and a chat page."""

from meshwright.serving.server.app import application
from meshwright.serving.server.run import HttpServer, bind, longest_shutdown, run_until_stopped
from meshwright.serving.server.service import Service

__all__ = [
    "HttpServer", "Service", "application", "bind", "longest_shutdown", "run_until_stopped",
]  # fmt: skip
