"""Flags of other systems, answered with the command that does the same here."""

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence, Set
from fractions import Fraction

from meshwright.cli.flags import REPEATABLE, take, take_all
from meshwright.cli.other_words import (
    AXES,
    BARE,
    BEFORE,
    BUCKETS,
    FILE,
    GENERATING,
    KEYS,
    LAST_RATE,
    MESHES,
    MODEL_NAMES,
    OF_COMMAND,
    OF_TRAINING,
    OWN,
    PER_RANK,
    PIPELINES,
    PREFIXES,
    RENAMED,
    RULES,
    SECTIONS,
    SHARED,
    STRATEGIES,
    SUBFOLDERS,
    TRAINING,
    VALUELESS,
    VALUES,
    WITH_TRAINS,
    WITHIN_DATA,
    Words,
)
from meshwright.errors import MeshwrightError
from meshwright.meshes import STANDARD_AXES, MeshSpec


def check_flags(command: str, words: Sequence[str]) -> None:
    """Raise for flags of other systems, with the same command in the flags of this one."""
    for word in words:
        if word.startswith("--") and word[2:] in BEFORE:
            raise MeshwrightError(f"{word} is now {BEFORE[word[2:]]}")
    table = TRAINING if command in WITH_TRAINS else OF_COMMAND[command]
    known = SHARED | OF_TRAINING | {name for names in table for name in names}
    known -= OWN.get(command, set())
    ours: list[str] = []
    theirs: list[str] = []
    notes: dict[str, list[str]] = {}  # what is to be said with which words in place of {}
    given_flags: dict[str, str] = {}  # by which the command is completed at the end
    translated: list[list[str]] = []  # of ours, what was written otherwise
    if table is TRAINING and words[:1] and words[0].endswith((".yml", ".yaml", ".toml")):
        notes[f"{{}} is not read: {FILE}"] = [words[0]]
        words = words[1:]
    for name, value, written in _flags(words, known, of_training=command in WITH_TRAINS):
        flag = written[0]
        if not name:
            own_flag, equals, value = flag.partition("=")
            own_flag = own_flag.replace("_", "-") if flag.startswith("--") else own_flag
            ours.append(own_flag + equals + value)
            continue
        if name in table.always or name in table.advice or name in SECTIONS:
            notes.setdefault(_note(command, table, name, value), []).append(flag)
            if name in MODEL_NAMES and value and table is TRAINING:
                given_flags["model"] = value
            continue
        theirs.append(" ".join(written))
        added: list[str] = []
        if name in table.renamed or name in BARE:
            own_flag = table.renamed.get(name) or BARE[name]
            if not value and name not in VALUES:
                raise MeshwrightError(f"{flag} needs a value; here it is {own_flag}")
            added = _own_value(name, own_flag, value.rpartition("::")[2], theirs[-1])
        elif name in table.switches or (name == "sequence_parallel" and table is TRAINING):
            if value in STRATEGIES:
                added = ["--context-parallel", value]
            elif value.lower() != "false":
                added = table.switches.get(name, "--compute.sequence-parallel").split()
        elif name in SHARED or name == "num_partitions" or table is TRAINING:
            if not value and name not in AXES:
                raise MeshwrightError(f"{flag} needs a value")
            if name in given_flags:
                raise MeshwrightError(f"{flag} is given twice; give it once")
            given_flags[name] = value
            if name == "num_partitions":
                added = ["--num-partitions", value]
            elif name in LAST_RATE:
                added = [_FINAL_FRACTION, f"{name}={value}"]  # until the peak is known
        else:
            raise MeshwrightError(_not_of(command, flag, RENAMED.get(name)))
        ours += added
        translated += [added] if added else []
    _keep_last(ours, translated)
    if theirs:
        notes |= _complete(command, ours, given_flags)
    sentences = [note.replace("{}", ", ".join(flags)) for note, flags in notes.items()]
    if theirs:
        subject = "this is a flag" if len(theirs) == 1 else "these are flags"
        sentences.append(
            f"{', '.join(theirs)}: {subject} of another system; the same here: "
            f"meshwright {command} {shlex.join(ours)}"
        )
    if sentences:
        raise MeshwrightError("; ".join(sentences))


_FINAL_FRACTION = "--optimizer.final-fraction"
_MOUNT = "{}: paths are those of a file system that all hosts share, where a bucket can be mounted"


