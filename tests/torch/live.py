"""The bytes of all tensors that live inside a `with`, and the most there were at a time."""

import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Counts storages as operators make and use them; FSDP2 resizes some, which is seen too."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._sizes: dict[int, int] = {}
        self._references: dict[int, Any] = {}
        self._resize = torch.UntypedStorage.resize_

    def add(self, tensor: torch.Tensor) -> None:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.is_meta:
            return  # no bytes behind it: asked for its strides
        storage = local.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            self._references[key] = weakref.ref(storage, lambda _: self._drop(key))
        self._change(key, storage.nbytes())

    def _change(self, key: int, size: int) -> None:
        if key in self._sizes:
            self.now += size - self._sizes[key]
            self._sizes[key] = size
            self.most = max(self.most, self.now)

    def _drop(self, key: int) -> None:
        self._change(key, 0)
        self._sizes.pop(key, None)
        self._references.pop(key, None)

    def __enter__(self) -> "Live":
        resize = self._resize

        def resize_(storage: Any, size: int) -> Any:
            found = resize(storage, size)
            self._change(storage._cdata, storage.nbytes())
            return found

        torch.UntypedStorage.resize_ = resize_
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again, as the operators on local tensors
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((found, args)):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor)
        return found
