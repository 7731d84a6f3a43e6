"""plan.memory's formulas with their numbers filled in: what each kind comes from.

    formulas(job, choice, machine)["parameters"]
    # 4 bytes · ((32 layers · 218,103,808 + 1,050,673,152) / 64 devices + 266,240)

Tests work each of them out and hold it to plan.memory.
"""

from meshwright.machines import Machine
from meshwright.planner.candidates import with_strategy
from meshwright.planner.memory import (
    AHEAD,
    MLP_ARRAYS_LEFT,
    PROMPT,
    TOKEN_FIELDS,
    attention_arrays,
    casts_at_end,
    casts_kept,
    gap_of_embedding,
    gathers_ahead,
    gradient_under_way,
    head_scattered,
    kept_head,
    loss_numbers,
    loss_streams,
    moments,
    recomputes_early,
    saved_of_token,
    scores_shape,
    vectors,
)
from meshwright.planner.parts import (
    attention_weights,
    item_bytes,
    length,
    mlp_chunks,
    mlp_weights,
    rows,
    strategy_of,
    tokens,
    vocab,
)
from meshwright.planner.result import Choice, Job


def formulas(job: Job, choice: Choice, machine: Machine) -> dict[str, str]:
    """By kind of memory, how its bytes come about at the fullest moment."""
    if job.kind == "serve":
        return _serving(job, choice)
    choice = with_strategy(job, choice, machine)
    found = moments(job, choice, machine)
    fullest = max(found, key=lambda moment: found[moment])
    kinds = _always(job, choice, machine)
    write = {"loss": _loss, "backward": _backward, "attention": _turn_of_attention, "end": _end}
    parts = write[fullest](job, choice, machine)
    cast = item_bytes(job.param_dtype) != item_bytes(job.dtype)
    if cast and (fullest != "end" or casts_at_end(choice, machine)):
        of_layers = f"{_layers(job)} / {_split(choice)} devices"
        parts["weights in bfloat16"] = f"{item_bytes(job.dtype)} bytes · {of_layers}"
    if gathers_ahead(job, choice, machine):
        words = f"{AHEAD} · {item_bytes(job.dtype)} bytes · {_table(job, choice)}"
        parts["gathered weights"] = _sum(parts.get("gathered weights"), words)
    for kind, words in parts.items():
        kinds[kind] = _sum(kinds.get(kind), words)
    return kinds


def _sum(first: str | None, second: str) -> str:
    return f"{first} + {second}" if first else second


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) or value >= 1e6 else f"{value:,.2f}"


def _layers(job: Job) -> str:
    model = job.model
    return f"{model.layers} layers · {attention_weights(model) + mlp_weights(model):,}"


def _matrices(job: Job, choice: Choice) -> str:
    """Of layers and ends, on a device."""
    model = job.model
    ends = (1 if model.tied_embeddings else 2) * vocab(job, choice) * model.embed
    return f"({_layers(job)} + {ends:,}) / {_split(choice)} devices"


def _split(choice: Choice) -> int:
    return choice.tp * choice.fsdp * choice.sp


def _table(job: Job, choice: Choice) -> str:
    return f"{vocab(job, choice):,} · {job.model.embed:,} / tp {choice.tp}"


def _stream(job: Job, choice: Choice) -> str:
    used = item_bytes(job.dtype)
    return f"{used} bytes · {tokens(job, choice):,} tokens · {job.model.embed:,}"


def _always(job: Job, choice: Choice, machine: Machine) -> dict[str, str]:
    model, kept, used = job.model, item_bytes(job.param_dtype), item_bytes(job.dtype)
    small = f"{_number(vectors(job, choice))}"
    whole = f"({_matrices(job, choice)} + {small})"
    ends = (1 if model.tied_embeddings else 2) * vocab(job, choice) * model.embed
    optimizer = {
        "adamw": f"2 · {kept} bytes · {whole}",
        "lion": f"{kept} bytes · {whole}",
        "adafactor": f"0.01 · {kept} bytes · {whole}",
        "muon": f"{kept} bytes · (({_layers(job)} + 2 · {ends:,}) / {_split(choice)} devices + "
        f"2 · {small})",
    }
    batch = rows(job, choice) * choice.accumulation
    fields = TOKEN_FIELDS if job.documents else 2
    found = {
        "parameters": f"{kept} bytes · {whole}",
        "optimizer": optimizer[job.optimizer],
        "batch": f"4 bytes · {fields} arrays · {batch:,} rows · {length(job, choice):,} tokens",
    }
    if casts_kept(job, choice, machine):
        found["weights in bfloat16"] = f"{used} bytes · {ends:,} / {_split(choice)} devices"
    if choice.accumulation > 1:
        found["gradients"] = f"4 bytes · {_matrices(job, choice)}"
    return found


def _saved(job: Job, choice: Choice, machine: Machine) -> str:
    numbers, sums = saved_of_token(job, choice, machine)
    each = f"{item_bytes(job.dtype)} bytes · {_number(numbers)}"
    if sums:
        each = f"({each} + 4 bytes · {_number(sums)})"
    return f"{job.model.layers} layers · {tokens(job, choice):,} tokens · {each}"


def _loss(job: Job, choice: Choice, machine: Machine) -> dict[str, str]:
    used, (head, logits) = item_bytes(job.dtype), loss_numbers(job, choice, machine)
    summed = f"({used} + {head - used})" if head > used else f"{used}"
    streams = f"{loss_streams(machine)} · {_stream(job, choice)}"
    found = {
        "saved activations": _saved(job, choice, machine),
        "loss": f"{summed} bytes · {_table(job, choice)} + {used} bytes · {logits:,} tokens "
        f"· {vocab(job, choice):,} / tp {choice.tp} + {streams}",
    }
    if gap := gap_of_embedding(job, choice, machine):
        found["gathered weights"] = f"{used} bytes · {gap:,} / tp {choice.tp}"
    if recomputes_early(choice, machine):
        _, keys = attention_arrays(job, choice)
        arrays = f"{job.model.embed:,} + {_heads(job, choice, 4, keys)}"
        found["attention"] = f"{used} bytes · {tokens(job, choice):,} tokens · ({arrays})"
    return found


