"""A Hugging Face model under FSDP2 and tensor parallelism, for the training loop."""

import math
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright.errors import MeshwrightError, not_installed
from meshwright.machines import check_host_memory
from meshwright.models import is_torch_only, serving_of, to_hf_config
from meshwright.present import bytes_text, nearest_multiples
from meshwright.torch.checkpoint import RANKS, Checkpoints
from meshwright.torch.checks import check_sequence
from meshwright.torch.explanation import explain
from meshwright.torch.load import initialize, load_hf
from meshwright.torch.loss import cross_entropy
from meshwright.torch.mesh import Axes, axes_of, data_shard
from meshwright.torch.parallelize import parallelize, parallelized
from meshwright.torch.train.adapter import add_adapter, start_adapter
from meshwright.torch.train.batch import (
    Arrays,
    counted_weight,
    micro_batches,
    model_inputs,
    target_count,
    target_weights,
    targets,
)
from meshwright.torch.train.from_jax import as_pieces
from meshwright.torch.train.launcher import by_torchrun
from meshwright.torch.train.settings import check_settings
from meshwright.torch.train.work import NetworkWork
from meshwright.training import (
    Backend,
    Memory,
    Say,
    StepWork,
    TrainConfig,
    check_trackers,
    checkpoint_settings,
    chip_peak_flops,
    file_rules,
    frozen_weights,
    learning_rate,
    prepare_data,
    trained_text,
    training_arrays,
    weights_folder,
)

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class TorchBackend(Backend):
    lag = 0  # the loss and the gradient norm decide whether there is an update

    def __init__(self, config: TrainConfig, mesh: DeviceMesh) -> None:
        check_trackers(config.log.tensorboard, config.log.wandb is not None)
        model = check_settings(config)
        axes = axes_of(mesh)
        self.config, self._mesh, self._axes = config, mesh, axes
        self.process_id, self.processes = dist.get_rank(), dist.get_world_size()
        self.mesh_shape, self.num_devices = dict(axes.shape), mesh.size()
        self._sequences = self._sequences_of(config)
        data = prepare_data(config, model)
        self.loader, self.eval_loader, self.model = data.loader, data.eval_loader, data.model
        self._own_masks = is_torch_only(model)  # those of transformers
        self._window = None if self._own_masks else serving_of(model).window(model)
        self.checkpoints: Checkpoints = Checkpoints(**checkpoint_settings(config))
        cuda = mesh.device_type == "cuda"
        self.device_kind = torch.cuda.get_device_name() if cuda else "cpu"
        self._bf16 = {"auto": cuda, "bfloat16": True, "float32": False}[config.compute.dtype]
        self._compile = {"auto": cuda, "on": True, "off": False}[config.torch.compile]
        if config.compute.sequence_parallel and axes.tp > 1:
            check_sequence(config.seq, axes.tp, axes.tensor)
        rules = file_rules(config)  # None: those that follow from the model
        self.network = on_meta(to_hf_config(model), _DTYPES[config.compute.param_dtype])
        self._arrays: Any = None  # of a model with an adapter, as JAX has them
        compute = torch.bfloat16 if self._bf16 else None
        if config.lora.rank:
            compute = compute or torch.float32  # also of a base in bfloat16
            base = compute if config.lora.base == "auto" else _DTYPES[config.lora.base]
            add_adapter(self.network, model, config.lora, base)
            self._arrays = training_arrays(config, model, np.float32)
        try:
            self._explanation = explain(self.network, mesh, rules)
        except MeshwrightError as mistake:
            if rules is None:
                raise
            raise MeshwrightError(f"rules {config.rules!r}: {mistake}") from None
        self.num_parameters = self._explanation.num_elements
        lengths = {"tokens": config.seq}
        frozen = 0 if self._arrays is None else frozen_weights(self._arrays)
        self.work = (
            NetworkWork.of(self.network, model, lengths)
            if self._own_masks
            else StepWork(model, lengths, frozen)
        )
        parallelize(
            self.network,
            mesh,
            rules,
            sequence_parallel=config.compute.sequence_parallel,
            loss_parallel=config.torch.loss_parallel and self._splits_vocabulary,
            mixed_precision=compute,
            reshard_after_forward=self._reshards,
            activation_checkpointing=config.compute.remat == "full",
            compile=self._compile,
        )
        self._device = parallelized(self.network).device
        # split logits are summed over ranks in it, which torch.compile would break up
        fused = self._compile and axes.tp == 1
        self._cross_entropy: Any = torch.compile(cross_entropy) if fused else cross_entropy
        self._rate = learning_rate(config.optimizer, config.steps)
        self._skipped = self._skipped_in_a_row = self._taken = 0
        self._optimizer: torch.optim.AdamW  # after `start`

    @property
    def _splits_vocabulary(self) -> bool:
        """Whether the LM head is split over tp; own rules may keep it whole."""
        head = self.network.get_output_embeddings().weight
        names = (name for name, p in self.network.named_parameters() if p is head)
        layouts = {array.path: array.layout for array in self._explanation.rows}
        return self._axes.tensor in layouts[next(names).replace(".", "/")].axes[0]

    @property
    def _reshards(self) -> bool | None:
        """None: what fully_shard does by default, all but the root.

        One rank has nothing to free but the copies that fully_shard makes of frozen weights.
        """
        frees = self._axes.shape[self._axes.shard] > 1 or self.config.lora.rank > 0
        return None if self.config.torch.reshard_after_forward and frees else False

    def _sequences_of(self, config: TrainConfig) -> tuple[int, int]:
        """The sequences of a micro-batch that this rank trains on."""
        index, shards = data_shard(self._mesh)
        each = check_batch(config, self._axes) // shards
        return index * each, (index + 1) * each

    def from_first(self, text: str) -> str:
        return RANKS.from_first(text)

    def placement_lines(self) -> Iterator[str]:
        if (weights := weights_folder(self.config)) is not None:
            yield f"starts from the weights in {weights}"
        yield self._explanation.summary()
        if self._arrays is not None:
            yield trained_text(self._arrays, self.num_parameters)
        shape = self.mesh_shape
        placed = parallelized(self.network).placements.by_name
        sizes = {
            name: placed[name].largest_shard(shape) * param.dtype.itemsize
            for name, param in self.network.named_parameters()
        }
        trained = sum(
            sizes[name] for name, param in self.network.named_parameters() if param.requires_grad
        )
        yield (
            f"per device: parameters {bytes_text(sum(sizes.values()))}, gradients "
            f"{bytes_text(trained)}, optimizer {bytes_text(2 * trained)}"
        )

    def compute_lines(self) -> Iterator[str]:
        dtype = "bfloat16" if self._bf16 else self.config.compute.param_dtype
        compiled = "each layer compiled" if self._compile else "not compiled"
        yield f"PyTorch {torch.__version__}: compute in {dtype}, {compiled}"
        for remark in (idle_gpus(), *self._explanation.remarks):
            if remark is not None:
                yield f"note: {remark}"

    def check_memory(self) -> None:
        if self._device.type == "cuda":
            return
        local = sum(
            param.to_local().numel() * param.element_size() * (4 if param.requires_grad else 1)
            for param in _dtensors(self.network)
        )
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        check_host_memory(
            local * processes,
            f"{self.config.model} with parameters, gradients and optimizer state",
            "use a smaller model, more hosts, or --compute.param-dtype bfloat16",
        )

    def start(self, saved: int | None) -> None:
        settings = self.config.optimizer
        weights = weights_folder(self.config)
        if weights is not None and (saved is None or self.config.lora.rank):
            load_hf(self.network, weights)
        elif saved is None:
            initialize(self.network, self.config.seed)
        if saved is None and self.config.lora.rank:
            start_adapter(self.network, self.model, self.config.lora, self.config.seed)
        trained = [param for param in self.network.parameters() if param.requires_grad]
        matrices = [param for param in trained if param.ndim > 1]
        others = [param for param in trained if param.ndim < 2]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=settings.learning_rate,
            betas=(settings.b1, settings.b2),
            eps=settings.eps,
            fused=self._device.type == "cuda",
        )
        if saved is not None:
            with as_pieces(self.config, self.checkpoints, saved) as found:
                meta = found.restore(saved, self.network, self._optimizer)
            self._skipped = int(meta["skipped"])
            self._taken = saved - self._skipped
            for group in self._optimizer.param_groups:  # the settings of this command, not of then
                group |= {"betas": (settings.b1, settings.b2), "eps": settings.eps}
                group["weight_decay"] = settings.weight_decay if group["params"][0].ndim > 1 else 0
                group["fused"] = self._device.type == "cuda"

    def compile(self, say: Say) -> None:
        """torch.compile works in the first step."""

    def batches(self, first: int) -> Iterator[tuple[int, Any]]:
        return self.loader.iterate_part(first, self._sequences)

    def step(self, batch: Any) -> dict[str, Any]:
        self._optimizer.zero_grad()
        shards = self.num_devices // self._axes.tp
        counted, weight = self._sum([float(target_count(batch)), counted_weight(batch)])
        scale = 1.0 / (weight or 1.0)
        entropy = torch.zeros((), device=self._device)
        for part in micro_batches(batch):
            losses = self._entropy(part)
            # fully_shard takes the mean of gradients over the data axes
            (losses * (scale * shards)).backward()
            entropy += losses.detach()
        total, squares, keys = self._sum([entropy, self._squares(), self._keys_seen(batch)])
        gradient_norm = math.sqrt(squares)
        ok = math.isfinite(total) and math.isfinite(gradient_norm)
        rate = float(self._rate(self._taken))
        if ok:
            self._update(gradient_norm, rate)
            self._taken += 1
            self._skipped_in_a_row = 0
        else:
            self._skipped += 1
            self._skipped_in_a_row += 1
        return {
            "loss": total * scale,
            "gradient_norm": gradient_norm,
            "learning_rate": rate,
            "tokens": int(counted),
            "skipped": self._skipped,
            "skipped_in_a_row": self._skipped_in_a_row,
            "keys_seen": keys / shards,
        }

    def _update(self, norm: float, rate: float) -> None:
        clip = self.config.optimizer.clip_norm
        if clip is not None and norm > clip:
            torch._foreach_mul_(list(self._gradients().values()), clip / norm)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()

    def _gradients(self) -> dict[str, torch.Tensor]:
        """This rank's shard of every gradient."""
        named = self.network.named_parameters()
        return {name: param.grad.to_local() for name, param in named if param.grad is not None}

    def _squares(self) -> torch.Tensor:
        """The sum of the squares of gradients, so that a sum over the data axes has each once."""
        gradients = self._gradients()
        placed = parallelized(self.network).placements.by_name
        norms = torch.stack(
            torch._foreach_norm(list(gradients.values()), 2, torch.float32)
        ).double()
        copies = [placed[name].layout.copies(self.mesh_shape) for name in gradients]
        own = norms.square() / torch.tensor(copies, device=self._device)
        return own.sum() * self._axes.tp

    def _entropy(self, part: Arrays) -> torch.Tensor:
        """The summed cross-entropy of this rank's sequences."""
        logits = self.network(
            **model_inputs(part, self._window, self._device, self._own_masks)
        ).logits
        wanted = targets(part, self._device)
        weights = target_weights(part, self._device)
        weighted = {} if weights is None else {"weights": weights.reshape(-1)}
        return self._cross_entropy(logits, wanted.reshape(-1), **weighted)

    def _keys_seen(self, batch: Arrays) -> float:
        """Keys that a token attends to, on average over this rank's sequences."""
        keys = batch["positions"] + 1
        return float((keys if self._window is None else keys.clip(max=self._window)).mean())

    def _sum(self, numbers: list[Any]) -> list[float]:
        """Summed over the ranks that have different data."""
        values = [torch.as_tensor(number, dtype=torch.float64) for number in numbers]
        summed = torch.stack([value.to(self._device) for value in values])
        dist.all_reduce(summed)
        return (summed / self._axes.tp).tolist()

    def values(self, report: Any) -> dict[str, Any]:
        return dict(report)

    def evaluate(self) -> dict[str, tuple[float, float]]:
        assert self.eval_loader is not None
        entropy, counted = torch.zeros((), device=self._device), 0.0
        with torch.no_grad():
            for _, batch in self.eval_loader.iterate_part(0, self._sequences):
                for part in micro_batches(batch):
                    entropy += self._entropy(part)
                    counted += counted_weight(part)
        total, weight = self._sum([entropy, counted])
        return {"loss": (total, weight if self.eval_loader.is_weighted else round(weight))}

    def is_finite(self) -> bool:
        own = [param.to_local() for param in _dtensors(self.network)]
        finite = all(bool(torch.isfinite(shard).all()) for shard in own if shard.numel())
        return self._sum([0.0 if finite else 1.0])[0] == 0

    def save(self, step: int, meta: dict[str, Any], wait: bool = False) -> None:
        meta = meta | {"skipped": self._skipped}
        self.checkpoints.save(step, self.network, self._optimizer, meta)

    def peak_flops(self) -> float | None:
        if self._device.type != "cuda":
            return None
        return chip_peak_flops(self.device_kind, "cuda")

    def memory(self) -> Memory | None:
        if self._device.type != "cuda":
            return None
        _, limit = torch.cuda.mem_get_info()
        return Memory(torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), limit)