def _keep_last(ours: list[str], translated: Sequence[Sequence[str]]) -> None:
    """Keep of each translated flag the last that was written, as argparse would."""
    for flag, *values in translated:
        if not values:
            while ours.count(flag) > 1:
                ours.remove(flag)
        elif flag not in REPEATABLE:
            written = take_all(list(ours), flag)
            if len(written) > 1 or written == [""]:
                take_all(ours, flag)
                ours += [flag, written[-1]] if written[-1] else []


def _note(command: str, table: Words, name: str, value: str) -> str:
    """What to do in place of a flag that has no other name here, which stands for {}."""
    if name in SECTIONS:
        return f"there is no {{}}: {SECTIONS[name]}"
    if command == "plan" and "tokens" in name:
        return "{} is --tokens here, as in --tokens 1T"
    if name == "dataset_type" and value == "synthetic":
        return "there is no {}: --data embedded, the default, needs no download"
    if name in table.always and value.lower() not in ("false", "disabled"):
        return f"{{}} is not needed: {table.always[name]}"
    if name in PIPELINES and value == "1":
        return "{} is not needed: there is no pipeline"
    advice = table.advice.get(name) or table.always[name]
    return f"there is no {{}}: {advice.replace('{command}', command)}"


def _complete(command: str, ours: list[str], given: Mapping[str, str]) -> dict[str, list[str]]:
    """Add to a command what follows from several flags of another system together.

    Returns what else is to be said, of which words.
    """
    if "model" in given and not _has_model(ours):
        ours.insert(0, _preset(given["model"]))
    size = given.get("load_llama_config")  # EasyLM's and LWM's, where it takes a size
    if size is not None and not _has_model(ours):
        is_easylms = given.get("mesh_dim", "").count(",") == 2  # LWM's has four axes
        family = "llama-2" if is_easylms else "lwm"
        ours.insert(0, "tiny" if size == "debug" else f"{family}-{size}")
    for name in [name for name in given if name in SUBFOLDERS][-1:]:
        _set_run(ours, name, given[name])
    buckets = [word for word in ours if word.startswith(BUCKETS)]
    notes = {_MOUNT: buckets} if buckets else {}
    name, equals, rate = (_last(ours, _FINAL_FRACTION) or "").partition("=")
    if equals:
        take_all(ours, _FINAL_FRACTION)
        fraction = _fraction(rate, _last(ours, "--optimizer.learning-rate"))
        if fraction:
            ours += [_FINAL_FRACTION, fraction]
        else:
            notes[_OF_PEAK] = [name]
    per_rank = [name for name in given if name in PER_RANK]
    is_exact = bool(per_rank) and any(AXES.get(name) == "fsdp" for name in given)
    rest_to = "" if command in GENERATING or is_exact else "fsdp"
    mesh = _mesh(given, rest_to)
    if mesh and _agree(_last(ours, "--mesh"), mesh[1]):
        mesh = []
    elif mesh:
        take_all(ours, "--mesh")  # theirs says it
    rules = _rules(given)
    if rules:
        take_all(ours, "--rules")  # theirs says it
    ours += [*mesh, *rules]
    for name in per_rank[-1:]:
        ours += _batch(ours, name, given[name])
    return notes


def _has_model(ours: Sequence[str]) -> bool:
    return bool(ours) and not ours[0].startswith("-")


_OF_PEAK = f"{{}} is {_FINAL_FRACTION} here, a fraction of --optimizer.learning-rate"


def _preset(name: str) -> str:
    """The preset that another system calls `name`, which may have dots and dashes elsewhere."""
    from meshwright.models import PRESETS

    letters = re.sub("[^a-z0-9]", "", name.lower())
    return next((own for own in PRESETS if re.sub("[^a-z0-9]", "", own) == letters), name)


def _agree(mesh: str | None, theirs: str) -> bool:
    """Whether a mesh has the sizes that another system's flags name, and no size is open."""
    if mesh is None or mesh == "auto":
        return False
    spec = MeshSpec.parse(mesh).by_role()
    sizes = dict(spec.axes)
    return spec.is_resolved and all(
        sizes.get(axis, 1) == size for axis, size in MeshSpec.parse(theirs).axes if size != -1
    )


