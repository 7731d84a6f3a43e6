"""Tell all processes whether one of them failed, so that none waits forever.

One process notices a failure: its disk is full, or a file it reads is damaged. The others would
continue into a collective and hang. So each process reports its result, process 0 collects the
reports, and all receive the same verdict. This uses the key-value store of jax.distributed and no
device, so it is safe in a background thread during training.
"""

import itertools
import json
from typing import Any

import jax

from meshwright.errors import MeshwrightError

TIMEOUT = 1800.0  # seconds; the slowest save or read of one process

_instances = itertools.count()


class Channel:
    """A numbered series of agreements, the same in every process.

    >>> Channel("example").agree("")
    ''
    """

    def __init__(self, name: str) -> None:
        # processes open their channels in the same order, so the numbers match
        self._prefix = f"meshwright/{name}/{next(_instances)}"
        self._number = itertools.count()

    def agree(self, problem: str, about: str = "", timeout: float = TIMEOUT) -> str:
        """The problem of the first process that has one, "" if none has. Every process must call.

        `about` names the operation; a difference between processes is a problem too.
        """
        if jax.process_count() == 1:
            return problem
        client = _client()
        number = next(self._number)
        key = f"{self._prefix}/{number}"
        milliseconds = int(timeout * 1000)
        process = jax.process_index()
        try:
            if process:
                client.key_value_set(f"{key}/{process}", json.dumps([problem, about]))
                return client.blocking_key_value_get(f"{key}/verdict", milliseconds)
            reports = [(problem, about)]
            for other in range(1, jax.process_count()):
                text = client.blocking_key_value_get(f"{key}/{other}", milliseconds)
                reports.append(tuple(json.loads(text)))
            verdict = _verdict(reports)
            client.key_value_set(f"{key}/verdict", verdict)
            if number > 1:  # all have read it, since they have reported twice after it
                client.key_value_delete(f"{self._prefix}/{number - 2}")
            return verdict
        except jax.errors.JaxRuntimeError as error:
            raise _timed_out(timeout, error) from None

    def from_first(self, text: str, timeout: float = TIMEOUT) -> str:
        """The text of process 0, in every process; used for what only process 0 sees on disk yet.

        Every process must call.
        """
        if jax.process_count() == 1:
            return text
        key = f"{self._prefix}/{next(self._number)}/first"
        if jax.process_index() == 0:
            _client().key_value_set(key, text)
            return text
        try:
            return str(_client().blocking_key_value_get(key, int(timeout * 1000)))
        except jax.errors.JaxRuntimeError as error:
            raise _timed_out(timeout, error) from None

    def check(self, problem: str, about: str = "") -> None:
        """Raise the agreed problem, if there is one, in every process."""
        if verdict := self.agree(problem, about):
            raise MeshwrightError(verdict)


def _verdict(reports: list[tuple[str, str]]) -> str:
    for process, (problem, about) in enumerate(reports):
        if problem:
            # a problem agreed on before already names its process
            return problem if problem.startswith("process ") else f"process {process}: {problem}"
        if about != reports[0][1]:
            first = reports[0][1]
            return f"process 0 is at {first}, process {process} at {about}; all must do the same"
    return ""


def _timed_out(timeout: float, error: Exception) -> MeshwrightError:
    return MeshwrightError(
        f"process {jax.process_index()} waited {timeout:g} s for the other processes at a "
        f"checkpoint; one is dead or hangs ({str(error).splitlines()[0][:200]})"
    )


def _client() -> Any:
    from jax._src import distributed  # private, as in Orbax: jax has no public name for it

    client = distributed.global_state.client
    if client is None:
        raise MeshwrightError(
            f"{jax.process_count()} processes, but jax.distributed.initialize() was not called; "
            "checkpoints of several processes need it"
        )
    return client
