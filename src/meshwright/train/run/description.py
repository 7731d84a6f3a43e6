"""What a run is, written into its folder for whoever reads it later."""

import json
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError


def write_description(
    folder: Path, settings: dict[str, Any], about: dict[str, Any], tokenizer: dict[str, Any]
) -> None:
    """config.json (all settings), run.json (what the page shows first), tokenizer_state.json."""
    _write(folder / "config.json", settings)
    _write(folder / "run.json", about)
    _write(folder / "tokenizer_state.json", tokenizer)


def _write(file: Path, data: Any) -> None:
    """Whole or not at all."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_name(f".{file.name}.new")
        new.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        new.replace(file)
    except OSError as reason:
        raise MeshwrightError(f"{str(file)!r} cannot be written: {reason.strerror}") from None
