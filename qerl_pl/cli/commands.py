"""The commands of `qerl`, and what it answers without PyTorch: help, version, configurations, unknown commands."""

import json
import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from qerl_pl.cli.configs import check_config, copy_config, list_configs
from qerl_pl.errors import UserError, did_you_mean, explain_file_error
from qerl_pl.runtime.files import atomic_write

USAGE_ERROR = 2
"""Exit status of a command that a user has to correct."""
TRAINER_COMMANDS = {
    "fit": "Train by reinforcement learning, or on conversations by supervised fine-tuning.",
    "validate": "Evaluate a checkpoint, or the policy before training, on the validation prompts.",
    "test": "Evaluate on the test prompts, with a report.",
}
"""Commands of the trainer and what they do; they take configurations and keys."""
COMMAND_HELP = TRAINER_COMMANDS | {
    "export": "Write a run's adapter, or its merged weights, with a model card.",
    "quantize": "Write a 4-bit checkpoint of a 16-bit one.",
    "compare": "Compare two evaluations: the paired difference with its interval.",
    "completions": "Write a run's completions as one HTML file, to filter and search.",
    "configs": "List the configurations that -c takes by name, or copy one.",
}
"""All commands and what they do."""
_ELSEWHERE = {"train": "fit", "eval": "validate", "evaluate": "validate"}
"""Commands of other programs, and those here."""
DESCRIPTION = """Reinforcement learning of 4-bit language models with LoRA and adaptive quantization noise.

fit, validate and test take -c CONFIG.yaml, also several times (the later one overrides), and any key of it as
--key value, such as --rollout.group_size 16. `qerl COMMAND --help` explains a command and its keys.
"""

MAX_COMPLETIONS = 20_000
"""Completions of a page: with more of them, rollouts are left out evenly, for a browser holds them all."""
COMPLETIONS_PAGE = Path(__file__).with_name("completions_page.html")


class Parser(ArgumentParser):
    """Raises its errors as one line."""

    def error(self, message: str) -> NoReturn:
        """Raise the error."""
        raise UserError(f"{message}; see {self.prog} --help")


def answer(argv: Sequence[str]) -> bool:
    """Answer what needs no PyTorch, and check the command and its configuration files.

    Returns:
        Whether the command is done.

    Raises:
        UserError: No command is named, or a configuration is none.
        SystemExit: Help or the version was printed.
    """
    first = argv[0] if argv else "none"
    if first in _WITHOUT_TORCH:
        _WITHOUT_TORCH[first](argv[1:])
        return True
    if first in ("-h", "--help", "-V", "--version"):
        _program().parse_args([first])
    if first not in COMMAND_HELP and not (first.startswith("-") and not COMMAND_HELP.keys().isdisjoint(argv)):
        meant = did_you_mean(_ELSEWHERE.get(first, first), [*COMMAND_HELP, "--help", "--version"])
        first = first if meant or not first.startswith("-") else "none"
        names = ", ".join(sorted(COMMAND_HELP))
        raise UserError(f"qerl takes a command first, one of {names}; got {first}; {meant}see qerl --help")
    if first in TRAINER_COMMANDS:
        if len(argv) > 1 and not argv[1].startswith("-"):
            raise UserError(f"qerl {first} takes options; got {argv[1]}; write -c {argv[1]}, if it is a configuration")
        for option, value in zip(argv, argv[1:], strict=False):
            if option in ("-c", "--config"):
                check_config(value)
    return False


def answered(argv: Sequence[str]) -> int | None:
    """The exit status of a command that `answer` does or refuses; None for one that is to be run."""
    try:
        return 0 if answer(argv) else None
    except (UserError, OSError) as error:
        line = explain_file_error(error) if isinstance(error, OSError) else error
        if line is None or os.environ.get("QERL_DEBUG") == "1":
            raise
        print(f"qerl: {line}", file=sys.stderr)
        return USAGE_ERROR