def on_meta(fields: dict[str, Any], dtype: torch.dtype) -> Any:
    """The Hugging Face model of a config.json, without weights."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise MeshwrightError(
            f"--backend torch trains models of transformers: {not_installed('torch')}"
        ) from None
    kind = fields["model_type"]
    config = AutoConfig.for_model(kind, **{k: v for k, v in fields.items() if k != "model_type"})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()  # without dropout, as in JAX


def _dtensors(network: torch.nn.Module) -> Iterator[DTensor]:
    for param in network.parameters():
        assert isinstance(param, DTensor), "every parameter goes through fully_shard"
        yield param


def idle_gpus() -> str | None:
    """A remark on GPUs of this host that the run does not use."""
    there, used = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if there <= used:
        return None
    flag = "torchrun --nproc-per-node" if by_torchrun() else "--processes"
    return f"the run uses {used} of this host's {there} GPUs; {flag} {there} uses all"


def check_batch(config: TrainConfig, axes: Axes) -> int:
    """The sequences of a micro-batch; raise if the ranks cannot share them evenly."""
    if config.batch % config.accumulation:
        raise MeshwrightError(
            f"batch={config.batch} is not divisible by accumulation={config.accumulation}; "
            f"batch={nearest_multiples(config.batch, config.accumulation)} would fit"
        )
    micro_batch = config.batch // config.accumulation
    shards = math.prod(axes.shape[axis] for axis in axes.data)
    if micro_batch % shards:
        raise MeshwrightError(
            f"batch={config.batch} / accumulation={config.accumulation} = {micro_batch} is not "
            f"divisible by {'·'.join(axes.data)} = {shards}; "
            f"{nearest_multiples(micro_batch, shards)} would fit"
        )
    return micro_batch
