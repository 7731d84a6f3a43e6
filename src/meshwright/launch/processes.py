"""Join a run of several processes: the same command in each, with its own process id.

    join("10.0.0.1:1234", processes=4, process_id=2)   # explicit
    join()                                             # from JAX_COORDINATOR_ADDRESS, …
    join("auto")                                       # detected: Slurm, Kubernetes, Cloud TPU

Call it before anything uses a device.
"""

import dataclasses
import errno
import os
import socket
import threading
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.launch.coordinator import coordinator_store

VARIABLES = {
    "coordinator": "JAX_COORDINATOR_ADDRESS",
    "processes": "JAX_NUM_PROCESSES",
    "process_id": "JAX_PROCESS_ID",
}
FLAGS = {
    "coordinator": "--coordinator HOST:PORT",
    "processes": "--processes N",
    "process_id": "--process-id I",
}
PATIENCE_S = 300.0


@dataclasses.dataclass(frozen=True)
class Joined:
    """The index of this process, and the number of processes."""

    process_id: int = 0
    processes: int = 1


def join(
    coordinator: str | None = None,
    processes: int | None = None,
    process_id: int | None = None,
    *,
    patience_s: float = PATIENCE_S,
) -> Joined:
    """Join the run; missing values come from the environment. A single process joins nothing.

    `patience_s`: how long to wait for the coordinator and for missing processes.
    """
    if coordinator == "auto":
        return _join_detected(processes, process_id, patience_s)
    given = _with_environment(coordinator, processes, process_id)
    wanted = _checked(**given)
    if wanted.processes == 1:
        return wanted
    import jax

    if jax.distributed.is_initialized():
        return _joined_before(wanted)
    if wanted.process_id == 0:
        _check_port(given["coordinator"])
    _initialize(
        patience_s,
        wanted,
        coordinator_address=given["coordinator"],
        num_processes=wanted.processes,
        process_id=wanted.process_id,
        cluster_detection_method="deactivate",  # explicit values win
    )
    _agree_on_the_number(wanted)
    return wanted


def _with_environment(
    coordinator: str | None, processes: int | None, process_id: int | None
) -> dict[str, Any]:
    given: dict[str, Any] = {
        "coordinator": coordinator,
        "processes": processes,
        "process_id": process_id,
    }
    for name, variable in VARIABLES.items():
        text = os.environ.get(variable, "").strip()
        if given[name] is not None or not text:
            continue
        if name != "coordinator" and not (text.isascii() and text.isdigit()):
            raise MeshwrightError(f"{variable}={text!r} is not a whole number from 0")
        given[name] = text if name == "coordinator" else int(text)
    return given


def _checked(coordinator: str | None, processes: int | None, process_id: int | None) -> Joined:
    if processes is not None and processes < 1:
        raise MeshwrightError(f"--processes {processes}: a run has at least one process")
    if processes == 1 and process_id in (None, 0):
        return Joined()
    given = {"coordinator": coordinator, "processes": processes, "process_id": process_id}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == 3:
        return Joined()
    if missing:
        have = " and ".join(f"{name}={value}" for name, value in given.items() if value is not None)
        lack = " and ".join(f"{FLAGS[name]} (or {VARIABLES[name]})" for name in missing)
        raise MeshwrightError(
            f"several processes need coordinator, processes and process_id; {have} was given: add "
            f"{lack}. On Slurm, Kubernetes or a Cloud TPU, --coordinator auto finds all three"
        )
    assert coordinator is not None
    assert processes is not None
    assert process_id is not None
    if not 0 <= process_id < processes:
        raise MeshwrightError(
            f"--process-id {process_id} with --processes {processes}: the processes are numbered "
            f"0 to {processes - 1}"
        )
    _address(coordinator)
    return Joined(process_id, processes)


def _address(coordinator: str) -> tuple[str, int]:
    host, _, port = coordinator.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise MeshwrightError(
            f"--coordinator {coordinator!r} is not HOST:PORT; write the address of process 0 and a "
            "port that is free there: 10.0.0.1:1234. Or 'auto'"
        )
    return host.strip("[]"), int(port)


