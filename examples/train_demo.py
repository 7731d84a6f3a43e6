"""Train, stop, resume on a different mesh, and generate text: `python examples/train_demo.py`.

A model of a million parameters learns from the stories in the package, on 8 simulated devices. Its
tokenizer, byte-pair encoding with 1,024 tokens, is trained first. After two thirds of the steps the
run is stopped; the same command with a different mesh resumes it.
"""

import argparse
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from meshwright.data import embedded_text

VOCAB = 1024
SETTINGS = [
    "tiny", "--override", f"vocab={VOCAB}", "--batch", "8", "--seq", "64", "--cpu-devices", "8",
    "--optimizer.name", "muon", "--optimizer.learning-rate", "1e-2",
    "--optimizer.warmup-steps", "10", "--eval.sequences", "32", "--eval.every", "1000",
]  # fmt: skip
NEXT = """
{seconds:.0f} s in all. What to try next:
  {run}/run.html, in a browser: the curves of this run
  docs/train/train.md: train on your own text and your own machine

let this model continue your text, in a browser
  {meshwright} serve {run}
which mesh for a real model, and why
  {meshwright} plan llama-3.1-8b --on v5p:4x4x4 --batch 64 --seq 8192
where every shard goes
  {meshwright} show --mesh fsdp=4,tp=4 --on v5e:4x4 --model llama-3.2-1b"""


def command_line() -> list[str]:
    """The words that run `meshwright` from this folder, with the Python that runs this file."""
    script = Path(sys.executable).with_name("meshwright")
    if not script.exists():
        return [sys.executable, "-m", "meshwright.cli.main"]
    if shutil.which("meshwright") == str(script):
        return ["meshwright"]
    return [str(script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script)]


def meshwright(*arguments: str) -> None:
    """Print a command as it can be copied to a shell, and run it."""
    command = [*command_line(), *arguments]
    print(f"\n$ {shlex.join(command)}", flush=True)
    subprocess.run(command, check=True)


def train_tokenizer(text: str, file: Path) -> None:
    """Byte-pair encoding of the text, as a Hugging Face tokenizer.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.split("\n\n"), trainer)
    tokenizer.save(str(file))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", default="demo-run", help="the run's folder")
    parser.add_argument("--steps", type=int, default=240)
    options = parser.parse_args()
    folder = Path(options.run)
    if (folder / "checkpoints").exists():
        raise SystemExit(f"{options.run} holds a run already; remove it, or give --run another")
    start = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    stories, tokenizer, store = (
        folder / name for name in ("stories.txt", "tokenizer.json", "store")
    )
    stories.write_text(embedded_text(), encoding="utf-8")
    train_tokenizer(embedded_text(), tokenizer)
    meshwright(
        "data", "pack", str(stories), "--out", str(store), "--tokenizer", str(tokenizer),
        "--end-token", "<|endoftext|>", "--split-on", r"\n\n",
    )  # fmt: skip
    run = [*SETTINGS, "--data", str(store), "--steps", str(options.steps), "--run", options.run]
    meshwright("train", *run, "--mesh", "fsdp=4,tp=2", "--stop-at", str(options.steps * 2 // 3))
    meshwright("train", *run, "--mesh", "dp=2,fsdp=2,tp=2")
    meshwright(
        "generate", options.run, "--prompt", "The old", "--max-new", "80",
        "--temperature", "0.5", "--seed", "1",
    )  # fmt: skip
    run_folder, command = shlex.quote(options.run), shlex.join(command_line())
    print(NEXT.format(seconds=time.monotonic() - start, run=run_folder, meshwright=command))


if __name__ == "__main__":
    main()
