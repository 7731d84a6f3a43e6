"""Checkpoints of a parallelized model: any dp × tp to any other, verified when they are read.

    checkpoints = mw.torch.Checkpoints("run/checkpoints")
    checkpoints.save(step, model, optimizer, {"data": position})
    meta = checkpoints.restore(checkpoints.latest(), model, optimizer)

Each rank writes its own shards as safetensors; no shard is written twice. Optimizer state goes
through torch's get_optimizer_state_dict, by parameter names. Of a model with LoRA the factors alone
are saved, under PEFT's names.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from meshwright.arithmetic import whole_number
from meshwright.checkpoint import (
    Command,
    Piece,
    Record,
    SavedArray,
    advice,
    altered,
    as_json,
    fingerprint_of,
    folders,
    list_files,
    overlap,
    read_intact_step,
    read_pieces,
    read_step,
    sums_of_bits,
    write_pieces,
    write_record,
)
from meshwright.errors import MeshwrightError
from meshwright.launch import Agreement
from meshwright.torch.load import materialize
from meshwright.torch.lora import peft_name, saved_parameters
from meshwright.torch.parallelize import Parallelized, parallelized
from meshwright.torch.placement import Slices


class Checkpoints:
    """The checkpoints in one folder, which all ranks see; every rank makes the same calls."""

    def __init__(
        self,
        folder: Any,
        keep_last: int | None = 3,
        keep_every: int | None = None,
        command: Command | None = None,
    ) -> None:
        self.folder: Path = folders.checked_folder(folder)
        self.keep_last, self.keep_every = keep_last, keep_every
        self.losses: dict[int, float] = {}  # of evaluations, by step
        self.check_owned: folders.CheckOwned = lambda: None  # before each write and deletion
        self.command = command  # that uses a step, for messages

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, in order."""
        return folders.complete_steps(self.folder)

    def latest(self) -> int | None:
        """The last complete checkpoint; None if there is none."""
        return max(self.steps(), default=None)

    def meta(self, step: int) -> dict[str, Any]:
        """The `meta` that was saved."""
        return read_step(self.folder, step, self.command).user_meta

    def confirm(self, step: int) -> None:
        """Mark a checkpoint as healthy: a step from it had a finite loss and gradient.

        The newest healthy checkpoint is never deleted.
        """
        if dist.get_rank() == 0:
            self.check_owned()
            with contextlib.suppress(OSError):  # a full disk: the next one is marked
                folders.mark_healthy(self.folder, step)

    def healthy(self) -> list[int]:
        """The steps of all checkpoints that are known to be healthy, in order."""
        return folders.healthy_steps(self.folder)

    def set_aside_after(self, step: int, copied: Path) -> tuple[list[int], Path] | None:
        """Move the checkpoints after `step`, with a copy of a file, to where they are not read."""
        moved = None
        with RANKS.collective_errors(f"setting aside what is after step {step}") as catch:
            later = [other for other in self.steps() if other > step]
            if dist.get_rank() == 0 and later:
                catch(self.check_owned)
                moved = catch(lambda: folders.set_aside(self.folder, later, copied))
        return None if moved is None else (later, moved)

    def wait(self) -> None:
        """A save is complete when `save` returns."""

    def close(self) -> None:
        """Nothing is held open."""

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        meta: dict[str, Any] | None = None,
    ) -> None:
        """Save weights, optimizer moments, random state and `meta`, a JSON-able dict.

        The folder is complete or absent: it gets its name when all ranks have written.
        """
        own = parallelized(model)
        step = whole_number(step, "step")
        state, numbers = _optimizer_state(model, optimizer)
        content = as_json(
            {"user": meta or {}, "optimizer": numbers, "mesh": str(own.placements.spec)}
        )
        saving = folders.saving_folder(self.folder, step)
        rank = dist.get_rank()
        file = f"arrays-{rank:05d}.safetensors"
        pieces: dict[str, Piece] = {}
        arrays: dict[str, SavedArray] = {}
        values: dict[str, torch.Tensor] = {}
        sums: dict[str, tuple[int, int]] = {}
        for name, param_name, tensor in _named_tensors(model, state):
            slices = own.slices(param_name)
            arrays[name] = SavedArray(tuple(tensor.shape), _dtype_name(tensor), "")
            if _writes(own, param_name) and all(part.start < part.stop for part in slices):
                local = _local(tensor).detach().cpu().contiguous()
                values[name] = local
                pieces[name] = Piece(file, name, _starts(slices), tuple(local.shape))
                sums[name] = sums_of_bits(_bits(local), _starts(slices), tensor.shape)
        for name, random in _random_states(own, rank).items():
            values[name] = random
            arrays[name] = SavedArray(tuple(random.shape), "uint8", "")
            pieces[name] = Piece(file, name, (0,), tuple(random.shape))
            sums[name] = sums_of_bits(_bits(random), (0,), random.shape)
        sizes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(sizes, sum(value.nbytes for value in values.values()))
        failed = f"step {step} was not saved"
        why = functools.partial(folders.why_not_saved, self.folder, sum(sizes))
        begun = None  # in rank 0
        with RANKS.collective_errors(failed, why=why) as catch:
            if rank == 0:
                begun = catch(lambda: self._begin(step))
        try:
            with RANKS.collective_errors(failed, why=why) as catch:
                catch(lambda: _write(saving / file, values))
            reports: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(reports, (arrays, pieces, sums))
            with RANKS.collective_errors(failed, why=why) as catch:
                if begun is not None:
                    catch(lambda: self._finish(begun, content, reports))
        except MeshwrightError:
            if begun is not None:
                begun.give_up()
            raise
        if rank == 0:
            warning = folders.delete_old(
                self.folder,
                step,
                self.keep_last,
                self.keep_every,
                losses=self.losses,
                check_owned=self.check_owned,
            )
            if warning:  # the step is saved all the same
                print(f"warning: {warning}", file=sys.stderr, flush=True)
        dist.barrier()  # every rank sees the same steps

    def _begin(self, step: int) -> folders.Saving:
        self.check_owned()
        if step in self.steps():
            raise MeshwrightError(f"step {step} is already saved in {self.folder}; delete it first")
        return folders.Saving(self.folder, step)

    def _finish(self, begun: folders.Saving, content: dict[str, Any], reports: list[Any]) -> None:
        self.check_owned()
        saving = begun.path
        pieces: dict[str, list[Piece]] = {}
        arrays: dict[str, SavedArray] = {}
        for own, parts, _ in reports:
            arrays |= own
            for name, piece in parts.items():
                pieces.setdefault(name, []).append(piece)
        printed = _fingerprints([sums for _, _, sums in reports])
        arrays = {
            name: SavedArray(one.shape, one.dtype, printed[name]) for name, one in arrays.items()
        }
        write_pieces(saving, pieces)
        write_record(saving, Record(begun.step, arrays, content, list_files(saving)))
        begun.complete()

    def restore(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
    ) -> dict[str, Any]:
        """Fill a parallelized model and its optimizer from a checkpoint; gives back its `meta`.

        The mesh may be another than the one that saved it. The random state is restored where the
        number of ranks is the same.
        """
        own = parallelized(model)
        place = folders.existing_folder(self.folder, whole_number(step, "step"))
        with RANKS.collective_errors(f"restoring step {step}") as catch:
            read = read_step if dist.get_rank() else read_intact_step  # one looks at the files
            record = catch(lambda: read(self.folder, step, self.command))
            pieces = catch(lambda: read_pieces(place))
        assert record is not None
        assert pieces is not None
        materialize(model)
        state, _ = _optimizer_state(model, optimizer)
        named = list(_named_tensors(model, state))
        with RANKS.collective_errors(f"restoring step {step}") as catch:
            catch(lambda: _check_same(place, record, named))
        reader = _Reader(place, pieces)
        sums = {}
        advised = f". {advice(self.folder, step, self.command)}"
        with RANKS.collective_errors(f"restoring step {step}", advised) as catch, torch.no_grad():
            for name, param_name, tensor in named:
                slices = own.slices(param_name)
                catch(functools.partial(reader.fill, name, _local(tensor), slices))
                if _writes(own, param_name):
                    bits = _bits(_local(tensor).detach().cpu().contiguous())
                    sums[name] = sums_of_bits(bits, _starts(slices), tensor.shape)
        _verify(place, record, sums, advised)
        if optimizer is not None:
            _set_optimizer_state(model, optimizer, state, record.meta["optimizer"])
        states = _random_states(own, dist.get_rank())
        more = f"random/{dist.get_world_size()}/cpu" in pieces  # it was saved on more ranks
        if all(name in pieces for name in states) and not more:
            for name, random in states.items():
                reader.fill(name, random, (slice(0, len(random)),))
            _set_random_states(states)
        return record.user_meta


