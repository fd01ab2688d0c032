"""Write what every run begins with: the policy in three channel orders, and the rows to train on and to choose by.

    python -m studies.four_bits.prepare MODEL GSM8K PREPARED

MODEL is a 16-bit folder, GSM8K one with train.jsonl and test.jsonl. PREPARED/base-N has order N, PREPARED/data the
splits train, held_out (the last 1024 training rows) and test.
"""

import shutil
import sys
from pathlib import Path

from qerl_pl.runtime.files import atomic_directory, atomic_write
from studies.quantization_loss.reordered import reorder_checkpoint

HELD_OUT = 1024
ORDERS = 3


def main(model: Path, data: Path, folder: Path) -> None:
    train, test = ((data / f"{split}.jsonl").read_text().splitlines(keepends=True) for split in ("train", "test"))
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for split, rows in {"train": train[:-HELD_OUT], "held_out": train[-HELD_OUT:], "test": test}.items():
        atomic_write(folder / "data" / f"{split}.jsonl", "".join(rows).encode())
    for order in range(ORDERS):
        if not (base := folder / f"base-{order}").is_dir():
            with atomic_directory(base) as out:
                if order:
                    reorder_checkpoint(model, out, order)
                else:
                    shutil.copytree(model, out, dirs_exist_ok=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
