"""Which checkpoint a run resumes from, whether its settings allow it, and how to ask for it."""

import dataclasses
import functools
import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from meshwright.checkpoint import misnamed
from meshwright.errors import MeshwrightError
from meshwright.launch import weights_sample
from meshwright.models import LoraConfig, LossConfig, model_to_dict
from meshwright.training.backend import SavedSteps
from meshwright.training.config import (
    DPO,
    FREE,
    LATEST,
    NONE,
    DpoConfig,
    TrainConfig,
    config_to_dict,
    settings_flags,
)
from meshwright.training.setup import weights_folder

_SHOWN = 8
ALL = "all"  # arrays are trained


def resume_step(
    checkpoints: SavedSteps, wanted: str, from_first: Callable[[str], str]
) -> int | None:
    """The step to resume from, None to start anew; process 0 looks, and all processes agree.

    `wanted`: 'latest', 'none', or a step. `from_first` gives the text of process 0.
    """
    answer: dict[str, Any] = {"step": None, "problem": ""}
    try:
        answer["step"] = _chosen(checkpoints, wanted)
    except MeshwrightError as problem:
        answer["problem"] = str(problem)
    answer = json.loads(from_first(json.dumps(answer)))
    if answer["problem"]:
        raise MeshwrightError(answer["problem"])
    return None if answer["step"] is None else int(answer["step"])


def _chosen(checkpoints: SavedSteps, wanted: str) -> int | None:
    steps = checkpoints.steps()
    if wanted == NONE:
        return None
    if wanted == LATEST:
        if not steps and (names := misnamed(checkpoints.folder)):
            raise MeshwrightError(
                f"{checkpoints.folder} holds checkpoints only under other names "
                f"({', '.join(names[:4])}), which are not read. Rename them to step- and eight "
                "digits, such as step-00000500, or start anew with --resume-from none"
            )
        return checkpoints.latest()
    if int(wanted) not in steps:
        listed = ", ".join(map(str, steps[-_SHOWN:]))
        have = f"it has steps {listed}" if steps else "it has none; start with --resume-from none"
        raise MeshwrightError(
            f"resume_from={wanted}: {checkpoints.folder} has no complete checkpoint of that step; "
            f"{have}"
        )
    return int(wanted)


def resume_command(config: TrainConfig, step: int | str) -> str:
    """What to type to resume this run from `step`, with the settings that are not the defaults.

    >>> resume_command(TrainConfig("tiny", steps=200), 40)
    'meshwright train tiny --steps 200 --run runs/latest --resume-from 40'
    """
    # each process has its own id; the folder is always said
    plain = dataclasses.replace(config, resume_from=LATEST, run=TrainConfig.run, process_id=None)
    words = ["meshwright", "train", config.model, *settings_flags(plain)]
    words += ["--run", str(config.run), "--resume-from", str(step)]
    own = " (and in each process its own --process-id)" if config.process_id is not None else ""
    return shlex.join(words) + own


def checkpoint_settings(config: TrainConfig) -> dict[str, Any]:
    """The arguments of `Checkpoints`, of either backend, for a run."""
    keep = config.checkpoint
    return {
        "folder": config.run / "checkpoints",
        "keep_last": keep.keep_last,
        "keep_every": keep.keep_every,
        "command": functools.partial(resume_command, config),
    }


def check_resume(
    meta: dict[str, Any],
    config: TrainConfig,
    model: Any,
    data: dict[str, Any],
    where: str,
    say: Callable[[str], None],
) -> int:
    """Whether this run may resume from the checkpoint of `meta`; gives back the tokens seen.

    `model` and `data` are those of this run; `where` names the checkpoint in messages.
    """
    new = model_to_dict(model)
    old = {"family": "decoder"} | meta["model_config"]  # earlier versions had no other
    if old != new:
        fields = [name for name in new if new[name] != old.get(name)]
        differences = ", ".join(f"{name} {old.get(name)} there, {new[name]} now" for name in fields)
        raise MeshwrightError(
            f"{where} is of another model ({differences}); give --run another folder"
        )
    _check_data(meta["data"], data, where)
    now, before = config_to_dict(config), meta["config"]
    # earlier versions kept moments like the parameters
    before["optimizer"].setdefault("moments", "auto")
    before.setdefault("trainable", [])  # and trained everything
    before["lora"] = dataclasses.asdict(LoraConfig()) | before.get("lora", {})
    before.setdefault("dpo", dataclasses.asdict(DpoConfig()))
    before["loss"] = dataclasses.asdict(LossConfig()) | before["loss"]
    before.setdefault("pack", True)  # on packed documents
    check_saved(now, before, where)
    _check_frozen(meta.get("base"), config, where)
    if now["steps"] != before["steps"]:
        say(
            f"note: steps is {now['steps']}, was {before['steps']}: the learning rate goes by "
            "it, and changes here"
        )
    compared = {name: now[name] for name in now if name not in FREE}
    compared["compute"] = {"capacity": now["compute"]["capacity"]}  # which changes losses
    before["compute"].setdefault("capacity", 0.0)
    for name, value in _flat(compared).items():
        was = _flat(before).get(name)
        if value != was:
            say(f"note: {name} is {value}, was {was} before this resume")
    return int(meta["tokens"])


