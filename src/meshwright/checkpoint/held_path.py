"""Whether a path still leads to the file or folder that was opened there."""

import errno
import os
from pathlib import Path
from typing import Self


class HeldPath:
    """A file or folder that is kept open, so that no later one gets its inode number.

    After `rm -rf`, `mv` or a changed link, a path leads nowhere or to something else, which must
    not be taken for what was there.

    >>> held = HeldPath(Path("."))
    >>> held.is_there()
    True
    >>> held.close()
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.abspath(path))
        self._descriptor: int | None = os.open(path, os.O_RDONLY)
        self._stat = os.fstat(self._descriptor)

    def is_there(self) -> bool:
        """Whether the path leads to it; True if the disk does not tell."""
        try:
            return os.path.samestat(os.stat(self.path), self._stat)
        except OSError as reason:
            return reason.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ELOOP)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
