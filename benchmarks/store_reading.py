"""What verifying a token store costs: sequences read from it, and from the same file memory-mapped.

    python benchmarks/store_reading.py           # prints a table
    python benchmarks/store_reading.py --write   # and puts it into RESULTS.md

Random sequences of a store of 64 MiB in the page cache, one thread, medians of CPU time. The peer
is a memory map of tokens.bin that verifies nothing, copied to int32 as the loader does.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from results import here, write_section

TOKENS = 32 * 2**20  # of two bytes
LENGTHS = (2048, 8192, 131072)


def packed(folder: Path) -> Any:
    """A store of documents of random letters."""
    from meshwright.data.packing import new_store
    from meshwright.data.store import TokenStore
    from meshwright.data.tokenizers import ByteTokenizer

    letters = np.random.default_rng(0).integers(97, 123, TOKENS, np.uint8).tobytes().decode()
    with new_store(folder / "random.store", ByteTokenizer()) as writer:
        writer.add([letters[i : i + 2**20] for i in range(0, TOKENS, 2**20)])
        writer.finish({})
    return TokenStore.open(folder / "random.store")


def microseconds(read: Callable[[int], Any], length: int, times: int = 300) -> float:
    """The median of reading a sequence somewhere in the store."""
    starts = np.random.default_rng(length).integers(0, TOKENS - length, times)
    found = []
    for start in starts.tolist():
        began = time.process_time()
        read(start)
        found.append(time.process_time() - began)
    return 1e6 * statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    lines = ["| sequence | verified | memory map | |", "|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as temporary:
        store = packed(Path(temporary))
        mapped = np.memmap(store.path / "tokens.bin", store.tokens.dtype, "r")
        for length in LENGTHS:

            def verified(start: int, length: int = length) -> Any:
                return store.tokens[start : start + length].astype(np.int32)

            def plain(start: int, length: int = length) -> Any:
                return np.asarray(mapped[start : start + length]).astype(np.int32)

            ours, peer = (microseconds(read, length) for read in (verified, plain))
            lines.append(
                f"| {length:,} tokens | {ours:.0f} µs, {length / ours:.0f} M tokens/s | "
                f"{peer:.0f} µs | {ours / peer:.1f}× |"
            )
    said = f"`python benchmarks/store_reading.py --write`, {here()}. One thread, CPU time, medians."
    print("\n".join([said, *lines]))
    if options.write:
        write_section("Reading a verified token store", said, lines)


if __name__ == "__main__":
    main()
