"""Kill a training process in the middle of saving, many times, and look at what is left.

    python benchmarks/kill_during_save.py --kills 20

A child trains a toy whose values are a function of the step and saves all the time. It says when a
save begins and when it is complete; the parent waits for a beginning, then a random part of the
time a save takes, and sends SIGKILL. The next child restores the latest checkpoint and compares
every value with what that step must have, computed another way. Lost is a checkpoint that the child
was told is complete and that is no longer there. Kills between two saves are not counted.
"""

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

FACTOR, ADDEND = 1_664_525, 1_013_904_223  # x → FACTOR·x + ADDEND modulo 2**32, one training step
ROWS, COLUMNS = 256, 1024


def child(folder: str) -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    import jax.numpy as jnp
    import numpy as np

    import meshwright as mw
    from meshwright.checkpoint import Checkpoints

    sharding = mw.sharding("a b -> a@fsdp b@tp", mesh="fsdp=2,tp=2")
    names = [f"layer{number}" for number in range(3)]
    targets = {
        "params": {
            n: jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.uint32, sharding=sharding) for n in names
        }
    }

    def expected(step: int) -> dict[str, Any]:
        """The values of a step from the first ones at once: FACTOR**step·x + a constant."""
        constant = 0
        for _ in range(step):
            constant = (constant * FACTOR + ADDEND) % 2**32
        start = np.arange(ROWS * COLUMNS, dtype=np.uint64).reshape(ROWS, COLUMNS)
        values = (start * np.uint64(pow(FACTOR, step, 2**32)) + np.uint64(constant)) % 2**32
        return {name: values.astype(np.uint32) for name in names}

    @jax.jit
    def train(tree: Any) -> Any:
        return jax.tree.map(lambda x: x * jnp.uint32(FACTOR) + jnp.uint32(ADDEND), tree)

    checkpoints = Checkpoints(folder, keep_last=3, keep_every=50)
    step = checkpoints.latest()
    if step is None:
        step = 0
        tree = {"params": {n: jax.device_put(v, sharding) for n, v in expected(0).items()}}
    else:
        tree = checkpoints.restore(step, targets)
        if checkpoints.meta(step) != {"step": step}:
            sys.exit(f"step {step} came back with {checkpoints.meta(step)}")
        for name, values in expected(step).items():
            if not np.array_equal(np.asarray(tree["params"][name]), values):
                sys.exit(f"step {step}: {name} came back with other values")
    print("restored", step, *checkpoints.steps(), flush=True)
    while True:
        for _ in range(3):
            tree = train(tree)
            step += 1
        print("begin", step, flush=True)
        checkpoints.save(step, tree, {"step": step})
        train(tree)  # something to do meanwhile
        checkpoints.wait()
        print("done", step, flush=True)


class WrongError(Exception):
    """What must not be."""


def lines(output: IO[str]) -> Any:
    return iter(lambda: output.readline().split(), [])


def one_kill(folder: Path, chance: random.Random, must_have: int) -> dict[str, Any]:
    """Start a child, see what it found, kill it inside a save; says what was complete before."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--child", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        said = next(lines(process.stdout), None)
        if said is None or said[0] != "restored":
            raise WrongError(process.stderr.read().strip()[-2000:] or "the child said nothing")
        found = int(said[1])
        if found < must_have:
            raise WrongError(f"step {must_have} was complete; the latest now is {found}")
        saves: list[float] = []
        began = 0.0
        wait_for = chance.randint(3, 6)
        for word, number in lines(process.stdout):
            now = time.perf_counter()
            if word == "done":
                saves.append(now - began)
                acknowledged = int(number)
                continue
            began = now
            if len(saves) >= wait_for:
                break
        inside, saving = True, int(number)
        usual = sorted(saves[1:])[len(saves[1:]) // 2]  # the first one compiles
        delay = chance.uniform(0, usual)
        time.sleep(delay)
    finally:
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split()
        process.wait()
        process.stdout.close()
        process.stderr.close()
    # what it still said between the last line read and its death
    for word, number in zip(rest[0::2], rest[1::2], strict=True):
        inside = word == "begin"
        saving, acknowledged = (int(number), acknowledged) if inside else (saving, int(number))
    left = sorted(path.name.split("-")[0] for path in folder.iterdir() if path.name.startswith("."))
    return {
        "found": found,
        "saving": saving,
        "delay": delay,
        "usual": usual,
        "inside": inside,
        "acknowledged": acknowledged,
        "left": " ".join(left) or "nothing",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", metavar="FOLDER", help="what the killed process is started with")
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child)
    chance = random.Random(arguments.seed)
    print("kill  restored  saving   after ms of  left behind        complete before")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "checkpoints")
        inside, must_have = 0, 0
        try:
            while inside < arguments.kills:
                row = one_kill(folder, chance, must_have)
                must_have = row["acknowledged"]
                inside += row["inside"]
                number = inside if row["inside"] else "–"
                print(
                    f"{number:>4}  {row['found']:>8}  {row['saving']:>6}  "
                    f"{1000 * row['delay']:>6.0f} {1000 * row['usual']:>5.0f}  {row['left']:<17}  "
                    f"{row['acknowledged']:>6}",
                    flush=True,
                )
            # one more child looks at what the last kill left
            last = one_kill(folder, chance, must_have)
        except WrongError as failure:
            print(f"FAILED: {failure}")
            return 1
    print(
        f"{inside} kills inside a save; after each, the latest checkpoint ({last['found']} at last)"
    )
    print("was whole, had the values of its step, and no complete checkpoint was lost")
    return 0


if __name__ == "__main__":
    sys.exit(main())
