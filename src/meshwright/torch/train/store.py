"""Join the processes that torchrun started, and use its store as the coordinator's."""

import datetime
import os

import torch
import torch.distributed as dist

from meshwright.errors import MeshwrightError
from meshwright.launch import CoordinatorLostError, Joined, Store
from meshwright.present import count


def join(timeout_s: float) -> tuple[Joined, Store | None]:
    """Become a process of the run; one that was started alone is a run of one.

    `timeout_s`: for the slowest collective, such as waiting while another process loads.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    cuda = torch.cuda.is_available()
    backend = "nccl" if cuda else "gloo"
    if "RANK" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return Joined(), None
    if cuda:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if local >= torch.cuda.device_count():
            raise MeshwrightError(
                f"process {os.environ['RANK']} is number {local} of its host, counted from 0, and "
                f"the host has {count(torch.cuda.device_count(), 'GPU')}; start one process per GPU"
            )
        torch.cuda.set_device(local)
    store, rank, processes = next(dist.rendezvous("env://"))
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", store),
        rank=rank,
        world_size=processes,
        timeout=timeout,
    )
    if processes == 1:
        return Joined(), None
    # a connection of its own: a thread that waits in one would hold it for all
    return Joined(rank, processes), TorchrunStore(store.clone())


class TorchrunStore:
    """Text by key. The store is torchrun's, which outlives every process of the run."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def get(self, key: str) -> str | None:
        try:
            return self._store.get(key).decode() if self._store.check([key]) else None
        except dist.DistError as reason:
            raise _lost(reason) from None

    def get_all(self, folder: str) -> dict[str, str]:
        try:
            keys = [key for key in self._store.list_keys() if key.startswith(folder)]
            texts = self._store.multi_get(keys) if keys else []
        except dist.DistError as reason:
            raise _lost(reason) from None
        return {key: text.decode() for key, text in zip(keys, texts, strict=True)}

    def put(self, key: str, text: str) -> None:
        try:
            self._store.set(key, text)
        except dist.DistError as reason:
            raise _lost(reason) from None

    def put_once(self, key: str, text: str) -> str:
        try:
            return self._store.compare_set(key, "", text).decode()
        except dist.DistError as reason:
            raise _lost(reason) from None


def _lost(reason: Exception) -> CoordinatorLostError:
    first_line = str(reason).partition("\n")[0]
    return CoordinatorLostError(
        f"torchrun's store does not respond: torchrun has exited, or the network is down "
        f"({first_line})"
    )
