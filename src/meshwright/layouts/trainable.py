"""The trainable subset: which arrays of a model a run trains, by patterns of their paths.

    >>> arrays = {
    ...     "norm": ArraySpec((8,), "norm"),
    ...     "layers": {"wq": ArraySpec((4, 8, 8), "layers embed heads", inputs=1)},
    ... }
    >>> subset = select_trainable(arrays, ["layers/-1/"])
    >>> subset["norm"].trained, subset["layers"]["wq"].trained
    (False, (3,))

A pattern is a regex that is found in a path, as in path rules. An array that stacks layers,
`layers/wq`, also has a path for each layer: `layers/3/wq`, and `layers/-1/wq` from the end.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.layouts.arrays import ArraySpec
from meshwright.layouts.path_rules import PathMatcher
from meshwright.layouts.trees import flatten, flatten_with_paths, path_text


def select_trainable(arrays: Any, patterns: Sequence[str]) -> Any:
    """The tree of ArraySpecs with what is trained: all that a pattern finds; all if there is none.

    A pattern that finds nothing is an error.
    """
    if not patterns:
        return arrays
    try:
        matcher = PathMatcher(patterns)
    except MeshwrightError as mistake:
        raise MeshwrightError(f"trainable: {mistake}") from None
    specs = [(path_text(path), spec) for path, spec in flatten_with_paths(arrays)]
    found: set[int] = set()
    marked = []
    for path, spec in specs:
        matches = matcher.found_in(path)
        found.update(matches)
        trained: bool | tuple[int, ...] = bool(matches)
        by_layer = [(layer, matcher.found_in(one)) for layer, one in _layer_paths(path, spec)]
        found.update(position for _, matches in by_layer for position in matches)
        layers = tuple(sorted({layer for layer, matches in by_layer if matches}))
        if layers and not trained:
            trained = len(layers) == spec.unpadded_shape[0] or layers
        marked.append(dataclasses.replace(spec, trained=spec.trained and trained))
    for position, pattern in enumerate(patterns):
        if position not in found:
            known = [*(path for path, _ in specs), *_last_layer(specs)]
            raise MeshwrightError(
                f"trainable {pattern!r} is found in the path of no array"
                f"{did_you_mean(pattern, known)}; paths are such as {', '.join(known[:3])}, of a "
                f"layer {next(_last_layer(specs), known[0])}"
            )
    return flatten(arrays)[1].unflatten(marked)


def _layer_paths(path: str, spec: ArraySpec) -> Iterator[tuple[int, str]]:
    """Of an array that stacks layers: each layer with its paths, counted from both ends."""
    keys = path.split("/")
    if not spec.is_stacked or "layers" not in keys:
        return
    place, layers = keys.index("layers") + 1, spec.unpadded_shape[0]
    for layer in range(layers):
        for number in (layer, layer - layers):
            yield layer, "/".join([*keys[:place], str(number), *keys[place:]])


def _last_layer(specs: Sequence[tuple[str, ArraySpec]]) -> Iterator[str]:
    """The paths of the arrays of the last layer."""
    for path, spec in specs:
        *_, last = [one for _, one in _layer_paths(path, spec)] or [""]
        if last:
            yield last
