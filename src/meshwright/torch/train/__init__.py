"""`meshwright train --backend torch`: the loop of every run, with FSDP2 and tensor parallelism."""

from meshwright.torch.train.command import train

__all__ = ["train"]
