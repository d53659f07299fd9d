"""python -m benchmarks.positions: key positions that decoding reads, and their tokens.

Slots are simulated that draw completions in turn, of equal or exponentially distributed
lengths. Printed is the share of their own positions that is read and holds no token: of
rings that grow in stages, of blocks of these that hold tokens of a few slots, and of
pages that belong to one slot each.
"""

import argparse
import sys

import numpy as np

from curax.arrays import cache_sizes
from curax.models import parts


def shares(
    rows: int, slots: int, mean: int, most: int, context: int, *, unequal: bool
) -> dict[str, float]:
    """Share of the positions read without a token, by way of reading."""
    random = np.random.default_rng(0)
    drawn = np.ceil(random.exponential(mean, rows)) if unequal else np.full(rows, mean)
    queue = list(np.clip(drawn, 1, most).astype(int))
    size, block = parts.piece(2, 64, 4)
    length, count = np.array(queue[:slots]), np.zeros(slots, int)
    del queue[:slots]
    stages = list(cache_sizes.widths(context, most))
    time, held, read = 0, 0, dict.fromkeys(("rings", "blocks", "pages"), 0)
    while (works := count < length).any():
        if len(stages) > 1 and (count[works] >= stages[0]).any():
            del stages[0]
        count[works] += 1
        held += count[works].sum()
        read["rings"] += slots * stages[0]
        age = (time - np.arange(-(-most // block) * block)) % most
        seen = (age < count[:, None]) & works[:, None] & (np.arange(len(age)) < most)
        some = seen.reshape(slots // size, size, -1, block).any((1, 3))
        read["blocks"] += some.sum() * size * block
        read["pages"] += (-(-count[works] // block) * block).sum()
        for slot in np.nonzero(count == length)[0]:
            if queue:
                length[slot], count[slot] = queue.pop(0), 0
        time += 1
    return {way: 1 - held / positions for way, positions in read.items()}


def main() -> int:
    """Print the table of docs/benchmarks.md."""
    argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0]).parse_args()
    print("| completions | slots | rings | blocks | pages |\n|---|---|---|---|---|")
    for rows, slots, mean, most, unequal in (
        (64, 64, 1024, 1024, False),
        (512, 64, 1024, 1024, False),
        (512, 64, 128, 1024, True),
        (512, 512, 128, 1024, True),
        (512, 64, 512, 4096, True),
    ):
        found = shares(rows, slots, mean, most, 512, unequal=unequal)
        kind = f"{rows}, mean {mean} of {most}" if unequal else f"{rows} of {most}"
        cells = " | ".join(f"{share:.2f}" for share in found.values())
        print(f"| {kind} | {slots} | {cells} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
