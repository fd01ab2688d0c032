"""Mutation run (`make mutants`): faults planted one at a time by mutmut, and whether the tests notice.

Each room of the package gets a copy of the work tree in build/mutants, with the tests that belong to it: those that
run in this process alone, for a mutant is a fork of a process that has imported everything. What survives is printed;
most of it changes nothing that a test could see (a device on a CPU, the strictness of a zip of equal lengths).

    python tools/mutation.py [room ...] [--processes N] [--again]

With --again what an earlier run noticed stands: only what survived, and what is new in the code, meets the tests as
they are now.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from mutmut.state import state

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "mutants"
AT_LEAST = 0.9
"""Share of the mutants that must be noticed."""
AT_LEAST_IN_A_ROOM = 0.85
NOTICED = {"killed", "timeout", "segfault", "suspicious"}
REACHED: dict[int, set[str]] = {}
"""Functions that each run reached which tests share."""
SECONDS: dict[int | str, float] = {}
"""How long each took, or what a test set up of its own."""


@dataclass(frozen=True)
class Room:
    """Code that is mutated together, and the tests that know it."""

    code: tuple[str, ...]
    """Patterns of files, `qerl_kernels` beside `qerl_pl`."""
    tests: tuple[str, ...]
    """Files of tests/, without `test_` and `.py`."""
    chosen: str = ""
    """Of these, as pytest's -k takes it: not those that start other processes or take long."""


ROOMS = {
    "algorithm": Room(
        ("qerl_pl/algorithm/*",),
        ("advantages", "losses", "objectives", "noise", "off_policy", "distillation"),
        "not comes_closer and not resumed_run and not of_the_page",
    ),
    "kernels": Room(
        ("qerl_kernels/reference.py", "qerl_kernels/marlin.py", "qerl_kernels/logprob.py"),
        ("ops", "ops_edges", "ops_linear", "ops_divergence", "ops_triton"),
        "not without_triton and not compiled and (not test_ops_triton or log_probabilities)",
    ),
    "keeping": Room(
        (
            "qerl_pl/runtime/checkpoint_io.py",
            "qerl_pl/runtime/random_state.py",
            "qerl_pl/seeds.py",
            "qerl_pl/callbacks/resume.py",
        ),
        ("files", "random_state", "resume_callback", "slurm", "failed_rollout"),
    ),
    "module": Room(
        (
            "qerl_pl/modules/qerl.py",
            "qerl_pl/modules/policy_module.py",
            "qerl_pl/modules/optimizer.py",
            "qerl_pl/callbacks/aqn.py",
            "qerl_pl/callbacks/rollout.py",
        ),
        (
            *("module", "rollout_callback", "schedules", "reward_logging"),
            *("data_order", "used_again", "distillation", "dialogue_rollouts"),
        ),
        "not samplers_on_every",
    ),
    "rollout": Room(
        (
            "qerl_pl/rollout/parity_check.py",
            "qerl_pl/rollout/collector.py",
            "qerl_pl/rollout/scoring.py",
            "qerl_pl/evaluation/evaluator.py",
        ),
        ("collecting", "collecting_ranks", "parity_check", "evaluator", "reward_functions", "dialogue_rollouts"),
        "not slow_reward and not samplers_on_every",
    ),
    "update": Room(
        ("qerl_pl/modules/update.py", "qerl_pl/policy/packing.py"),
        ("update_steps", "update_ranks", "packing", "shared_prompts", "recompute", "distillation"),
        "not comes_closer and not resumed_run",
    ),
}

