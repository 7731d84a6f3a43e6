"""What a run is, written into its folder for whoever reads it later."""

import json
from pathlib import Path
from typing import Any

from meshwright.files import write_whole


def description_files(
    settings: dict[str, Any], about: dict[str, Any], tokenizer: dict[str, Any]
) -> dict[str, str]:
    """config.json (all settings), run.json (what the page shows first), tokenizer_state.json."""
    files = {"config.json": settings, "run.json": about, "tokenizer_state.json": tokenizer}
    return {name: json.dumps(data, indent=2) + "\n" for name, data in files.items()}


def write_description(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        write_whole(folder / name, text)
