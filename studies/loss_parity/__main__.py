"""Losses, corrections and advantages of this package beside TRL's and verl's own code, on the same random batch.

    pip install --no-deps --target peers trl==1.16.0 verl==0.9.1 tensordict omegaconf hydra-core codetiming \
        antlr4-python3-runtime==4.9.3 pyvers orjson
    PYTHONPATH=.:kernels:peers python -m studies.loss_parity --out studies/loss_parity

The JSON holds the batch and what their functions return; `tests/test_loss_parity.py` compares with it without them.
"""

import argparse
from importlib.metadata import version
from pathlib import Path

from benchmarks import report
from studies.loss_parity.pieces import OURS, Batch, as_lists, largest_difference
from studies.loss_parity.with_trl import TRL
from studies.loss_parity.with_verl import VERL


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("results"))
    out = parser.parse_args().out
    batch = Batch.random()
    recorded, rows, notes = [], [], []
    for peer in [*TRL, *VERL]:
        expected = peer.call(batch)
        size, close = largest_difference(OURS[peer.piece](batch), expected)
        if close == bool(peer.differs):
            raise SystemExit(f"{peer.piece} beside {peer.function}: difference {size:.3g}; expected {peer.differs!r}")
        if peer.differs:
            notes.append(f"{len(notes) + 1}. {peer.piece}, {peer.package}: {peer.differs}")
        verdict = f"differs, note {len(notes)}" if peer.differs else "same"
        rows.append([peer.piece, f"{peer.package} `{peer.function}`", f"{size:.1e}", verdict])
        recorded.append(
            {
                "piece": peer.piece,
                "peer": f"{peer.package} {peer.function}",
                "differs": peer.differs,
                "difference": size,
                "results": {name: as_lists(value) for name, value in expected.items()},
            }
        )
    versions = {name: version(name) for name in ("trl", "verl")}
    tables = report.markdown(["piece", "compared with", "largest absolute difference", "verdict"], rows)
    tables += "\n\n" + "\n".join(notes) + "\n\n" + ", ".join(f"{name} {number}" for name, number in versions.items())
    report.write(out, "loss_parity", tables, {"versions": versions, "batch": batch.json(), "pieces": recorded})


if __name__ == "__main__":
    main()