def _set_run(ours: list[str], name: str, folder: str) -> None:
    """Make `folder` the run's folder, below the one that the command names."""
    parent = take(ours, "--run") or ("runs" if name == "run_name" else "")
    ours += ["--run", f"{parent}/{folder}" if parent else folder]


def _fraction(rate: str, peak: str | None) -> str | None:
    """A learning rate as a fraction of the peak, if both are numbers."""
    try:
        return f"{float(rate) / float(peak or ''):.6g}"
    except (ValueError, ZeroDivisionError):
        return None


def _last(words: Sequence[str], flag: str) -> str | None:
    values = take_all(list(words), flag)
    return values[-1] if values else None


def _batch(ours: Sequence[str], name: str, value: str) -> list[str]:
    """The global batch, if the mesh of the command says how many data ranks there are.

    Where it is given too: how many micro-batches it has.
    """
    mesh, times, batch = (_last(ours, flag) for flag in ("--mesh", "--accumulation", "--batch"))
    spec = MeshSpec.parse(mesh).by_role() if mesh and mesh != "auto" else None
    of_maxtext = name == "per_device_batch_size"  # devices that share a sequence count too
    numbers = [value, times or "1", batch or "1"]
    if spec is None or not spec.is_resolved or not all(map(_NUMBER.fullmatch, numbers)):
        rank = f"{name} x all devices" if of_maxtext else "sequences of a data rank x data ranks"
        ranks = "" if of_maxtext else " (dp x fsdp of the mesh)"
        rule = f"--batch is the global batch: {rank}{ranks} x micro-batches (--accumulation)"
        if batch is not None:
            rule = f"--accumulation, the number of micro-batches, is --batch / ({rank})"
        raise MeshwrightError(
            f"{name} {value}: {rule}; with a --mesh whose sizes are all given, the command is "
            "written for you"
        )
    sequences = Fraction(value) * math.prod(
        size for axis, size in spec.axes if of_maxtext or axis in ("dp", "fsdp", "ep")
    )
    flag, number = "--batch", sequences * Fraction(times or 1)
    if batch is not None:
        if times is not None:
            return []
        flag, number = "--accumulation", Fraction(batch) / (sequences or 1)
    if number < 1 or number.denominator != 1:
        raise MeshwrightError(
            f"{name} {value} on mesh {spec} is {flag} {float(number):g}, not a whole number"
        )
    return [flag, str(number)]


_NUMBER = re.compile("[0-9]*[.]?[0-9]+")


def _own_value(name: str, flag: str, value: str, theirs: str) -> list[str]:
    """A flag with what a value of another system is here; "" if that is the default."""
    if name == "data_path" and " " in value:  # Megatron's: weight path weight path
        weights, paths = value.split()[::2], value.split()[1::2]
        pairs = zip(paths, weights, strict=False)
        return [flag, ",".join(f"{path}:{weight}" for path, weight in pairs)]
    if flag == "--optimizer.warmup-steps" and re.fullmatch(r"0?\.\d+", value):
        raise MeshwrightError(f"{theirs}: the warm-up is a number of steps here, {flag} N")
    values = VALUES.get(name) or VALUES.get(flag)
    if values is None:
        return [flag, value]
    own = values.get(value.lower())
    if own is None:
        known = " or ".join(dict.fromkeys(one for one in values.values() if one))
        raise MeshwrightError(f"there is no {theirs} here; give {flag} {known}, or leave it out")
    return [flag, own]


def _not_of(command: str, theirs: str, flag: str | None = None) -> str:
    here = "" if flag is None else f", where it is {flag}"
    return f"{theirs} is a setting of training (meshwright train){here}; leave it out of {command}"


def _flags(
    words: Sequence[str], known: Set[str], of_training: bool
) -> Iterator[tuple[str, str, list[str]]]:
    """(name, value, words) of each flag of another system; other words as they are.

    Arguments:
        of_training: Words KEY=VALUE are flags, too, unless they are the value of one.
    """
    rest = list(words)
    previous = ""
    while rest:
        word = rest.pop(0)
        written, before = [word], previous
        previous = word
        text, equals, value = word.lstrip("-").partition("=")
        name = text.replace("-", "_")
        for prefix in PREFIXES:
            name = name if name in known else name.removeprefix(prefix)
        if word.startswith("--"):
            section = next((one for one in SECTIONS if text.startswith(one)), "")
            if section and of_training and name not in known:
                name = section
            is_known = name in known or name in SECTIONS
            is_known |= name == "num_partitions" and "." in text
        else:
            is_value = before.startswith("--") and "=" not in before
            is_known = bool(of_training and equals and not is_value and text in KEYS)
        if not is_known:
            yield "", "", written
            continue
        while not equals and rest and _is_value(name, rest[0], len(written)):
            written.append(rest.pop(0))
        value = " ".join(written[1:]) or value
        yield name, value.strip("'\"()[] "), written


