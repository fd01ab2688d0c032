"""pass@k of more samples than a study's runs draw, from the reports of `qerl test` on their adapters.

    qerl test -c RUN/config.yaml --model.policy.path RUN/adapter --model.policy.adapter null --resume null \
        --rollout.evaluation.samples 64 --rollout.evaluation.extra_sampling '{cool: {temperature: 0.6}}' --report '{}' \
        --trainer.default_root_dir RUN/many_samples
    python -m studies.train_on_4_bits.many_samples lora16 nvfp4_aqn runs/gsm8k/*/many_samples \
        --name gsm8k_many_samples --commit COMMIT

The first command is of the study's commits: later ones sample in one way at a time. RUN is the folder of a study's
run, whose name has its levels, and COMMIT that of `qerl test`. The table has the means
of both methods over the roundings, and the difference of the second less the first, paired by rounding, with Student's
t interval.
"""

import argparse
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from studies.train_on_4_bits.intervals import interval

Metrics = dict[str, float]


def by_rounding(evaluations: Mapping[Path, Any]) -> dict[tuple[str, str], dict[str, Metrics]]:
    """The metrics of each policy and method, by rounding; those of an extra sampling name its temperature.

    Args:
        evaluations: The contents of `evaluation.json` by its folder, which is in the folder of a run.
    """
    reports: dict[tuple[str, str], dict[str, Metrics]] = {}
    for folder, one in evaluations.items():
        levels = dict(level.split("=", 1) for level in folder.resolve().parent.name.split(","))
        (only,) = one["sets"].values()
        metrics = {name: float(metric["value"]) for name, metric in only["metrics"].items()}
        for extra, settings in one["extra_sampling"].items():
            prefix, label = f"{extra}_", f", temperature {settings['sampling']['temperature']}"
            for name in [name for name in metrics if name.startswith(prefix)]:
                metrics[name.removeprefix(prefix) + label] = metrics.pop(name)
        reports.setdefault((levels["policy"], levels["method"]), {})[levels["rounding"]] = metrics
    return reports


def table(methods: tuple[str, str], reports: dict[tuple[str, str], dict[str, Metrics]]) -> str:
    """Greedy accuracy and pass@k of two methods, and their difference, a row for each policy and metric."""
    rows, (first, second) = [], methods
    for policy in dict.fromkeys(policy for policy, _ in reports):
        one, other = reports[policy, first], reports[policy, second]
        shared = sorted(set(one) & set(other))
        names = [name for name in one[shared[0]] if re.match(r"accuracy$|pass@", name)]
        for name in names:
            values = [[runs[rounding][name] for rounding in shared] for runs in (one, other)]
            difference = interval([b - a for a, b in zip(*values, strict=True)])
            rows.append([policy, name, *(f"{statistics.fmean(each):.3f}" for each in values), difference, len(shared)])
    return report.markdown(["policy", "metric", first, second, "difference [95 %]", "roundings"], rows)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first")
    parser.add_argument("second")
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--name", required=True, help="of the files in --out")
    parser.add_argument("--commit", required=True, help="of the evaluations")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    args = parser.parse_args(words)
    evaluations = {folder: json.loads((folder / "evaluation.json").read_text()) for folder in args.folders}
    reports = by_rounding(evaluations)
    results = {f"policy={policy},method={method}": runs for (policy, method), runs in reports.items()}
    where = report.machines(one["machine"] for one in evaluations.values()) | {"commit": args.commit}
    report.write(args.out, args.name, table((args.first, args.second), reports), results, where)


if __name__ == "__main__":
    main()
