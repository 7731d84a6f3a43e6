"""The key-value store of the coordinator of a multi-process run.

    store = coordinator_store()           # None in a run of one process
    store.put_once("meshwright/stop/0", "41")

jax has no public API for it. Only the functions at the end use the private one.
"""

from typing import Any, Protocol

from meshwright.errors import MeshwrightError


class CoordinatorLostError(MeshwrightError):
    """The coordinator no longer responds."""


class Store(Protocol):
    """Text by key, visible to every process."""

    def get(self, key: str) -> str | None:
        """The text of a key; None if there is none."""

    def get_all(self, folder: str) -> dict[str, str]:
        """Every key that starts with `folder`, and its text."""

    def put(self, key: str, text: str) -> None:
        """Write, replacing any previous text."""

    def put_once(self, key: str, text: str) -> str:
        """Write unless the key exists; returns the text of the key."""


def coordinator_store() -> Store | None:
    """The store of this run; None for a single process."""
    client = _client()
    return None if client is None else CoordinatorStore(client)


class CoordinatorStore:
    """The store behind jax.distributed. A call takes 0.3 ms on one machine."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def get(self, key: str) -> str | None:
        try:
            return str(self._client.key_value_try_get(key))
        except RuntimeError as reason:
            if "NOT_FOUND" in str(reason):
                return None
            raise _lost(reason) from None

    def get_all(self, folder: str) -> dict[str, str]:
        try:
            return dict(self._client.key_value_dir_get(folder))
        except RuntimeError as reason:
            raise _lost(reason) from None

    def put(self, key: str, text: str) -> None:
        try:
            self._client.key_value_set(key, text, allow_overwrite=True)
        except RuntimeError as reason:
            raise _lost(reason) from None

    def put_once(self, key: str, text: str) -> str:
        try:
            self._client.key_value_set(key, text)
        except RuntimeError as reason:
            if "ALREADY_EXISTS" not in str(reason):
                raise _lost(reason) from None
            return self.get(key) or text
        return text


def _lost(reason: Exception) -> CoordinatorLostError:
    first_line = str(reason).partition("\n")[0]
    return CoordinatorLostError(
        "the coordinator (process 0) does not respond: it has exited, or the network is "
        f"down ({first_line})"
    )


def coordinator_host() -> str:
    """The address of process 0, as the other processes reach it."""
    from jax._src.distributed import global_state  # private, as in `_client`

    return str(global_state.coordinator_address).rpartition(":")[0].strip("[]")


def _client() -> Any | None:
    # private, the same in jax 0.10 to 0.12: tests/launch/test_coordinator.py holds it
    from jax._src.distributed import global_state

    return global_state.client
