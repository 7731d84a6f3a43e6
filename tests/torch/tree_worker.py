"""Random module trees under random rules, and random decoders, against the same in one process.

In training and in evaluation; each rank has a random seed of its own.

`torchrun --nproc-per-node N tree_worker.py OUT TREES` writes one result per tree and decoder: what
differs, and how much stayed split.
"""

import json
import random
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import meshwright as mw
import meshwright.torch as mt
from meshwright.torch.parallelize import parallelized

EMBED, MLP, HEADS, HEAD_DIM = 12, 24, 6, 2


class Scale(nn.Module):
    """A vector, or one number, for all."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class HeadNorm(nn.LayerNorm):
    """A norm of each head."""

    def __init__(self) -> None:
        super().__init__(HEAD_DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.unflatten(-1, (-1, HEAD_DIM))).flatten(-2)


def mix_heads(x: torch.Tensor) -> torch.Tensor:
    """Attention of each head with itself; -1 stands for the heads."""
    heads = x.view(*x.shape[:-1], -1, HEAD_DIM).transpose(1, 2)
    mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    return mixed.transpose(1, 2).flatten(-2)


def mix_named_heads(x: torch.Tensor) -> torch.Tensor:
    """The number of heads is written down, so a part of them is taken for a part of the tokens."""
    heads = x.view(x.shape[0], -1, HEADS, HEAD_DIM)
    return (heads - heads.mean(1, keepdim=True)).reshape(x.shape)


def gate(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * second.sigmoid(), second], -1)


def add_in_place(x: torch.Tensor) -> torch.Tensor:
    x = x * 2
    x += 1
    return x


FUNCTIONS = {
    "gelu": nn.functional.gelu,
    "heads": mix_heads,
    "named heads": mix_named_heads,
    "softmax": lambda x: x.softmax(-1),
    "center": lambda x: x - x.mean(-1, keepdim=True),
    "sum": lambda x: x * x.cumsum(-1),
    "gate": gate,
    "in place": add_in_place,
}
LOCAL = ("gelu", "heads", "in place")  # right on a part
ON_TOKENS = ("gelu", "softmax", "center", "sum", "gate", "in place")  # right on part of the tokens


class Tree(nn.Module):
    """A random program over activations: each line makes one of those before it into a new one."""

    def __init__(self, chooser: random.Random, depth: int = 0) -> None:
        super().__init__()
        self.program: list[tuple[str, Any, list[int]]] = []
        widths = [EMBED]
        for _ in range(chooser.randint(2, 5)):
            if chooser.random() < 0.4:
                self._add_pair(chooser, widths)
            else:
                self._add_line(chooser, widths, depth)
        ends = [i for i, width in enumerate(widths) if width == EMBED]
        self.program.append(("add", None, [ends[-1], chooser.choice(ends)]))
        self.read = {len(self.program)}
        for i in range(len(self.program), 0, -1):
            if i in self.read:
                self.read.update(self.program[i - 1][2])

    def _add_pair(self, chooser: random.Random, widths: list[int]) -> None:
        """One or two wide layers, something between, and a narrow one, as in a transformer."""
        source = chooser.choice([i for i, width in enumerate(widths) if width == EMBED])
        for _ in range(chooser.randint(1, 2)):
            self._append(widths, "linear", nn.Linear(EMBED, MLP), [source], MLP)
        if chooser.random() < 0.5:
            self._append(widths, "multiply", None, [len(widths) - 1, len(widths) - 2 or 1], MLP)
        for _ in range(chooser.randint(0, 2)):
            between = chooser.choice(["local"] * 4 + ["head norm", "number"] * 2
                                     + ["any", "any", "by mode", "by mode", "dropout"])  # fmt: skip
            if between == "any":
                self._add_line(chooser, widths, 2)
            else:
                line = self._between(chooser, between)
                self._append(widths, *line, [len(widths) - 1], widths[-1])
        if widths[-1] == MLP:
            layer = nn.Linear(MLP, EMBED)
            self._append(widths, "linear", layer, [len(widths) - 1], EMBED)
            if chooser.random() < 0.3:
                self._append(widths, "dropout", None, [len(widths) - 1], EMBED)

    def _between(self, chooser: random.Random, kind: str) -> tuple[str, Any]:
        if kind == "local":
            return kind, chooser.choice(LOCAL)
        if kind == "by mode":
            return kind, _by_mode(chooser)
        if kind == "dropout":
            return kind, None
        return kind, HeadNorm() if kind == "head norm" else Scale(1)

    def _append(
        self, widths: list[int], kind: str, own: Any, sources: list[int], width: int
    ) -> None:
        if isinstance(own, nn.Module):
            name = f"{kind.replace(' ', '_')}{len(self.program)}"
            self.add_module(name, own)
            kind, own = "module", name
        if any(widths[source] != widths[sources[0]] for source in sources):
            return
        self.program.append((kind, own, sources))
        widths.append(width)

    def _add_line(self, chooser: random.Random, widths: list[int], depth: int) -> None:
        source = chooser.choice([len(widths) - 1, chooser.randrange(len(widths))])
        width, own, sources = widths[source], None, [source]
        kind = chooser.choice(["linear"] * 3 + ["norm"] * 2 + ["head norm", "scale", "number"]
                              + ["local", "function", "function", "add", "add", "multiply"]
                              + ["in place", "tree", "again", "dropout", "by mode"])  # fmt: skip
        if kind == "linear":
            out = chooser.choice([EMBED, MLP])
            own = nn.Linear(width, out, bias=chooser.random() < 0.7)
            width = out
        elif kind == "norm":
            norm = chooser.choice([nn.LayerNorm, nn.RMSNorm])
            own = norm(width, elementwise_affine=chooser.random() < 0.8)
        elif kind == "head norm":
            own = HeadNorm()
        elif kind in ("scale", "number"):
            own = Scale(width if kind == "scale" else 1)
        elif kind in ("local", "function"):
            own = chooser.choice(LOCAL if kind == "local" else sorted(FUNCTIONS))
        elif kind == "by mode":
            own = _by_mode(chooser)
        elif kind == "dropout":
            pass
        elif kind in ("add", "multiply", "in place"):
            alike = [i for i, other in enumerate(widths) if other == width and i != source]
            if not alike:
                return
            sources.append(chooser.choice(alike))
        elif kind == "tree":
            if depth == 2 or width != EMBED:
                return
            own = Tree(chooser, depth + 1)
        else:
            children = [name for name, module in self.named_children()
                        if _width(module) in (None, width)]  # fmt: skip
            if not children:
                return
            kind, own = "module", chooser.choice(children)
            module = self.get_submodule(own)
            width = module.out_features if isinstance(module, nn.Linear) else width
        self._append(widths, kind, own, sources, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [x]
        for kind, name, sources in self.program:
            taken = [values[source] for source in sources]
            if kind == "module":
                values.append(self.get_submodule(name)(taken[0]))
            elif kind in ("local", "function"):
                values.append(FUNCTIONS[name](taken[0]))
            elif kind == "by mode":
                values.append(FUNCTIONS[name[self.training]](taken[0]))
            elif kind == "dropout":
                # what nothing reads draws no numbers: no comparison sees whether it is split
                is_read = len(values) in self.read
                values.append(nn.functional.dropout(taken[0], 0.5, self.training and is_read))
            elif kind == "multiply":
                values.append(taken[0] * taken[1])
            elif kind == "in place":
                values.append((taken[0] * 1).add_(taken[1]))
            else:
                values.append(taken[0] + taken[1])
        return values[-1]


class Function(nn.Module):
    """One of FUNCTIONS in each mode, or dropout in training."""

    def __init__(self, names: list[str] | None) -> None:
        super().__init__()
        self.names = names

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.names is None:
            return nn.functional.dropout(x, 0.5, self.training)
        return FUNCTIONS[self.names[self.training]](x)


class Residual(nn.Module):
    """A function between blocks, and what an MLP between two others adds."""

    def __init__(self, between: nn.Module, inside: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.between, self.norm = between, norm
        up, down = nn.Linear(EMBED, MLP), nn.Linear(MLP, EMBED)
        self.mlp = nn.Sequential(up, inside, down)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.between(x)
        return x + self.mlp(self.norm(x))


class Decoder(nn.Module):
    """Residual blocks between an embedding and an LM head, as sequence parallelism needs them."""

    def __init__(self, chooser: random.Random) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(18, EMBED), nn.Linear(EMBED, 18, bias=False)
        self.blocks = nn.ModuleList(
            Residual(
                self._function(chooser, "on tokens", 0.8),
                self._function(chooser, "local", 0.9),
                chooser.choice([nn.LayerNorm, nn.RMSNorm])(EMBED),
            )
            for _ in range(chooser.randint(1, 3))
        )
        self.norm = nn.LayerNorm(EMBED)
        self.before = nn.LayerNorm(EMBED) if chooser.random() < 0.3 else nn.Identity()
        # a norm used twice, which is wrong where one of them sees the complete sequence
        self.again = chooser.choice([nn.Identity()] * 6 + [self.norm, self.before])
        self.behind = self._function(chooser, "on tokens", 0.9)

    def _function(self, chooser: random.Random, kind: str, right: float) -> nn.Module:
        """Mostly what is right on a part: of the tokens, or, as "local", of the last dim."""
        chosen = chooser.random()
        if chosen > right:
            return Function(None if chosen > 0.97 else _by_mode(chooser))
        if kind == "local":
            return Function([chooser.choice(LOCAL)] * 2)
        return chooser.choice([nn.Identity(), Function(chooser.choices(ON_TOKENS, k=2))])

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.before(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(self.again(self.behind(x))))


DECODER_RULES = mw.PathRules([
    ("embed/weight", "vocab embed -> vocab@tp embed"), ("head", "vocab embed -> vocab@tp embed"),
    ("mlp/0/weight", "out in -> out@tp in"), ("mlp/0/bias", "out -> out@tp"),
    ("mlp/2/weight", "out in -> out in@tp"), (".*", ()),
])  # fmt: skip


def random_decoder(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Decoder(random.Random(seed)).double()


def compared_decoder(seed: int, mesh: Any) -> dict[str, Any]:
    """Loss and every gradient of a decoder with sequence parallelism, if it is not refused."""
    plain, model = random_decoder(seed), random_decoder(seed)
    tokens = torch.randint(18, (2, 12))
    weights = torch.randn(2, 12, 18, dtype=torch.float64)
    model.train(seed % 3 != 2)
    found: dict[str, Any] = {"seed": seed, "wrong": []}
    try:
        mt.parallelize(model, mesh, DECODER_RULES, sequence_parallel=True, example=tokens[:, :6])
    except mw.MeshwrightError as refused:
        return found | {"refused": str(refused)}
    return found | compared_in_modes(plain, model, mesh, tokens, weights)


def _by_mode(chooser: random.Random) -> list[str]:
    """What to do in evaluation and in training; mostly one of the two is right on a part."""
    if chooser.random() < 0.3:
        return chooser.sample(LOCAL, 2)
    return chooser.sample([chooser.choice(LOCAL), chooser.choice(sorted(FUNCTIONS))], 2)


def _width(module: nn.Module) -> int | None:
    """What a module takes; None: anything."""
    if isinstance(module, nn.Linear):
        return module.in_features
    if isinstance(module, Tree):
        return EMBED
    if isinstance(module, HeadNorm):
        return None
    if isinstance(module, Scale):
        return None if module.weight.numel() == 1 else module.weight.numel()
    return module.normalized_shape[0]


def random_tree(seed: int) -> tuple[nn.Module, mw.PathRules]:
    chooser = random.Random(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(*(Tree(chooser) for _ in range(chooser.randint(1, 2)))).double()
    usual = chooser.random() < 0.7  # wide layers column-parallel, narrow ones row-parallel
    rules: list[tuple[str, Any]] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        place = path.replace(".", "/")
        kind = chooser.choice(["column", "row", "whole"])
        if usual and chooser.random() < 0.9:
            kind = "column" if module.out_features >= module.in_features else "row"
        if kind == "column":
            rules.append((f"^{place}/weight$", "out in -> out@tp in"))
            if module.bias is not None:
                rules.append((f"^{place}/bias$", "out -> out@tp"))
        elif kind == "row":
            rules.append((f"^{place}/weight$", "out in -> out in@tp"))
    return model, mw.PathRules([*rules, (".*", ())])


def compared(seed: int, mesh: Any) -> dict[str, Any]:
    """Loss and every gradient of a tree, and how much of it stays split."""
    plain, _ = random_tree(seed)
    model, rules = random_tree(seed)
    data = torch.randn(2, 6, EMBED, dtype=torch.float64)
    weights = torch.randn(2, 6, EMBED, dtype=torch.float64)
    example = None if seed % 8 == 7 else torch.randn(1, 3, EMBED)
    found: dict[str, Any] = {"seed": seed, "wrong": []}
    if not list(plain.parameters()):
        return found
    model.train(seed % 3 != 2)
    try:
        mt.parallelize(model, mesh, rules, example=example)
    except mw.MeshwrightError as refused:
        return found | {"refused": str(refused)}
    return found | compared_in_modes(plain, model, mesh, data, weights)


def compared_in_modes(
    plain: nn.Module, model: nn.Module, mesh: Any, data: torch.Tensor, weights: torch.Tensor
) -> dict[str, Any]:
    """What differs in evaluation and in training, and how much of the model stayed split."""
    split = parallelized(model).split
    found: dict[str, Any] = {"wrong": []}
    found |= {"layers": len(split.layers), "parameters": len(split.parameters)}
    found |= {"blocks": len(split.blocks), "random": len(split.random)}
    found |= {"evaluation only": split.why_not_train is not None}
    found |= {"lost in training": len(split.not_in_training - split.layers)}
    for is_training in (False, True):
        plain.train(is_training)
        model.train(is_training)
        try:
            found["wrong"] += differences(plain, model, mesh, data, weights)
        except mw.MeshwrightError as refused:
            if not is_training or str(refused) != split.why_not_train:
                raise
        else:
            if is_training and split.why_not_train is not None:
                found["wrong"].append(["training was not refused"])
    return found


def differences(
    plain: nn.Module, model: nn.Module, mesh: Any, data: torch.Tensor, weights: torch.Tensor
) -> list[Any]:
    """Where loss and gradients differ; every rank has a seed of its own."""
    losses = []
    first = dist.get_rank() - mesh.get_local_rank("tp")
    for own, seed in ((plain, first), (model, dist.get_rank())):
        own.zero_grad()
        torch.manual_seed(seed)
        loss = (own(data) * weights).sum()
        if loss.requires_grad:
            loss.backward()
        losses.append(loss.item())
    wrong: list[Any] = []
    if abs(losses[0] - losses[1]) > 1e-9 * max(1.0, abs(losses[0])):
        wrong.append(["loss", plain.training, *losses])
    wanted = dict(plain.named_parameters())
    for name, param in model.named_parameters():
        one, other = wanted[name].grad, None if param.grad is None else param.grad.full_tensor()
        one = torch.zeros_like(wanted[name]) if one is None else one
        if mesh.size() > mesh["tp"].size():
            dist.all_reduce(one.div_(mesh.size()))  # data ranks have random numbers of their own
        other = torch.zeros_like(one) if other is None else other
        difference = (one - other).abs().max().item()
        if difference > 1e-9 * max(1.0, one.abs().max().item()):
            wrong.append([name, plain.training, difference, one.abs().max().item()])
    return wrong


def main() -> None:
    torch.set_num_threads(1)
    mesh = mt.mesh("dp=1,tp=-1", device="cpu")
    found: dict[str, list[dict[str, Any]]] = {"trees": [], "decoders": []}
    for seed in range(int(sys.argv[2])):
        for kind, compare in (("trees", compared), ("decoders", compared_decoder)):
            try:
                found[kind].append(compare(seed, mesh))
            except Exception:
                found[kind].append({"seed": seed, "wrong": [traceback.format_exc()]})
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
