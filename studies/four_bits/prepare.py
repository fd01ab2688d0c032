"""Write what every run begins with: the policy in three channel orders, and the rows to train on and to choose by.

    python -m studies.four_bits.prepare MODEL GSM8K PREPARED

MODEL is a 16-bit folder, GSM8K one with train.jsonl and test.jsonl. PREPARED/base-N has order N, PREPARED/data the
splits train, held_out (the last 1024 training rows) and test.
"""

import sys
from pathlib import Path

from studies.train_on_4_bits.pretrained import read_rows
from studies.train_on_4_bits.starts import write_base, write_data

HELD_OUT = 1024
ORDERS = 3


def main(model: Path, data: Path, folder: Path) -> None:
    rows = read_rows(data / "train.jsonl")
    folder.mkdir(parents=True, exist_ok=True)
    write_data(data, folder / "data", rows[-HELD_OUT:], rows[:-HELD_OUT])
    for order in range(ORDERS):
        write_base(model, folder / f"base-{order}", order)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