CONFIG = """
[tool.mutmut]
source_paths = ["qerl_pl", "qerl_kernels"]
also_copy = ["configs"]
only_mutate = {code}
# What an error or a log line says is no behaviour that a letter more would change; types and equal lengths are checked.
do_not_mutate_patterns = [
    '\\braise \\w+\\(', '\\blog\\.\\w+\\(', 'require_\\w+\\(', 'load_named\\(', '\\bcast\\(', 'strict=True',
]
pytest_add_cli_args = {arguments}
pytest_add_cli_args_test_selection = {tests}
# A mutant may take this many times as long as its tests do, and so many seconds more.
timeout_multiplier = 3.0
timeout_constant = 20.0
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("rooms", nargs="*", default=list(ROOMS), choices=[*ROOMS, []], help="all by default")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="only what survived an earlier run, and what is new")
    arguments = parser.parse_args()
    counts: dict[str, dict[str, Counter[str]]] = {}
    survivors: list[tuple[str, str]] = []
    for name in arguments.rooms:
        folder = BUILD / name
        again = {mutant for _, mutant in survived(folder, asked=True)} if arguments.again and folder.exists() else set()
        if not arguments.again:
            shutil.rmtree(folder, ignore_errors=True)
        lay_out(ROOMS[name], folder)
        mutmut(folder, "run", "--max-children", str(arguments.processes))
        still = again & {mutant for _, mutant in survived(folder)}
        if still:
            mutmut(folder, "run", "--max-children", str(arguments.processes), *sorted(still))
        counts[name] = {file: Counter(statuses.values()) for file, statuses in results(folder).items()}
        survivors += [(file, changed_line(folder, mutant)) for file, mutant in survived(folder)]
    return report(counts, survivors)


def survived(folder: Path, asked: bool = False) -> list[tuple[str, str]]:
    """Files and names of the mutants of a room that no test noticed; `asked`: not those whose turn has not come."""
    return [
        (file, mutant)
        for file, status_by_mutant in results(folder).items()
        for mutant, status in status_by_mutant.items()
        if status not in NOTICED and not (asked and status == "not checked")
    ]


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """As a plugin of pytest: the time of a test is that of what it sets up, too, for the fastest run first."""
    if call.when == "setup":
        run = shared_run(item) or item.nodeid
        SECONDS[run] = max(SECONDS.get(run, 0.0), call.duration)
        state().duration_by_test[item.nodeid] += SECONDS[run]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """As a plugin of pytest: what a shared run reached, all tests that look at it reached, not only its first."""
    if run := shared_run(item):
        reached = REACHED.setdefault(run, set())
        reached |= state()._stats
        state()._stats |= reached


def shared_run(item: pytest.Item) -> int | None:
    """Which run of a fixture a test looks at, if any."""
    run = getattr(item, "funcargs", {}).get("both")
    return None if run is None else id(run)


def lay_out(room: Room, folder: Path) -> None:
    """A copy of the work tree with both packages at its root, where mutmut looks for them."""
    ignored = shutil.ignore_patterns("__pycache__")
    for source in ("qerl_pl", "kernels/qerl_kernels", "tests", "configs"):
        shutil.copytree(ROOT / source, folder / Path(source).name, ignore=ignored, dirs_exist_ok=True)
    logprob = folder / "qerl_kernels" / "logprob.py"
    # It only refuses second derivatives, and mutmut leaves decorated functions alone.
    logprob.write_text(logprob.read_text().replace("    @once_differentiable\n", ""))
    # What is not there when Python starts is never searched.
    (folder / "mutants" / "tests").mkdir(parents=True, exist_ok=True)
    # Which test reaches what; mutmut would forget all results with it where other files of tests are asked.
    (folder / "mutants" / "mutmut-stats.json").unlink(missing_ok=True)
    arguments = ["-p", "no:cacheprovider", "-p", "mutation", "-m", "not vllm and not gpu"]
    if room.chosen:
        arguments += ["-k", room.chosen]
    tests = [f"tests/test_{name}.py" for name in room.tests]
    config = CONFIG.format(code=json.dumps(room.code), arguments=json.dumps(arguments), tests=json.dumps(tests))
    (folder / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text() + config)


def mutmut(folder: Path, *arguments: str, output: int | None = None) -> str:
    # One thread a process, and no GPU: PyTorch can then be forked. Children of a test find the mutants first, too.
    search = os.pathsep.join([*(str(folder / "mutants" / path) for path in ("", "tests")), str(Path(__file__).parent)])
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": search}
    command = [str(Path(sys.executable).parent / "mutmut"), *arguments]
    done = subprocess.run(command, cwd=folder, env=os.environ | environment, check=True, text=True, stdout=output)
    return done.stdout


def results(folder: Path) -> dict[str, dict[str, str]]:
    """Status of each mutant by file."""
    statuses: dict[str, dict[str, str]] = {}
    for line in mutmut(folder, "results", "--all", "true", output=subprocess.PIPE).splitlines():
        mutant, status = line.strip().rsplit(": ", 1)
        file = re.split(r"\.x[_ǁ]", mutant)[0].replace(".", "/") + ".py"
        statuses.setdefault(file, {})[mutant] = status
    return statuses


def changed_line(folder: Path, mutant: str) -> str:
    """What a mutant has instead of the original, on one line."""
    lines = mutmut(folder, "show", mutant, output=subprocess.PIPE).splitlines()
    changes = {sign: [x[1:].strip() for x in lines if x[0] == sign and x[:3] != 3 * sign] for sign in "+-"}
    return " ".join(changes["+"]) or "without " + " ".join(changes["-"])


def report(counts: dict[str, dict[str, Counter[str]]], survivors: list[tuple[str, str]]) -> int:
    """Print the survivors and the figures; the exit status."""
    for file, line in survivors:
        print(f"- {file}: `{line}`")
    print("\n| file | mutants | noticed | % |\n| --- | --- | --- | --- |")
    enough = True
    for files in counts.values():
        for file, count in files.items():
            share(file, count)
        enough &= share("these", sum(files.values(), Counter())) >= AT_LEAST_IN_A_ROOM
    enough &= share("all", sum((count for files in counts.values() for count in files.values()), Counter())) >= AT_LEAST
    return int(not enough)


def share(name: str, count: Counter[str]) -> float:
    """Of the mutants, how many were noticed; printed as a row."""
    noticed = sum(count[status] for status in NOTICED)
    print(f"| {name} | {count.total()} | {noticed} | {100 * noticed / count.total():.1f} |")
    return noticed / count.total()


if __name__ == "__main__":
    sys.exit(main())
