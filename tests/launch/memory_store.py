"""A store in memory, for processes that are threads or simulated in one."""

import threading


class MemoryStore(dict[str, str]):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def get_all(self, folder: str) -> dict[str, str]:
        with self.lock:
            return {key: text for key, text in self.items() if key.startswith(folder)}

    def put(self, key: str, text: str) -> None:
        with self.lock:
            self[key] = text

    def put_once(self, key: str, text: str) -> str:
        with self.lock:
            return self.setdefault(key, text)
