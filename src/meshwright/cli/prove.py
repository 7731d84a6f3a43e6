"""`meshwright prove`: compile the step of train or serve for a machine that is not here."""

from collections.abc import Sequence

HELP = """usage: meshwright prove MODEL --on MACHINE --mesh … [the settings of train]
       meshwright prove --plan FILE [--choice N]
       meshwright prove MODEL --on MACHINE --serve --mesh … --batch N --seq N
                        [--dtype float32] [--engine.weights int8|fp8] [--engine.cache fp8]

Compile a training step with a machine's own compiler; the machine is not needed. The step is the
one that `meshwright train` with these settings would run on MACHINE. Says whether it fits, the
compiler's own count of memory, every collective, and how far the plan was off. Results are kept, by
content.

  --on MACHINE         v5p:4x4x8, v5p-256, h100:16x8, 2*v5e:16x16, cpu:8
  --plan FILE          what `meshwright plan --json` wrote; its best mesh, or choice N (from 1)
  --serve              the decode and the prefill step of `meshwright serve` instead: --batch
                       sequences over all replicas, each of up to --seq tokens; --dtype,
                       --engine.weights and --engine.cache as in serve
  --rows N             collectives to show (default 12; 0: all)
  --no-cache           compile again
  --json               plain data
  --fail-on WHAT       exit status 1: surprise (a collective that was not planned), rewrite (one
                       that the compiler made another of), or memory (it does not fit)

TPUs need meshwright[tpu], GPUs meshwright[cuda]. meshwright train --help lists the settings."""


def prove_command(arguments: Sequence[str]) -> None:
    """Compile a training step with a machine's own compiler; the machine is not needed.

    meshwright prove llama-3.1-8b --on v5p:4x4x4 --mesh fsdp=64 --batch 64 --seq 8192
    """
    words = list(arguments)
    if not words or "--help" in words or "-h" in words:
        print(HELP)
    else:
        from meshwright.cli.prove_train import prove_train

        prove_train(words)
