"""`qerl compare`: the paired difference of two evaluations, from the samples that they wrote."""

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qerl_pl.errors import UserError

NORMAL_95 = 1.96
"""Standard errors on either side of a mean, in a 95 % interval by the normal distribution."""


def compare(first: Path, second: Path) -> str:
    """A table of the second evaluation less the first one, for each set greedy and sampled, paired by question.

    A question's sampled value is the share of right samples. The interval is the mean difference ± 1.96 standard errors
    over questions, by the normal distribution.

    Args:
        first: Folder of a run with evaluation.json, or a file of samples (evaluation/DIGEST.jsonl).
        second: The other one.

    Raises:
        UserError: There are no samples, or fewer than two questions of a set in common.
    """
    a, b = _answers(first), _answers(second)
    both = a.keys() & b.keys()
    rows = ["| | questions | A | B | B − A | 95 % |", "|---|---|---|---|---|---|"]
    for name in sorted({name for name, *_ in both}):
        for kind in ("greedy", "sampled"):
            pairs = [(a[key][kind], b[key][kind]) for key in both if key[0] == name]
            values = np.array([(np.mean(one), np.mean(other)) for one, other in pairs if one and other])
            if len(values) > 1:
                mean, low, high = paired_interval(values[:, 1] - values[:, 0])
                label = f"{name}, {kind}" if name else kind
                before, after = values.mean(axis=0)
                interval = f"{low:+.3f} to {high:+.3f}" if low < high else "–"  # of equal differences there is none
                cells = f"{len(values)} | {before:.3f} | {after:.3f} | {mean:+.3f} | {interval}"
                rows.append(f"| {label} | {cells} |")
    if len(rows) == 2:
        raise UserError(
            f"compare pairs evaluations by question, two of a set or more; {first} and {second} share {len(both)} in "
            f"{len({name for name, *_ in both})} sets; evaluate both on the same data"
        )
    alone = len(a.keys() ^ b.keys())
    return "\n".join(
        [*rows, *([f"{alone} questions are in one of the evaluations only, and left out"] if alone else [])]
    )


def paired_interval(differences: npt.NDArray[np.float64]) -> tuple[float, float, float]:
    """Mean of differences [n], n of at least 2, and the ends of its 95 % interval by the normal distribution."""
    mean, error = float(differences.mean()), float(differences.std(ddof=1) / np.sqrt(len(differences)))
    return mean, mean - NORMAL_95 * error, mean + NORMAL_95 * error


Question = tuple[str, str, str | None, str | None]
"""A question's set, id, text and reference: an id alone may be another row's in another table."""


def _answers(place: Path) -> dict[Question, dict[str, list[bool]]]:
    """Whether each greedy completion and each sample is right, by question; of several ranks all."""
    file, sets = place, dict[str, Any]()
    if not place.is_file():
        report = place / "evaluation.json"
        if not report.is_file():
            raise UserError(
                f"compare reads what `qerl test` wrote; {place} has no evaluation.json; name a run's folder, or a "
                "file of samples"
            )
        try:
            evaluation = json.loads(report.read_bytes())
            file, sets = place / evaluation["samples"], evaluation.get("sets", {})
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"compare reads evaluation.json as `qerl test` writes it; {report} is another ({error!r}); evaluate "
                "again"
            ) from error
    counts = {name: one["samples"] for name, one in sets.items()}  # a file may have more, of an earlier evaluation
    unnamed = counts.get("test", counts.get("val", math.inf))
    files = [one for one in (file, *sorted(file.parent.glob(f"{file.stem}.*{file.suffix}"))) if one.is_file()]
    if not files:
        raise UserError(f"compare reads the samples that evaluation.json names; {file} is not there; copy it too")
    grades: dict[tuple[str, str], dict[int | None, bool]] = defaultdict(dict)
    texts: dict[tuple[str, str], tuple[str | None, str | None]] = {}
    for line in (line for one in files for line in one.read_bytes().splitlines()):
        try:
            record = json.loads(line)
            key, text = (record["set"], record["prompt_id"]), (record.get("prompt"), record.get("reference"))
            if texts.setdefault(key, text) != text:  # later lines are of the edited row
                grades[key].clear()
                texts[key] = text
            if (record["sample"] or 0) < counts.get(record["set"], unnamed if not record["set"] else math.inf):
                grades[key][record["sample"]] = bool(record["correct"])
        except (ValueError, KeyError, TypeError):
            continue  # a line that a kill cut off
    return {
        (*key, *texts[key]): {
            "greedy": [right for sample, right in of_question.items() if sample is None],
            "sampled": [right for sample, right in of_question.items() if sample is not None],
        }
        for key, of_question in grades.items()
    }
