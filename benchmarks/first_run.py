"""Table and picture of finished runs of one model: reward, held-out accuracy, test accuracy before and after.

Each run is a folder FOLDER of `qerl fit`, evaluated by `qerl test --report {}`, beside FOLDER.start, the same test
before training, and FOLDER.mem, the memory of the GPU in MiB, one sample a line.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from report import markdown, write
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

WINDOW = 10
"""Rollouts over which the plotted reward is averaged."""
COLUMNS = ("run", "minutes", "peak GiB", "greedy before", "greedy after", "sampled before", "sampled after")


def scalars(run: Path, tag: str) -> list[tuple[int, float]]:
    """(step, value) of a tag over all event files of a run."""
    events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def accuracy(folder: Path, metric: str) -> list[float]:
    """A metric of the test set, with the ends of its 95 % interval."""
    found = json.loads((folder / "evaluation.json").read_text())["sets"]["test"]["metrics"][metric]
    return [found["value"], found["low"], found["high"]]


def row(name: str, run: Path) -> dict[str, Any]:
    """Everything that is told of a run."""
    start, summary = run.with_name(f"{run.name}.start"), json.loads((run / "summary.json").read_text())
    return {
        "run": name,
        "quantization": summary["quantization"],
        "rollouts": summary["steps"],
        "minutes": summary["train_seconds"] / 60,
        "peak GiB": max(map(float, run.with_name(f"{run.name}.mem").read_text().split())) / 1024,
        **{
            f"{name} {when}": accuracy(folder, metric)
            for name, metric in (("greedy", "accuracy"), ("sampled", "pass@1"))
            for when, folder in (("before", start), ("after", run))
        },
        "reward": scalars(run, "reward/mean"),
        "held_out": scalars(run, "val/accuracy"),
    }


def shown(value: Any) -> str:
    """A table's cell: an interval, or a number with one decimal."""
    if isinstance(value, list):
        return "{:.3f} [{:.3f}, {:.3f}]".format(*value)
    return value if isinstance(value, str) else f"{value:.1f}"


def draw(rows: list[dict[str, Any]], picture: Path) -> None:
    """Mean reward of the last rollouts as a line, held-out greedy accuracy as points, a color for each run."""
    figure, axes = plt.subplots(figsize=(6, 3.2), constrained_layout=True)  # read at 390 pixels, too
    for index, one in enumerate(rows):
        values = [value for _, value in one["reward"]]
        means = [sum(values[max(0, i - WINDOW + 1) : i + 1]) / min(i + 1, WINDOW) for i in range(len(values))]
        axes.plot(range(1, len(means) + 1), means, color=f"C{index}", label=f"{one['run']}: training reward")
        steps, held_out = zip(*one["held_out"], strict=True)
        rollouts = [step + 1 for step in steps]
        axes.plot(rollouts, held_out, "o", color=f"C{index}", label=f"{one['run']}: held-out accuracy")
    axes.set(xlabel="rollout", ylabel="share of right answers", ylim=(0.35, 0.85))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    figure.savefig(picture, dpi=150)


def main() -> None:
    """Read the runs, write table and picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", nargs=2, action="append", required=True, metavar=("NAME", "FOLDER"))
    parser.add_argument("--out", type=Path, required=True, help="folder of the table")
    parser.add_argument("--name", required=True, help="of the table's files")
    parser.add_argument("--picture", type=Path, required=True)
    parser.add_argument("--machine", type=json.loads, required=True, help="GPU, versions and commit, as JSON")
    args = parser.parse_args()
    rows = [row(name, Path(folder)) for name, folder in args.run]
    draw(rows, args.picture)
    cells = [[shown(one[name]) for name in COLUMNS] for one in rows]
    write(args.out, args.name, markdown(COLUMNS, cells), rows, args.machine)


if __name__ == "__main__":
    main()