def _check_port(coordinator: str) -> None:
    # jax may crash on a port that it cannot have
    _, port = _address(coordinator)
    family = socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET
    try:
        with socket.socket(family) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(("", port))
            trial.listen()
    except OSError as reason:
        if reason.errno in (errno.EADDRINUSE, errno.EACCES):
            raise MeshwrightError(
                f"process 0 cannot listen at port {port} of {coordinator} ({reason.strerror}): "
                "choose another, the same in every process"
            ) from None


def _joined_before(wanted: Joined) -> Joined:
    import jax

    joined = Joined(jax.process_index(), jax.process_count())
    if joined != wanted:
        raise MeshwrightError(
            f"this process has joined a run as process {joined.process_id} of {joined.processes}; "
            f"it cannot become process {wanted.process_id} of {wanted.processes}"
        )
    return joined


def _join_detected(processes: int | None, process_id: int | None, patience_s: float) -> Joined:
    if processes is not None or process_id is not None:
        raise MeshwrightError(
            "--coordinator auto detects the number of processes and the process id: leave out "
            "--processes and --process-id"
        )
    import jax

    if not jax.distributed.is_initialized():
        _initialize(patience_s, None)
    return Joined(jax.process_index(), jax.process_count())


def _initialize(patience_s: float, wanted: Joined | None, **arguments: Any) -> None:
    import jax

    # its own service would handle SIGTERM, and the run could not save
    config: Any = jax.config
    config.update("jax_enable_preemption_service", False)
    if config.jax_cpu_collectives_implementation in (None, "none"):
        config.update("jax_cpu_collectives_implementation", "gloo")
    failures: list[Exception] = []

    def connect() -> None:
        try:
            # at its own timeout jax aborts the process with a C++ trace, so ours must be shorter
            jax.distributed.initialize(**arguments, initialization_timeout=int(patience_s) + 3600)
        except Exception as reason:  # reported below
            failures.append(reason)

    # in a thread, so that this one can stop waiting
    thread = threading.Thread(target=connect, name="join", daemon=True)
    thread.start()
    thread.join(patience_s)
    if thread.is_alive():
        raise MeshwrightError(_nobody_came(patience_s, wanted, arguments))
    if failures:
        raise _explained(failures[0], wanted, arguments) from failures[0]


def _nobody_came(patience_s: float, wanted: Joined | None, arguments: dict[str, Any]) -> str:
    if wanted is None:
        return f"jax found a cluster, but not all of its processes joined within {patience_s:g} s"
    address = arguments["coordinator_address"]
    if wanted.process_id:
        try:
            socket.create_connection(_address(address), timeout=5).close()
        except OSError as reason:
            return (
                f"the coordinator {address} could not be reached in {patience_s:g} s "
                f"({reason.strerror or reason}): is process 0 running there, and is the port open?"
            )
    return (
        f"not all {wanted.processes} processes joined {address} within {patience_s:g} s: "
        f"start the same command {wanted.processes} times, with --process-id 0 to "
        f"{wanted.processes - 1}, each once"
    )


def _explained(
    reason: Exception, wanted: Joined | None, arguments: dict[str, Any]
) -> MeshwrightError:
    text = str(reason).partition("\n")[0]
    if "before any JAX" in text:
        return MeshwrightError(
            "join a run of several processes before anything uses a device: jax has already "
            "initialized its devices"
        )
    if wanted is None:
        return MeshwrightError(
            f"--coordinator auto found no Slurm, Open MPI, Kubernetes or Cloud TPU here ({text}); "
            f"give {', '.join(FLAGS.values())}"
        )
    return MeshwrightError(f"joining {arguments['coordinator_address']} failed: {text}")


def _agree_on_the_number(wanted: Joined) -> None:
    store = coordinator_store()
    assert store is not None
    agreed = store.put_once("meshwright/processes", str(wanted.processes))
    if agreed != str(wanted.processes):
        raise MeshwrightError(
            f"--processes {wanted.processes} was given here and --processes {agreed} in another "
            "process: every process needs the same number"
        )
