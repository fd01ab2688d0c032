"""What a number format leaves of a policy's accuracy over several roundings, from files of `pretrained measure`.

    python -m studies.train_on_4_bits.pretrained measure BASE --format nvfp4 --data GSM8K --out FOLDER/nvfp4-0.json
    python -m studies.train_on_4_bits.format_accuracy "Before fine-tuning=FOLDER" --name format_accuracy

Each FOLDER has files FORMAT-ROUNDING.json of policies that were prepared alike; its title stands above its table.
Differences from 16 bits (`none`) are paired by rounding, with 95 % Student's t intervals over the roundings. Recovery
is the accuracy as a share of that of 16 bits.
"""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from qerl_pl.errors import UserError
from studies.train_on_4_bits.intervals import interval

LABELS = {"none": "16-bit", "nvfp4": "NVFP4", "mxfp4": "MXFP4", "nf4": "NF4", "gaussian": "Gaussian error"}
ACCURACIES = ("greedy", "sampled")
METRICS = (*ACCURACIES, "nats")
QUANTITIES = (*METRICS, "tokens", "truncated")
Roundings = dict[str, dict[str, float]]
"""Means over the questions, by rounding."""


def summary(measured: Mapping[str, Any]) -> dict[str, float]:
    """Means over the questions of a file of `pretrained measure`."""
    means = {metric: statistics.fmean(measured[metric]) for metric in METRICS}
    return {**means, "tokens": measured["tokens"], "truncated": measured["truncated"]}


def read(folder: Path) -> tuple[dict[str, Roundings], list[dict[str, str]]]:
    """The summaries of a folder's files by format and rounding, and where each file was measured.

    Raises:
        UserError: The folder has no file of 16 bits, with which formats are compared.
    """
    formats: dict[str, Roundings] = {}
    environments = []
    for kind in LABELS:
        for path in sorted(folder.glob(f"{kind}-*.json")):
            measured = json.loads(path.read_text())
            formats.setdefault(kind, {})[path.stem.rpartition("-")[2]] = summary(measured)
            environments.append(measured["environment"])
    if "none" not in formats:
        raise UserError(f"formats are compared with 16 bits; {folder} has no none-ROUNDING.json: measure --format none")
    return formats, environments


def means(formats: Mapping[str, Roundings]) -> str:
    """A row for each format: means over its roundings, and differences from 16 bits over those of both."""
    less = "less 16-bit [95 %]"
    rows = []
    for kind, roundings in formats.items():
        mean = {name: statistics.fmean(each[name] for each in roundings.values()) for name in QUANTITIES}
        shared = [rounding for rounding in roundings if rounding in formats["none"]]
        cells: list[Any] = [LABELS[kind], len(roundings)]
        for metric in METRICS:
            own, dense = ([each[rounding][metric] for rounding in shared] for each in (roundings, formats["none"]))
            compared: list[Any] = [interval([a - b for a, b in zip(own, dense, strict=True)])]
            compared += [f"{sum(own) / sum(dense):.0%}"] if metric in ACCURACIES else []
            cells += [f"{mean[metric]:.3f}", *("" if kind == "none" else cell for cell in compared)]
        rows.append([*cells, f"{mean['tokens']:.0f}", f"{mean['truncated']:.1%}"])
    headers = [cell for name in ACCURACIES for cell in (f"{name} accuracy", less, "recovery")]
    return report.markdown(["format", "roundings", *headers, "nats per token", less, "tokens", "truncated"], rows)


def each_rounding(formats: Mapping[str, Roundings]) -> str:
    """Greedy and sampled accuracy in each rounding, a row for each format."""
    names = sorted({name for roundings in formats.values() for name in roundings}, key=int)
    rows = []
    for kind, roundings in formats.items():
        known = (roundings.get(name) for name in names)
        cells = ["" if values is None else f"{values['greedy']:.3f}, {values['sampled']:.3f}" for values in known]
        rows.append([LABELS[kind], *cells])
    return report.markdown(["greedy, sampled", *(f"rounding {name}" for name in names)], rows)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", metavar="TITLE=FOLDER")
    parser.add_argument("--name", required=True, help="of the files in --out")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    args = parser.parse_args(words)
    results, parts, environments = {}, [], list[dict[str, str]]()
    for title, _, folder in (argument.rpartition("=") for argument in args.folders):
        try:
            results[title], measured_on = read(Path(folder))
        except UserError as error:
            raise SystemExit(f"format_accuracy: {error}") from error
        environments += measured_on
        parts += [f"{title}:", means(results[title]), each_rounding(results[title])]
    report.write(args.out, args.name, "\n\n".join(parts), results, report.machines(environments))


if __name__ == "__main__":
    main()
