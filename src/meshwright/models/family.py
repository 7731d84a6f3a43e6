"""Everything the rest of the code knows about a kind of model, as one value."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from meshwright.layouts import Rules
from meshwright.models.huggingface import HfModel
from meshwright.models.work import Stack

if TYPE_CHECKING:
    from meshwright.models.loss import LossSums


@dataclasses.dataclass(frozen=True)
class Serving:
    """What an engine needs for its steps over pages: see serving/programs.py."""

    rules: Callable[..., Rules]
    """(ep=False: whether the mesh has that axis) → how the weights are stored, and how the
    activations of a step are split."""
    weights: Callable[..., Any]
    """(params, config, dtype, release) → weights for steps, their layers in a list."""
    layers: Callable[[Any], int]
    """config → layers that keep keys in pages."""
    state: Callable[..., Any]
    """(pools, PagedTokens, PagedKeys of the encoder) → the state that `forward` takes."""
    prompt_keys: Callable[..., list[Any]]
    """(weights, prompts [n, length], lengths [n], config, Compute) → keys and values of each layer.

    They are [n, length, kv_heads, head_dim] each: those of an encoder's output, else the prompts'
    own, computed with context parallelism."""
    adapter: Callable[[Any], list[Any]] | None = None
    """The factors of an adapter of all matrices → those of each layer, as `weights` has these; None
    if adapters are served merged alone."""
    decoder_prompt: Callable[[Any, tuple[int, ...]], tuple[int, ...]] = lambda config, prompt: (
        prompt
    )
    """(config, prompt) → the tokens that the decoder begins with."""
    biased: bool = False
    """Whether attention to the decoder's own tokens adds a bias to scores."""
    window: Callable[[Any], int | None] = lambda config: None
    """config → the sliding window of some layer, None if none has one."""
    softcapped: Callable[[Any], bool] = lambda config: False
    """config → whether some layer caps scores."""
    sinks: Callable[[Any], bool] = lambda config: False
    """config → whether attention has sinks."""


@dataclasses.dataclass(frozen=True)
class HuggingFace:
    """Folders that transformers reads and writes."""

    architectures: Mapping[str, str]  # to model_type
    read_config: Callable[..., Any]  # a config.json, its folder or its fields → config
    write_config: Callable[[Any], dict[str, Any]]
    model: Callable[[Any], HfModel]
    """config → the arrays and files of a folder."""


@dataclasses.dataclass(frozen=True)
class ModelFamily:
    """One kind of model: a config type, its arrays, rules, forward pass and file formats.

    Only `models/<family>/` and the registry name a concrete family. `config` below is an instance
    of the family's config type; it has at least `vocab`, `max_seq`, `hf_config`, `heads`,
    `kv_heads` and `head_dim`.
    """

    name: str
    config: type[Any]
    presets: Mapping[str, Any]
    arrays: Callable[..., Any]
    """(config, dtype=float32, vocab=None) → tree of ArraySpecs; vocab: padded, in memory."""
    rules: Callable[..., Rules]
    """(sp=False, sequence_parallel=False, ep=False) → the standard rules, on the axes dp, fsdp and
    tp, and on sp and ep where these are True."""
    t5x_rules: Callable[[int, int], Rules]
    batch_fields: tuple[str, ...]
    """The arrays of a batch, each [micro-batches, batch, length]."""
    objectives: tuple[str, ...]
    """Training objectives (see data/objectives.py), the default first."""
    loss: "Callable[..., LossSums]"
    """(params, batch, scale, config, compute, LossConfig) → LossSums of a micro-batch."""
    forward: Callable[..., Any]
    """(params, batch, config, compute, state=None) → hidden [batch, length, embed], state.

    One function for training (no state), prefill and decode: see models/states.py."""
    lm_head: Callable[..., Any]
    """(params, config) → LmHead."""
    sequence_split: Callable[..., Any]
    """(config, activation layouts, mesh shape, length) → how attention is split."""
    remat: Mapping[str, frozenset[str]]
    """Remat policies: the names of the activations that each saves."""
    work: Callable[[Any], tuple[Stack, ...]]
    """Of a config: its stacks of layers, the one before the LM head last."""
    flops: Callable[..., float]
    """(config, length of each batch field) → FLOPs of a training step for one example.

    A family with `keys_seen` takes that as a third argument."""
    split_dims: Mapping[str, str]
    """Sizes of a config that the mesh must divide → the dim of each; the vocabulary is padded."""
    override: Callable[[Any, Mapping[str, str], int], Any]
    """(config, changes by name, sequence length) → config with these changes."""
    to_dict: Callable[[Any], dict[str, Any]]
    from_dict: Callable[[Mapping[str, Any]], Any]
    hugging_face: HuggingFace
    log_probs: Callable[..., Any] | None = None
    """(params, batch, config, compute, LossConfig) → log-probabilities of the targets, float32.

    They are [batch, length], 0 where there is no target. None: it trains on no pairs of answers."""
    serving: Serving | None = None
    """None: it cannot generate text."""
    longer: Callable[[Any, int], tuple[str, ...]] = lambda config, seq: ()
    """(config, sequence length) → changes for `override` by which positions reach so far.

    Empty where they cannot."""
    keys_seen: Callable[[Any, Mapping[str, Any]], Any] | None = None
    """(config, batch) → keys that a query attends to within its document and window, on average.

    None, of the function or from it: sequences are not packed, and `lengths` say it."""