def _is_value(name: str, word: str, place: int) -> bool:
    """Whether a word after a flag is a value of it."""
    if word.startswith("--") or (place > 1 and name != "data_path"):
        return False
    return name not in VALUELESS or word.lower() in ("true", "false")


def _mesh(given_flags: Mapping[str, str], rest_to: str) -> list[str]:
    """`--mesh` with all that the flags say of it; an error if that is no mesh.

    Devices that are left are along `rest_to`, if it is named.
    """
    mesh_flags = [name for name in given_flags if name in MESHES]
    named = {name: value for name, value in given_flags.items() if name in AXES}
    if mesh_flags:
        switches = named if mesh_flags == ["mp_mesh_dim"] else {}  # EasyLM's --fsdp beside it
        if len(mesh_flags) > 1 or named.keys() - {"fsdp"} or (named and not switches):
            raise MeshwrightError(_ONE_MESH)
        if mesh_flags[0] == "mp_mesh_dim":
            is_fsdp = _size("fsdp", switches["fsdp"]) != 0 if "fsdp" in switches else False
            spec = MeshSpec.from_mp_mesh_dim(given_flags[mesh_flags[0]], is_fsdp)
        else:
            spec = MeshSpec.parse(given_flags[mesh_flags[0]])
        return ["--mesh", str(spec.by_role())]
    sizes: dict[str, int] = {}
    for name, value in named.items():
        axis, size = AXES[name], _size(name, value)
        if axis in sizes and name.endswith("_parallelism"):  # MaxText's, within and across slices
            size = -1 if -1 in (size, sizes[axis]) else size * sizes.pop(axis)
            sizes.pop(axis, None)
        if axis in sizes or (size == -1 and -1 in sizes.values()):
            raise MeshwrightError(_ONE_MESH)
        sizes |= {axis: size} if size else {}
    if not sizes:
        return []
    sharding, experts = sizes.get("fsdp", -1), sizes.get("ep")
    if sharding > 0 and experts is not None and named.keys() & WITHIN_DATA:
        sizes["fsdp"], left = divmod(sharding, experts)
        if left or experts < 0:
            raise MeshwrightError(
                f"{experts} ranks of experts do not divide the {sharding} ranks that shard the "
                "weights; give a number that does"
            )
    if rest_to and -1 not in sizes.values():
        sizes = {rest_to if rest_to not in sizes else "dp": -1} | sizes
    axes = (*STANDARD_AXES[:2], "ep", *STANDARD_AXES[2:])
    return ["--mesh", ",".join(f"{axis}={sizes[axis]}" for axis in axes if axis in sizes)]


_ONE_MESH = (
    "flags of other systems contradict each other; the mesh here is one setting, such as --mesh "
    "dp=1,fsdp=-1,tp=4,sp=1"
)


def _size(name: str, value: str) -> int:
    """The size of an axis; a switch without a value takes all devices, one that is false none."""
    switch = {"": -1, "true": -1, "false": 0}.get(value.lower())
    if switch is not None:
        return switch
    if value != "-1" and not value.isdecimal():
        raise MeshwrightError(
            f"--{name} {value}: {value!r} is not a size; the mesh here is one setting, such as "
            "--mesh fsdp=-1,tp=2"
        )
    return int(value)


def _rules(given_flags: Mapping[str, str]) -> list[str]:
    if not given_flags.keys() & RULES.keys():
        return []
    dims = [given_flags.get(name, "1") for name in RULES]
    if not set(dims) <= {"1", "2"}:
        raise MeshwrightError(f"T5X's partitioning dims are 1 or 2, not {', '.join(dims)}")
    return ["--rules", f"t5x:{','.join(dims)}"]
