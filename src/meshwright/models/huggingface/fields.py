"""The fields of a Hugging Face config.json: read, checked, and those that matter to no model.

A field that a family does not know is an error: weights trained with it would give other logits.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.files import not_a_model
from meshwright.hub import CONFIG, local_folder

SPECIAL_TOKENS = frozenset({"bos_token_id", "eos_token_id", "pad_token_id"})
# what to do about quantization_config, and about such weights
QUANTIZED = "the weights are quantized: take the bfloat16 or float16 model"
SOURCE = "_name_or_path"  # the folder a config.json was read from; not written again

# what a training run of ours, a tokenizer or a sampler decides, or what only says how to compute
HARMLESS = SPECIAL_TOKENS | frozenset(
    {
        "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_num_labels",
        SOURCE, "attn_implementation", "cls_token_id", "decoder_start_token_id", "dtype",
        "finetuning_task", "id2label", "is_decoder", "label2id", "max_sequence_length",
        "name_or_path", "num_labels", "output_attentions", "output_hidden_states", "prefix",
        "problem_type", "return_dict", "sep_token_id", "task_specific_params", "tf_legacy_loss",
        "tokenizer_class", "torch_dtype", "torchscript", "transformers.js_config",
        "transformers_version", "unk_token_id", "unsloth_fixed", "unsloth_version",
        "use_bfloat16", "use_cache",
        # initializers: not needed where weights are read; ours are in arrays.py
        "initializer_range",
        # matmuls cut in pieces, with the same sum
        "pretraining_tp",
        # sampling, from before generation_config.json
        "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample",
        "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty",
        "forced_bos_token_id", "forced_eos_token_id", "length_penalty", "max_length",
        "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
        "num_return_sequences", "output_scores", "remove_invalid_values", "repetition_penalty",
        "return_dict_in_generate", "suppress_tokens", "temperature", "top_k", "top_p",
        "typical_p",
    }
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class KnownFields:
    """The fields that a family honours; `only`: with these values alone, and what to do else."""

    honoured: frozenset[str]
    only: Mapping[str, tuple[Any, ...]]
    what_to_do: Mapping[str, str] = dataclasses.field(default_factory=dict)
    harmless: frozenset[str] = HARMLESS


def check_fields(fields: Mapping[str, Any], known: KnownFields, where: str) -> None:
    """An error for each field that is not honoured, all in one message."""
    problems = []
    for field, value in fields.items():
        if field in known.only:
            if not any(value == allowed for allowed in known.only[field]):
                allowed = " or ".join(repr(value) for value in known.only[field])
                problem = f"{field}={short(value)} is not honoured, only {allowed}"
                what = known.what_to_do.get(field)
                problems.append(problem if what is None else f"{problem} ({what})")
        elif field not in known.honoured | known.harmless:
            hint = did_you_mean(field, known.honoured)
            close = hint if "did you mean" in hint else ""
            problems.append(f"{field}={short(value)} is not a field this model honours{close}")
    if problems:
        raise MeshwrightError(
            f"{where}: {'; '.join(problems)}. If the model's logits do not depend on it, remove it "
            "from config.json"
        )


def read_hf_config(
    source: str | os.PathLike[str] | Mapping[str, Any],
) -> tuple[dict[str, Any], str]:
    """The fields of a config.json, and how to name it in a message."""
    if isinstance(source, Mapping):
        try:
            return json.loads(json.dumps(dict(source))), "config"
        except (TypeError, ValueError, RecursionError) as error:
            raise MeshwrightError(f"the config is not what JSON can say: {error}") from None
    if not isinstance(source, str | os.PathLike):
        raise MeshwrightError(
            f"{short(source)} is not a Hugging Face config; give a path to config.json, its folder "
            "or a dict"
        )
    path = local_folder(source, CONFIG)
    try:
        path = path / "config.json" if path.is_dir() else path
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        hint = "give a path to a Hugging Face config.json, or to its folder"
        if path.parent.is_dir() and path.name == "config.json":
            hint = not_a_model(path.parent)
        raise MeshwrightError(f"{path} is not there; {hint}") from None
    except OSError as error:
        raise MeshwrightError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # JSON, its encoding, or a null byte in the path
        raise MeshwrightError(
            f"{path} is not readable JSON: {error}; give a path to config.json, or to its folder"
        ) from None
    if not isinstance(fields, dict):
        raise MeshwrightError(f"{path} holds {short(fields)}; a config.json is a JSON object")
    if (path.parent / "checkpoints").is_dir() and not fields.keys() & {"architectures", SOURCE}:
        raise MeshwrightError(
            f"{path.parent} is a run, not a Hugging Face folder; make one of it: meshwright export "
            f"{path.parent} FOLDER"
        )
    return fields, str(path)


def remembered(fields: Mapping[str, Any], file: Path | None) -> dict[str, Any]:
    """The fields for a config to keep, with the folder they are from."""
    kept = {name: value for name, value in fields.items() if name != SOURCE}
    return kept if file is None else kept | {SOURCE: str(file.absolute().parent)}


def short(value: Any) -> str:
    """A value, cut to what fits in a message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def whole(fields: Mapping[str, Any], name: str, where: str, default: int | None = None) -> int:
    """A whole number from 1; absent or null is the default, and without one an error."""
    value = fields.get(name)
    if value is None:
        if default is None:
            raise MeshwrightError(f"{where}: {name} is missing; it must be a whole number from 1")
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise MeshwrightError(f"{where}: {name}={short(value)} must be a whole number from 1")
    return value


def number(fields: Mapping[str, Any], name: str, where: str, default: float | None = None) -> float:
    """A number above 0; absent or null is the default, and without one an error."""
    value = fields.get(name)
    if value is None:
        if default is None:
            raise MeshwrightError(f"{where}: {name} is missing; it must be a number above 0")
        return default
    # 1e30: what is larger is a mistake, and would not survive as a float32
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < 1e30:
        raise MeshwrightError(f"{where}: {name}={short(value)} must be a number above 0")
    return float(value)


def flag(fields: Mapping[str, Any], name: str, where: str, default: bool) -> bool:
    """true or false; absent or null is the default."""
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise MeshwrightError(f"{where}: {name}={short(value)} must be true or false")
    return value
