"""All processes learn whether one of them failed, so that none waits for ever.

A failure is seen by one process: its disk is full, a file it reads is damaged. The others would go
on into a collective and hang. So each process says how it went, process 0 collects, and all get the
same verdict. It goes through the key-value store of jax.distributed and touches no device: safe in
a background thread while training runs.
"""

import itertools
import json
from typing import Any

import jax

from meshwright.errors import MeshwrightError

TIMEOUT = 1800.0  # seconds; the slowest save or read of one process

_instances = itertools.count()


class Channel:
    """A line of agreements, the same in every process; each has the next number.

    >>> Channel("example").agree("")
    ''
    """

    def __init__(self, name: str) -> None:
        # processes open their channels in the same order, so the numbers match
        self._prefix = f"meshwright/{name}/{next(_instances)}"
        self._number = itertools.count()

    def agree(self, problem: str, about: str = "", timeout: float = TIMEOUT) -> str:
        """The problem of the lowest process that has one, "" if none has. Every process must call.

        `about` says what this is about; that it is not the same everywhere is a problem too.
        """
        if jax.process_count() == 1:
            return problem
        client = _client()
        number = next(self._number)
        here = f"{self._prefix}/{number}"
        milliseconds = int(timeout * 1000)
        process = jax.process_index()
        try:
            if process:
                client.key_value_set(f"{here}/{process}", json.dumps([problem, about]))
                return client.blocking_key_value_get(f"{here}/verdict", milliseconds)
            said = [(problem, about)]
            for other in range(1, jax.process_count()):
                text = client.blocking_key_value_get(f"{here}/{other}", milliseconds)
                said.append(tuple(json.loads(text)))
            verdict = _verdict(said)
            client.key_value_set(f"{here}/verdict", verdict)
            if number > 1:  # all have read it: they have spoken twice since
                client.key_value_delete(f"{self._prefix}/{number - 2}")
            return verdict
        except jax.errors.JaxRuntimeError as error:
            raise _timed_out(timeout, error) from None

    def from_first(self, text: str, timeout: float = TIMEOUT) -> str:
        """The text of process 0, in every process: what it found on a disk that others see later.

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
        """`agree`, and the problem, if there is one, as an error in every process."""
        if verdict := self.agree(problem, about):
            raise MeshwrightError(verdict)


def _verdict(said: list[tuple[str, str]]) -> str:
    for process, (problem, about) in enumerate(said):
        if problem:
            # one that was agreed on before already says whose it is
            return problem if problem.startswith("process ") else f"process {process}: {problem}"
        if about != said[0][1]:
            return (
                f"process 0 is at {said[0][1]}, process {process} at {about}; all must do the same"
            )
    return ""


def _timed_out(timeout: float, error: Exception) -> MeshwrightError:
    return MeshwrightError(
        f"process {jax.process_index()} waited {timeout:g} s for the other processes at a "
        f"checkpoint; one is dead or hangs ({str(error).splitlines()[0][:200]})"
    )


def _client() -> Any:
    from jax._src import distributed  # as Orbax does: jax has no public name for it

    client = distributed.global_state.client
    if client is None:
        raise MeshwrightError(
            f"{jax.process_count()} processes, but jax.distributed.initialize() was not called; "
            "checkpoints of several processes need it"
        )
    return client
