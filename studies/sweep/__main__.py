"""Train a study's runs, or list them.

python -m studies.sweep run STUDY.yaml --set prepared=FOLDER --at-once 5    # again, to continue
python -m studies.sweep list STUDY.yaml

Every finished run is a line of STUDY.jsonl beside STUDY.yaml, enough to train the others on another machine. A run that
was interrupted, or stopped after --budget-s, goes on by the same command; its exit status is 75 while runs are missing.
A run that diverged counts as finished.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
import yaml

from qerl_pl.errors import UserError
from studies.sweep.plan import ROOT, Plan, Run, read_plan
from studies.sweep.rows import read_rows
from studies.sweep.runner import Limits, Outcome, Runner


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "studies.sweep", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("command", choices=("run", "list"))
    parser.add_argument("plan", type=Path, help="the study's YAML file")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="values of ${NAME}")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="FACTOR=LEVEL", help="only runs with these levels; or [LEVEL, …]"
    )
    parser.add_argument("--folder", type=Path, help="parent of the run folders; default runs/NAME")
    parser.add_argument("--out", type=Path, help="folder of NAME.jsonl; default: the plan's")
    parser.add_argument("--devices", nargs="+", help="GPU numbers, or cpu; default: all GPUs, or cpu")
    parser.add_argument("--at-once", type=int, default=1, help="concurrent runs per device")
    parser.add_argument("--budget-s", type=float, help="seconds after which runs stop and save")
    parser.add_argument("--grace-s", type=float, default=60.0, help="seconds until runs that do not stop are killed")
    args = parser.parse_args(words)
    args.out = args.out or args.plan.parent
    return args


def pairs(words: list[str], loader: type[yaml.BaseLoader | yaml.SafeLoader] = yaml.SafeLoader) -> dict[str, Any]:
    """Parse NAME=VALUE pairs; values are YAML, of which the base loader makes texts and lists of texts."""
    values = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not sign:
            raise UserError(f"an option takes NAME=VALUE; got {word}; write it so")
        values[name] = yaml.load(value, loader)
    return values


def chosen(plan: Plan, only: dict[str, Any]) -> list[Run]:
    """The runs with these levels, one or a list of texts per factor, written as in the names of runs or as YAML.

    Raises:
        UserError: No run has one of the levels.
    """
    wanted = {}
    for factor, given in only.items():
        levels = {str(run.levels[factor]): run.levels[factor] for run in plan.runs if factor in run.levels}
        texts = given if isinstance(given, list) else [given]
        wanted[factor] = [levels[text] if text in levels else yaml.safe_load(text) for text in texts]
        if missing := [level for level in wanted[factor] if level not in levels.values()]:
            raise UserError(
                f"--only names levels that runs have; {plan.path} has {factor} {', '.join(levels) or 'nowhere'} and "
                f"not {missing[0]!r}; choose among them"
            )
    return [run for run in plan.runs if all(run.levels.get(factor) in levels for factor, levels in wanted.items())]


def values_of(plan: Plan, words: list[str]) -> dict[str, Any]:
    """Values of the placeholders `${name}`, from the plan and the command line.

    Raises:
        UserError: The plan has no such placeholder.
    """
    options, names = pairs(words), {*plan.values, *(name for run in plan.runs for name in run.needs)}
    if unknown := set(options) - names:
        raise UserError(
            f"--set gives values of placeholders; {plan.path} has {', '.join(sorted(names)) or 'none'} and not "
            f"{sorted(unknown)[0]}; name one of them"
        )
    return plan.values | options


def run(plan: Plan, args: argparse.Namespace) -> int:
    """Train the runs, and print what is left."""
    gpus = [str(number) for number in range(torch.cuda.device_count())]
    devices = args.devices or gpus or ["cpu"]
    limits = Limits(devices, args.at_once, args.budget_s, args.grace_s)
    folder, results = args.folder or ROOT / "runs" / plan.path.stem, args.out / f"{plan.path.stem}.jsonl"
    runner = Runner(plan, values_of(plan, args.set), folder.resolve(), results.resolve(), limits)
    outcome = runner.work(chosen(plan, pairs(args.only, yaml.BaseLoader)))
    tell(outcome, results)
    return outcome.status


def tell(outcome: Outcome, results: Path) -> None:
    """Print the outcome."""
    print(f"{len(outcome.finished)} finished, in {results}; {len(outcome.left)} left: the same command goes on")
    for name, line in outcome.failed.items():
        print(f"{name} failed: {line}")
    if outcome.skipped:
        values = sorted({value for missing in outcome.skipped.values() for value in missing})
        print(f"{len(outcome.skipped)} left out, which need --set {'=… '.join(values)}=…")


def main(words: list[str] | None = None) -> int:
    args = arguments(words)
    try:
        plan = read_plan(args.plan)
        if args.command == "run":
            return run(plan, args)
        values, rows = values_of(plan, args.set), read_rows(args.out / f"{plan.path.stem}.jsonl")
        for one in chosen(plan, pairs(args.only, yaml.BaseLoader)):
            print(one.name, "finished" if one.name in rows else "", *one.missing(values))
        return 0
    except UserError as error:
        if os.environ.get("QERL_DEBUG") == "1":
            raise
        print(f"study: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