def give_flags_values(function: Callable[..., None], words: Sequence[str]) -> list[str]:
    """The words of a command with `=true` after each flag that has no value, for jsonargparse, which wants one.

    Args:
        function: The command, whose arguments of type bool are flags.
        words: Arguments after the command's name.
    """
    kinds = get_type_hints(function)
    values = {"true", "false", "yes", "no", "on", "off"}
    return [
        f"{word}=true" if kinds.get(word.removeprefix("--")) is bool and after.lower() not in values else word
        for word, after in zip_longest(words, words[1:], fillvalue="")
    ]


def _program() -> ArgumentParser:
    parser = Parser(prog="qerl", description=DESCRIPTION, formatter_class=RawDescriptionHelpFormatter)
    try:
        installed = version("qerl-pl")
    except PackageNotFoundError:  # a source tree on the path alone
        installed = "(not installed)"
    parser.add_argument("-V", "--version", action="version", version=f"qerl {installed}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, text in COMMAND_HELP.items():
        commands.add_parser(name, help=text)
    return parser


def _configs(args: Sequence[str]) -> None:
    parser = Parser(prog="qerl configs", description=COMMAND_HELP["configs"])
    parser.add_argument("name", nargs="?", help="Configuration to copy. Without it all are listed.")
    parser.add_argument("dst", nargs="?", type=Path, help="File or folder to copy it to. By default NAME.yaml here.")
    given = parser.parse_args(args)
    list_configs() if given.name is None else copy_config(given.name, given.dst)


def _compare(args: Sequence[str]) -> None:
    parser = Parser(prog="qerl compare", description=COMMAND_HELP["compare"])
    parser.add_argument("a", type=Path, help="Folder of a run that `qerl test` evaluated, or a file of its samples.")
    parser.add_argument("b", type=Path, help="The other one; the difference is B less A.")
    given = parser.parse_args(args)
    from qerl_pl.cli.compare import compare  # NumPy, which the other commands do without

    print(compare(given.a, given.b))


def _completions(args: Sequence[str]) -> None:
    parser = Parser(prog="qerl completions", description=COMMAND_HELP["completions"])
    parser.add_argument("run", type=Path, help="The run's folder, or its completions.jsonl.")
    parser.add_argument("dst", nargs="?", type=Path, help="File to write. By default completions.html beside it.")
    given = parser.parse_args(args)
    source = given.run if given.run.is_file() else given.run / "completions.jsonl"
    records = _records(source)
    versions = sorted({record["version"] for record in records})
    every = -(-len(records) // MAX_COMPLETIONS)
    kept = set(versions[::every])
    records = [record for record in records if record["version"] in kept]
    about = f"{source}: {len(records)} completions of {len(kept)} rollouts"
    if every > 1:
        about += f", one of each {every} of {len(versions)}"
    # In a script element "</script>" and "<!--" would end the data.
    data = json.dumps({"about": about, "records": records}).replace("<", "\\u003c")
    dst = source.with_suffix(".html") if given.dst is None else given.dst
    atomic_write(dst, COMPLETIONS_PAGE.read_text(encoding="utf-8").replace("DATA", data, 1).encode())
    print(f"wrote {about} to {dst}")


def _records(source: Path) -> list[dict[str, Any]]:
    """The lines of completions.jsonl, but one that a kill cut off."""
    if not source.is_file():
        raise UserError(
            f"completions reads what a run logs to completions.jsonl; {source} is not there; train with "
            "--completions.jsonl true"
        )
    records = []
    for line in source.read_bytes().splitlines():
        try:
            records.append(json.loads(line, parse_constant=str))  # of NaN, which a browser's parser refuses
        except ValueError:
            break
    if not records:
        raise UserError(f"completions needs a rollout; {source} has none yet; wait for the first")
    if not all(isinstance(record, dict) and "version" in record for record in records):
        raise UserError(f"completions reads the completions.jsonl of a run; {source} is another file; name the run")
    return records


_WITHOUT_TORCH = {"compare": _compare, "completions": _completions, "configs": _configs}
"""Commands that need no PyTorch."""