class _Reader:
    """Reads blocks of arrays from the files of a checkpoint."""

    def __init__(self, folder: Path, pieces: dict[str, list[Piece]]) -> None:
        self._folder, self._pieces = folder, pieces
        self._files: dict[str, Any] = {}

    def fill(self, name: str, target: torch.Tensor, wanted: Slices) -> None:
        """Copy a block of an array into `target`."""
        left = target.numel()
        for piece in self._pieces[name]:
            common = overlap(piece, wanted)
            if common is None:
                continue
            inside, there = common
            part = self._open(piece.file).get_slice(piece.key)[inside]
            target[there].copy_(part)
            left -= part.numel()
        if left:
            raise MeshwrightError(
                f"checkpoint {self._folder} is damaged: {left} elements of {name!r} are in no file"
            )

    def _open(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if file not in self._files:
            try:
                self._files[file] = safe_open(self._folder / file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise MeshwrightError(
                    f"checkpoint {self._folder} is damaged: {file} cannot be read ({error})"
                ) from None
        return self._files[file]


class _RankAgreement(Agreement):
    """Agreements of the ranks of torch.distributed."""

    member = "rank"

    def exchange(self, report: Any, decide: Callable[[Mapping[int, Any]], str]) -> str:
        reports: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reports, report)
        return decide(dict(enumerate(reports)))


RANKS = _RankAgreement()


def _named_tensors(
    model: nn.Module, state: dict[str, dict[str, torch.Tensor]]
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(name in the checkpoint, name of the parameter, tensor) of weights and moments."""
    for name, param in saved_parameters(model):
        yield f"params/{peft_name(name)}", name, param
    for slot in sorted({slot for slots in state.values() for slot in slots}):
        for name, slots in state.items():
            if slot in slots:
                yield f"optimizer/{slot}/{peft_name(name)}", name, slots[slot]


def _optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    """The moments of each parameter, and what is plain numbers: steps and settings."""
    if optimizer is None:
        return {}, {}
    full = get_optimizer_state_dict(model, optimizer)
    moments: dict[str, dict[str, torch.Tensor]] = {}
    steps: dict[str, dict[str, float]] = {}
    for name, slots in full["state"].items():
        for slot, value in slots.items():
            if isinstance(value, DTensor) and value.ndim:
                moments.setdefault(name, {})[slot] = value
            elif not isinstance(value, torch.Tensor) or value.numel() == 1:
                steps.setdefault(peft_name(name), {})[slot] = float(value)
            else:
                raise MeshwrightError(
                    f"optimizer state {slot!r} of {name!r} has shape {tuple(value.shape)}, which "
                    "is not split like its parameter; AdamW's and SGD's states are"
                )
    return moments, {"numbers": steps, "groups": _json_groups(full["param_groups"])}


def _json_groups(groups: Any) -> list[dict[str, Any]]:
    plain = (bool, int, float, str, type(None))
    return [
        {
            key: [float(x) for x in value] if key == "betas" else value
            for key, value in group.items()
            if isinstance(value, plain) or key in ("betas", "params")
        }
        for group in groups
    ]


def _set_optimizer_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    moments: dict[str, dict[str, torch.Tensor]],
    saved: dict[str, Any],
) -> None:
    """Put moments, step counts and settings back, by the names of parameters."""
    full = get_optimizer_state_dict(model, optimizer)
    for name, slots in full["state"].items():
        for slot, number in saved["numbers"].get(peft_name(name), {}).items():
            slots[slot] = torch.tensor(number)
        slots |= moments.get(name, {})
    by_name = {name: group for group in saved["groups"] for name in group["params"]}
    for group in full["param_groups"]:
        before = by_name.get(group["params"][0], {}) if group["params"] else {}
        changed = {key: value for key, value in before.items() if key != "params" and key in group}
        group |= {key: tuple(v) if key == "betas" else v for key, v in changed.items()}
    set_optimizer_state_dict(model, optimizer, full)


def _random_states(own: Parallelized, rank: int) -> dict[str, torch.Tensor]:
    """The state of this rank's random generators."""
    states = {f"random/{rank}/cpu": torch.get_rng_state()}
    if own.device.type == "cuda":
        states[f"random/{rank}/cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random_states(states: dict[str, torch.Tensor]) -> None:
    for name, random in states.items():
        if name.endswith("/cpu"):
            torch.set_rng_state(random)
        else:
            torch.cuda.set_rng_state(random)


def _writes(own: Parallelized, name: str) -> bool:
    """Whether this rank writes its shard: the first of those that have the same one."""
    used = own.placements.by_name[name].layout.used_axes
    return all(place == 0 for axis, place in own.position.items() if axis not in used)


def _check_same(place: Path, record: Record, named: list[tuple[str, str, torch.Tensor]]) -> None:
    wanted = {name: SavedArray(tuple(t.shape), _dtype_name(t), "") for name, _, t in named}
    has_optimizer = any(name.startswith("optimizer/") for name in wanted)
    lines = []
    for name in sorted({*wanted, *record.arrays}):
        have, want = record.arrays.get(name), wanted.get(name)
        if want is None and (name.startswith("random/") or not wanted.keys() - {name}):
            continue
        if want is None and name.startswith("optimizer/") and not has_optimizer:
            continue
        if have is None or want is None or (have.shape, have.dtype) != (want.shape, want.dtype):
            lines.append(f"  {name}: {have or 'not'} saved, {want or 'not'} requested")
    if lines:
        more = [f"  … and {len(lines) - 8} more"] if len(lines) > 8 else []
        raise MeshwrightError(
            "\n".join([f"checkpoint {place} holds a different model:", *lines[:8], *more])
        )


def _verify(place: Path, record: Record, sums: dict[str, tuple[int, int]], advised: str) -> None:
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, sums)
    wrong = [
        name
        for name, text in _fingerprints(reports).items()
        if text != record.arrays[name].fingerprint
    ]
    if wrong:
        raise MeshwrightError(f"{altered(place, wrong)}{advised}")


def _fingerprints(parts: list[dict[str, tuple[int, int]]]) -> dict[str, str]:
    """The fingerprint of each array, from the sums of its pieces."""
    sums: dict[str, list[tuple[int, int]]] = {}
    for own in parts:
        for name, of_piece in own.items():
            sums.setdefault(name, []).append(of_piece)
    return {name: fingerprint_of(of_pieces) for name, of_pieces in sums.items()}


def _write(file: Path, values: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    save_file(values, file)
    folders.flush(file)


def _bits(tensor: torch.Tensor) -> np.ndarray:
    """The elements of a CPU tensor as unsigned integers."""
    return tensor.view(getattr(torch, f"uint{8 * tensor.element_size()}")).numpy()


def _starts(slices: Slices) -> tuple[int, ...]:
    return tuple(part.start for part in slices)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