def _heads(job: Job, choice: Choice, queries: int, keys: int) -> str:
    model = job.model
    heads = f"({queries} · {model.heads} + {keys} · {model.kv_heads}) heads"
    return f"{heads} · {model.head_dim} / tp {choice.tp}"


def _backward(job: Job, choice: Choice, machine: Machine) -> dict[str, str]:
    model, used = job.model, item_bytes(job.dtype)
    is_split = choice.fsdp * choice.sp > 1
    layer = f"{attention_weights(model) + mlp_weights(model):,} / tp {choice.tp}"
    ends = (1 if model.tied_embeddings else 2) * vocab(job, choice) * model.embed
    gradients = f"{_layers(job)} / {_split(choice)} devices"
    if choice.accumulation > 1:
        gradients = _matrices(job, choice)
    return {
        "saved activations": _saved(job, choice, machine),
        "gradients": f"{used} bytes · {gradients}",
        "gathered weights": f"{2 if is_split else 1} · {used} bytes · {layer}",
        "working activations": _working(job, choice, 5),
        "loss": f"{used} bytes · {ends:,} / {_split(choice)} devices"
        if head_scattered(job, choice)
        else f"{kept_head(job, choice, machine)} bytes · {_table(job, choice)}",
    }


def _scores(job: Job, choice: Choice, machine: Machine) -> str:
    many, queries, heads, keys = scores_shape(job, choice, machine)
    if not many:
        return ""
    return (
        f"3 · 4 bytes · {many:,} rows · {queries:,} queries · {_number(heads)} heads · "
        f"{keys:,} keys"
    )


def _working(job: Job, choice: Choice, of_mlp: int) -> str:
    mlp = job.model.mlp / choice.tp / mlp_chunks(job, choice)
    return (
        f"{item_bytes(job.dtype)} bytes · {tokens(job, choice):,} tokens · "
        f"({of_mlp} · {_number(mlp)} + 4 · {job.model.embed:,})"
    )


def _turn_of_attention(job: Job, choice: Choice, machine: Machine) -> dict[str, str]:
    model, used = job.model, item_bytes(job.dtype)
    found = _backward(job, choice, machine)
    found["working activations"] = _working(job, choice, MLP_ARRAYS_LEFT[machine.is_tpu])
    gathered = "" if strategy_of(job, choice) == "ring" else _attention(job, choice)
    if machine.is_tpu:
        parts = [_attention(job, choice)]
    else:
        layer = attention_weights(model) + mlp_weights(model)
        weights = f"{layer:,}"
        if choice.fsdp * choice.sp > 1:
            weights = f"({layer:,} + {attention_weights(model):,})"
        found["gathered weights"] = f"{used} bytes · {weights} / tp {choice.tp}"
        heads = _heads(job, choice, *attention_arrays(job, choice))
        parts = [f"{used} bytes · {tokens(job, choice):,} tokens · {heads}", gathered]
    parts.append(_scores(job, choice, machine))
    return found | {"attention": " + ".join(filter(None, parts))}


def _attention(job: Job, choice: Choice) -> str:
    model, used, here = job.model, item_bytes(job.dtype), tokens(job, choice)
    keys = f"2 · {here:,} tokens · {model.kv_heads // choice.tp} heads · {model.head_dim}"
    queries = f"{here:,} tokens · {model.heads // choice.tp} heads · {model.head_dim}"
    return {
        "ring": f"(2 · {used} + 3 · 4) bytes · {keys} + 5 · 4 bytes · {queries}",
        "allgather": f"({used} + 4) bytes · {keys} · sp {choice.sp}",
        "ulysses": f"3 · {used} bytes · {queries}",
        "none": "",
    }[strategy_of(job, choice)]


def _end(job: Job, choice: Choice, machine: Machine) -> dict[str, str]:
    model, used = job.model, item_bytes(job.dtype)
    found = {
        "gradients": f"{used} bytes · {_matrices(job, choice)} + (4 + {used}) bytes · "
        f"{_table(job, choice)} + {_stream(job, choice)}"
    }
    if model.tied_embeddings:
        found["loss"] = f"{kept_head(job, choice, machine)} bytes · {_table(job, choice)}"
    if gradient_under_way(choice, machine):
        layer = attention_weights(model) + mlp_weights(model)
        found["gathered weights"] = f"{used} bytes · {layer:,} / tp {choice.tp}"
    return found


def _serving(job: Job, choice: Choice) -> dict[str, str]:
    model, used = job.model, item_bytes(job.dtype)
    here = -(-job.batch // choice.dp)
    seen = min(job.seq, model.sliding_window or job.seq)
    return {
        "parameters": f"{used} bytes · ({_matrices(job, choice)} + "
        f"{_number(vectors(job, choice))})",
        "key-value cache": f"{used} bytes · 2 · {model.layers} layers · {here:,} rows · {seen:,} "
        f"tokens · {model.kv_heads} heads · {model.head_dim} / tp {choice.tp}",
        "working activations": f"{used} bytes · {min(job.seq, PROMPT):,} tokens · (2 · "
        f"{model.mlp:,} / tp {choice.tp} + 4 · {model.embed:,}) + 4 bytes · {here:,} rows · "
        f"{vocab(job, choice):,} / tp {choice.tp}",
    }
