"""Train a Hugging Face model on a (dp, tp) mesh, and resume on another.

torchrun --nproc-per-node 6 examples/torch_2d.py --mesh dp=2,tp=3
"""

import argparse

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import meshwright as mw

parser = argparse.ArgumentParser()
parser.add_argument("--model", help="folder of a Hugging Face model; by default a tiny one")
parser.add_argument("--mesh", default="dp=-1,tp=3")
parser.add_argument("--out", default="runs/torch-2d")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--dtype", help="of compute, such as bf16")
args = parser.parse_args()
TINY = LlamaConfig(
    vocab_size=384, hidden_size=96, intermediate_size=192, num_hidden_layers=2,
    num_attention_heads=12, num_key_value_heads=6, tie_word_embeddings=True,
)  # fmt: skip

mesh = mw.torch.mesh(args.mesh)
first = dist.get_rank() == 0
with torch.device("meta"):  # no rank ever has the whole model
    config = AutoConfig.from_pretrained(args.model) if args.model else TINY
    model = AutoModelForCausalLM.from_config(config)
if first:
    print(mw.torch.explain(model, mesh))
mw.torch.parallelize(
    model, mesh, sequence_parallel=True, loss_parallel=True, mixed_precision=args.dtype
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
checkpoints = mw.torch.Checkpoints(args.out)
begin = checkpoints.latest() or 0
if begin:
    checkpoints.restore(begin, model, optimizer)
elif args.model:
    mw.torch.load_hf(model, args.model)
else:
    mw.torch.initialize(model, seed=0)

index, count = mw.torch.data_shard(mesh)
for step in range(begin, args.steps):
    starts = torch.randint(0, 384, (12, 1), generator=torch.Generator().manual_seed(step))
    batch = ((starts + torch.arange(48)) % 384).chunk(count)[index].to(mesh.device_type)
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss.detach().div_(dist.get_world_size()))
    if first:
        print(f"step {step + 1}: loss {loss.item():.5f}")
if begin < args.steps:
    checkpoints.save(args.steps, model, optimizer)
dist.destroy_process_group()
