"""What tests of several processes share."""

import socket


def free_port() -> str:
    """A port nobody listens on, for a coordinator on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])
