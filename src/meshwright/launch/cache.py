"""Folders that hold what was compiled, for later processes."""

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """A folder in `$MESHWRIGHT_CACHE`, or in meshwright's part of the user's cache folder."""
    if folder := os.environ.get("MESHWRIGHT_CACHE"):
        return Path(folder) / name
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "meshwright" / name


def keep_compiled_programs() -> None:
    """Turn on jax's persistent compilation cache, unless the user has chosen its folder."""
    import jax

    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder("programs")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
