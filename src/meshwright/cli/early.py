"""Mistakes of a command line that are named before jax is imported, which takes seconds."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.cli.flags import take_all
from meshwright.hub import check_folder, hub_name

_OWN_AXES = ("audit",)  # of a program whose axes have any names
_GIVE_RULES = {"--rules", "--config", "--plan"}  # that may name axes of their own
_READING = ("serve", "generate", "chat", "eval", "export")  # commands that read weights


def check_mesh(command: str, words: Sequence[str]) -> None:
    """Raise if the text of `--mesh` is no mesh, or that of `--on` no machine."""
    from meshwright.machines import Machine
    from meshwright.meshes import MeshSpec

    for text in take_all(list(words), "--mesh"):
        if text == "auto" or command == "plan":  # whose meshes are limits
            continue
        spec = MeshSpec.parse(text)
        if command not in _OWN_AXES and not _GIVE_RULES & {
            word.partition("=")[0] for word in words
        }:
            spec.with_standard_axes()
    if command == "prove":
        for text in take_all(list(words), "--on"):
            if text != "here":  # which asks jax
                Machine.parse(text)


def check_model(command: str, settings: Any) -> None:
    """Raise if weights are to be read from a path where nothing is."""
    if command not in _READING or _is_one_of_several(settings):
        return
    model = str(getattr(settings, "model", None) or getattr(settings, "run", ""))
    if "/" in model and hub_name(model) is None:  # a word alone may be a preset
        check_folder(Path(model))


def check_data(config: Any) -> None:
    """Raise if a store or file of a run's data does not exist."""
    if _is_one_of_several(config):
        return
    from meshwright.data import EMBEDDED, TokenStore, with_sources

    def check(source: str) -> str:
        if source != EMBEDDED and hub_name(source) is None and not Path(source).exists():
            TokenStore.open(source)  # says what is missing
        return source

    with_sources(config.data, check)


def _is_one_of_several(settings: Any) -> bool:
    """Whether other processes wait for this one: they compare first, and all say what is wrong."""
    by_environment = {"LOCAL_RANK", "JAX_COORDINATOR_ADDRESS"} & os.environ.keys()
    return getattr(settings, "coordinator", None) is not None or bool(by_environment)