def _check_frozen(base: Mapping[str, Any] | None, config: TrainConfig, where: str) -> None:
    """Raise if the frozen weights that are read again are not those of the run, noted in `base`."""
    if config.lora.rank and base:
        folder = weights_folder(config)
        assert folder is not None  # else it is an error
        check_base(base, folder, f"{where} is an adapter")
    elif config.objective == DPO and not config.lora.rank:
        folder = weights_folder(config)
        if base is None and folder is not None:
            raise MeshwrightError(
                f"the reference of {where} is the random weights of its first step; give "
                "the model's config.json without --init-from, or another folder to --run"
            )
        if base is not None and folder is None:
            raise MeshwrightError(
                f"the reference of {where} is the weights that it started from; give them again: "
                f"--init-from {base['folder']}"
            )
        if base is not None and folder is not None:
            check_base(base, folder, f"the reference of {where} consists")


def check_base(
    base: Mapping[str, Any], folder: Path, what: str, moved: str = "put it back"
) -> None:
    """Raise if the weights in a folder are not those that a run noted in `base`.

    `what` says what is of them: `runs/a is an adapter`; `moved` what to do if it is not there.
    """
    if not folder.is_dir():
        raise MeshwrightError(
            f"{what} of the weights in {folder}, and that folder is not there; {moved}"
        )
    if weights_sample(folder) != base["weights"]:
        raise MeshwrightError(
            f"{what} of the weights that were in {base['folder']}, and those in {folder} are "
            "others; it needs the same weights"
        )


def check_saved(now: dict[str, Any], before: dict[str, Any], where: str) -> None:
    """What is saved is what this run would save."""

    def saved(settings: dict[str, Any]) -> dict[str, str]:
        """By setting, in words."""
        optimizer, param_dtype = settings["optimizer"], settings["compute"]["param_dtype"]
        moments = optimizer["moments"]
        kept = {"optimizer.name": optimizer["name"], "compute.param_dtype": param_dtype}
        kept["trainable"] = shlex.join(settings["trainable"]) or ALL
        lora = settings["lora"]
        kept |= {f"lora.{name}": str(lora[name]) for name in ("rank", "alpha", "rslora")}
        kept["lora.targets"] = shlex.join(lora["targets"]) or ALL
        if now.get("backend") != "torch":  # which keeps moments like the weights
            kept["optimizer.moments"] = param_dtype if moments == "auto" else moments
        return kept

    for name, value in saved(now).items():
        was = saved(before)[name]
        if value != was:
            again = f"Give --{name.replace('_', '-')} {was} again"
            if was == ALL:
                again = f"Leave --{name} out"
            if now.get("backend") == "torch" and name == "optimizer.name":
                again = f"Resume it without --backend torch, which has no {was}"
            raise MeshwrightError(
                f"{where} was trained with {name} {was}, now it is {value}: what is saved does not "
                f"fit. {again}, or --run another folder"
            )


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings by dotted name: `{"loss.z_loss": 0.0}`."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        below = _flat(value) if isinstance(value, dict) else None
        flat |= {name: value} if below is None else {f"{name}.{key}": below[key] for key in below}
    return flat


# what Loader.describe() names, and the flag that sets it
_FLAGS = {"sources": "--data", "batch": "--batch", "seq": "--seq", "seed": "--seed"}
_FLAGS |= {"held_out": "--eval.sequences", "objective": "--objective", "packed": "--pack"}


def _check_data(before: dict[str, Any], now: dict[str, Any], where: str) -> None:
    """The data comes in the same order as it did, or an error says what differs."""
    # a tokenizer changes with its store, whose name says more
    for name in sorted(
        {**now, "objective": None, "packed": None}, key=lambda name: name != "sources"
    ):
        was: Any = before.get(name)
        is_now: Any = now.get(name)
        if name == "sources":
            differ = _sources(before[name]) != _sources(is_now)
            was, is_now = _sources_text(before[name]), _sources_text(is_now)
        else:
            differ = was != is_now
        if name == "packed":
            was, is_now = was is None, is_now is None
        if name == "objective":
            was, is_now = _objective_text(was, is_now), _objective_text(is_now, was)
        if differ:
            flag = _FLAGS.get(name, f"the {name} of --data")
            raise MeshwrightError(
                f"{where} cannot be resumed with other data: {flag} was {was}, is now {is_now}. "
                "The run would repeat or miss tokens. Give the old value again, or start a new "
                "run: --run with another folder"
            )


def _objective_text(objective: dict[str, Any] | None, other: dict[str, Any] | None) -> str:
    """Its name, and what differs from another of the same name."""
    if objective is None:
        return "next-token"
    same = other if other is not None and other["name"] == objective["name"] else objective
    differ = [f"{key} {value}" for key, value in objective.items() if same.get(key) != value]
    return objective["name"] + (f" ({', '.join(differ)})" if differ else "")


def _sources(sources: list[dict[str, Any]]) -> list[tuple[Any, Any]]:
    """What decides the order of tokens: a store that was moved or renamed is the same store."""
    return [(source["identity"], source["share"]) for source in sources]


def _sources_text(sources: list[dict[str, Any]]) -> str:
    total = sum(source["share"] for source in sources)
    return " + ".join(
        f"{source['name']} (share {source['share'] / total:.4g}, "
        f"content {str(source['identity'])[:8]})"
        for source in sources
    )
