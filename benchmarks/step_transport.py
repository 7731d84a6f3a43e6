"""How long a step's plan takes from process 0 to another process, by each way to send it.

    python benchmarks/step_transport.py

Two processes of one machine with one CPU device each. Columns: milliseconds that process 0 is busy,
and from its first instruction until the other process has the bytes; median and 99th percentile of
plans sent 5 ms apart. `behind` is the same while a device step of 50 ms runs, which the plan of the
next step should not wait for.
"""

import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

MESSAGES = 200
SIZES = {"4 KiB": 4096, "64 KiB": 65536}
WAYS = ("TCP", "key-value store", "broadcast_one_to_all")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def received(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        data += sock.recv(size - len(data))
    return bytes(data)


def exchange(way: str, process: int, port: int) -> Callable[[int, Any], Any]:
    """A function that sends plan `number` in process 0, and returns it in process 1."""
    from jax._src.distributed import global_state
    from jax.experimental import multihost_utils

    client: Any = global_state.client
    if way == "broadcast_one_to_all":
        return lambda number, plan: np.asarray(multihost_utils.broadcast_one_to_all(plan))
    if way == "key-value store":

        def through_store(number: int, plan: Any) -> Any:
            if process == 0:
                return client.key_value_set_bytes(f"plan/{number}", plan.tobytes())
            data = client.blocking_key_value_get_bytes(f"plan/{number}", 60_000)
            return np.frombuffer(data, np.int32)

        return through_store
    if process == 0:
        with socket.create_server(("127.0.0.1", port)) as server:
            sock, _ = server.accept()
    else:
        while True:
            try:
                sock = socket.create_connection(("127.0.0.1", port))
                break
            except ConnectionRefusedError:
                time.sleep(0.1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def through_socket(number: int, plan: Any) -> Any:
        if process == 0:
            return sock.sendall(struct.pack("<I", plan.nbytes) + plan.tobytes())
        (size,) = struct.unpack("<I", received(sock, 4))
        return np.frombuffer(received(sock, size), np.int32)

    return through_socket


def measure(process: int, coordinator: int, port: int) -> None:
    import jax
    import jax.numpy as jnp

    from meshwright.launch import coordinator_store, join

    jax.config.update("jax_platforms", "cpu")
    join(f"127.0.0.1:{coordinator}", 2, process)
    store = coordinator_store()
    assert store is not None
    mesh = jax.make_mesh((2,), ("dp",))
    split, whole = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in (["dp"], []))
    x = jax.jit(lambda: jnp.ones((2, 256, 256)), out_shardings=split)()
    loops = {"idle": 0}

    def step(x: Any, count: Any) -> Any:
        turn = jax.lax.fori_loop(0, count, lambda _, y: jnp.tanh(y @ y), x)
        return turn.sum()

    run = jax.jit(step, out_shardings=whole)
    run(x, 10).block_until_ready()
    began = time.perf_counter()
    run(x, 200).block_until_ready()
    agreed = store.put_once("loops", str(int(200 * 0.05 / (time.perf_counter() - began)) + 1))
    loops["behind"] = int(agreed)
    number = 0
    for way in WAYS:
        send = exchange(way, process, port)
        for state, count in loops.items():
            for name, size in SIZES.items():
                busy, there = [], []
                for _ in range(MESSAGES if state == "idle" else MESSAGES // 5):
                    pending = run(x, count) if count else None
                    number += 1
                    plan = np.zeros(size // 4, np.int32)
                    began = time.monotonic()
                    plan[:2] = np.frombuffer(struct.pack("<d", began), np.int32)
                    got = send(number, plan)
                    now = time.monotonic()
                    if process:
                        got = np.ascontiguousarray(got[:2]).tobytes()
                        there.append(now - struct.unpack("<d", got)[0])
                    busy.append(now - began)
                    if pending is not None:
                        pending.block_until_ready()
                    if process == 0:
                        time.sleep(0.005)
                if process:
                    store.put(f"there/{way}/{state}/{name}", told(there[5:]))
                else:
                    while (other := store.get(f"there/{way}/{state}/{name}")) is None:
                        time.sleep(0.05)
                    print(f"| {way} | {state} | {name} | {told(busy[5:])} | {other} |", flush=True)


def told(seconds: list[float]) -> str:
    p99 = sorted(seconds)[int(0.99 * len(seconds))]
    return f"{1e3 * statistics.median(seconds):.2f} / {1e3 * p99:.2f}"


def main() -> None:
    ports = [str(free_port()), str(free_port())]
    print(
        "| way | device | plan | process 0 busy, ms | until received, ms |\n|---|---|---|---|---|"
    )
    processes = [
        subprocess.Popen([sys.executable, __file__, str(process), *ports]) for process in range(2)
    ]
    sys.exit(max(process.wait() for process in processes))


if __name__ == "__main__":
    measure(*map(int, sys.argv[1:])) if len(sys.argv) > 1 else main()
