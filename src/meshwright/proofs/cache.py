"""Results of compiles, kept by content: what was asked, of which source, by which compiler."""

import hashlib
import json
from pathlib import Path
from typing import Any

import meshwright

# what decides the compiled step
_PARTS = (
    "machines/**/*.py", "meshes/**/*.py", "layouts/**/*.py", "ops/**/*.py", "models/**/*.py",
    "training/**/*.py", "proofs/child.py", "proofs/target.py", "arithmetic.py", "errors.py",
)  # fmt: skip


def request_key(request: dict[str, Any], compiler: str) -> str:
    """Equal requests of equal source for an equal compiler have equal keys."""
    digest = hashlib.sha256(json.dumps([request, compiler], sort_keys=True).encode())
    root = Path(meshwright.__file__).parent
    for part in _PARTS:
        for file in sorted(root.glob(part)):
            digest.update(str(file.relative_to(root)).encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:32]
