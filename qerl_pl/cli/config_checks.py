"""The class of the module, and checks of a parsed configuration."""

import argparse
import inspect
from argparse import ArgumentError
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace, dict_to_namespace, set_parsing_settings
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.loggers import CSVLogger

from qerl_pl.algorithm.objectives import Objective
from qerl_pl.callbacks import (
    AdaptiveQuantizationNoise,
    CompletionLog,
    EvaluationReport,
    Monitor,
    ResumeCheckpoint,
    RunSummary,
)
from qerl_pl.cli.configs import check_config
from qerl_pl.errors import UserError, did_you_mean
from qerl_pl.modules import QeRLModule, SFTModule
from qerl_pl.modules.optimizer import ADAMW, default_optimizer
from qerl_pl.modules.policy_module import PolicyModule
from qerl_pl.runtime.checkpoint_io import CHECKPOINTS, resume_files
from qerl_pl.runtime.import_path import load_named

CALLBACKS: dict[str, tuple[type[Callback], dict[str, Any] | None, str]] = {
    "noise": (AdaptiveQuantizationNoise, None, "Adaptive quantization noise of the rollouts. null: no noise."),
    "best": (
        ModelCheckpoint,
        # Not step=N, the name of a checkpoint that --resume auto takes. A killed run repeats a validation and replaces
        # its checkpoint; with a version counter it would add another.
        {"monitor": "val/accuracy", "mode": "max", "filename": "best-{rollouts:.0f}", "enable_version_counter": False},
        "Saves the checkpoint of the best validation. null saves none.",
    ),
    "checkpoint": (ResumeCheckpoint, {}, "Saves the checkpoints for --resume auto. null saves none."),
    "monitor": (Monitor, {}, "TensorBoard's layout and the peak of memory. null logs neither."),
    "completions": (CompletionLog, {}, "Shows completions in the loggers, or writes all of them. null does neither."),
    "summary": (RunSummary, {}, "Writes summary.json and run.png, and prints a table at the end. null does neither."),
    "report": (
        EvaluationReport,
        None,
        "Report of `qerl test` and `qerl validate`, with all samples. null: none.",
    ),
}
"""Top-level keys of callbacks: class, default arguments (None: off by default), help."""
SFT_CALLBACKS = {
    "best": (
        ModelCheckpoint,
        {"monitor": "val/loss", "mode": "min", "filename": "best-{step}", "enable_version_counter": False},
        "Saves the checkpoint of the smallest validation loss. null saves none.",
    ),
    "checkpoint": CALLBACKS["checkpoint"],
}
"""Top-level keys of callbacks in supervised fine-tuning."""


def module_class(args: Any) -> type[PolicyModule]:
    """The class that the last of the configurations and words names as `model.class_path`; QeRLModule by default.

    Args:
        args: Arguments of the command line, also parsed ones. What `-c` reads from a pipe is not looked at.

    Raises:
        UserError: There is no such class, or it is no module of this package.
    """
    if isinstance(args, dict | Namespace):
        parsed = dict_to_namespace(args) if isinstance(args, dict) else args
        return named_module(parsed.get(f"{parsed.subcommand}.model.class_path"))
    words = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    options: dict[str, Any] = {"dest": "named", "action": "append", "nargs": "?"}
    words.add_argument("-c", "--config", type=lambda file: (check_config, file), **options)
    words.add_argument("--model.class_path", type=lambda name: (str, name), **options)
    found = [read(value) for read, value in filter(None, words.parse_known_args(args)[0].named or [])]
    return named_module(next((name for name in reversed(found) if name), None))


def named_module(name: str | None) -> type[PolicyModule]:
    """The class of that name or import path; None is QeRLModule. Raises as `module_class`."""
    if name is None:
        return QeRLModule
    known = {kind.__name__: kind for kind in (QeRLModule, SFTModule)}
    rule = f"model.class_path is {' or '.join(known)}, or the import path of a subclass of one of them or PolicyModule"
    remedy = f"{did_you_mean(name, known)}write my_package.MyModule or my_file.py:MyModule for your own"
    kind = known.get(name) or load_named(name, rule, remedy, "module")
    if not (isinstance(kind, type) and issubclass(kind, PolicyModule)):
        raise UserError(f"{rule}; got {name}, which is none; derive it from one")
    parameters = inspect.signature(kind).parameters.values()
    if not any(one.name == "seed" or one.kind is one.VAR_KEYWORD for one in parameters):
        raise UserError(
            f"a module takes the arguments of the class that it is derived from; {name} does not take seed; add "
            "**settings to its __init__, and give them to super().__init__"
        )
    return kind


def refuse_null(parser: ArgumentParser, config: Namespace, defaults: Namespace) -> None:
    """Refuse null, as which YAML reads an empty value, for keys that do not take it, and a value for a group of keys.

    Raises:
        ArgumentError: A key does not take null.
        UserError: A group is no mapping of keys.
    """
    run = config[config["subcommand"]]
    for key, default in defaults.items(branches=True):
        is_group = isinstance(default, Namespace) and "class_path" not in default and "init_args" not in key
        if is_group and not isinstance(run[key], Namespace):
            raise UserError(f"{key} is a mapping of keys; got {run[key]!r}; set its keys, or leave it out")
    set_parsing_settings(unset_sentinel=True)  # or null means that nothing was given, whatever the type
    try:
        parser.validate(config)
    except TypeError as error:
        raise ArgumentError(None, str(error)) from error
    finally:
        set_parsing_settings(unset_sentinel=False)


def refuse_lost_curves(trainer: Trainer) -> None:
    """Refuse a file that CSVLogger would begin anew.

    Raises:
        UserError: An earlier command has written it.
    """
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger) and (file := Path(logger.log_dir, "metrics.csv")).exists():
            raise UserError(
                f"CSVLogger begins its file anew; {file} has the curves of an earlier command; leave its version out, "
                "or give another"
            )


def refuse_automatic(trainer: Namespace) -> None:
    """Refuse Lightning's settings of an optimization that it would do itself.

    Raises:
        UserError: One is set.
    """
    clip, batches = trainer.get("gradient_clip_val"), trainer.get("accumulate_grad_batches", 1)
    if clip:
        raise UserError(f"model.max_grad_norm clips gradients; got trainer.gradient_clip_val {clip}; set that one")
    if batches != 1:
        raise UserError(
            "an optimizer step takes all of a minibatch, whose memory model.micro_batch_tokens limits; got "
            f"trainer.accumulate_grad_batches {batches}; raise data.batch_size, or lower model.minibatches"
        )


def refuse_lost_defaults(best: Any) -> None:
    """Refuse keys of `best` where an earlier null has removed its defaults: Lightning's would keep the smallest value.

    Raises:
        UserError: There is no file name.
    """
    if isinstance(best, Namespace) and best.get("init_args.filename", "") is None:
        raise UserError(
            f"best: null has removed the defaults of best; got best.monitor {best.init_args.monitor} and no "
            "best.filename after it; remove that null, or set monitor, mode, filename and enable_version_counter"
        )


def refuse_moved_run(files: Sequence[Any] | None, root: Path) -> None:
    """Refuse RUN/config.yaml of a run that was moved, whose `trainer.default_root_dir` is where it was.

    Args:
        files: Files that -c names.
        root: `trainer.default_root_dir` of this command.

    Raises:
        UserError: `root` is as in a file beside the checkpoints of another folder.
    """
    for file in (Path(file) for file in files or () if file is not None):
        folder = file.parent
        if file.name != "config.yaml" or not resume_files(folder / CHECKPOINTS) or folder.resolve() == root.resolve():
            continue
        recorded = yaml.safe_load(file.read_text())["trainer"]["default_root_dir"]
        if Path(recorded).expanduser() == root:
            raise UserError(
                f"--resume auto goes on in trainer.default_root_dir; got {root} in {file}, beside the checkpoints of a "
                f"run that was moved; add --trainer.default_root_dir {folder}"
            )


def listed(given: Any) -> list[Any]:
    """A list of callbacks or plugins, which Lightning also takes as a single object or None."""
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]


def name_defaults(model: Namespace) -> None:
    """Name the classes of the optimizer and the objective that are not set, with their arguments, for RUN/config.yaml.

    As the keys' own defaults, their arguments would pass to another class that a user names.
    """
    parser = ArgumentParser(exit_on_error=False)
    if model.get("optimizer") is default_optimizer:
        parser.add_argument("--optimizer", type=OptimizerCallable)
        given = {"class_path": "torch.optim.AdamW", "init_args": {**ADAMW, "betas": [*ADAMW["betas"]]}}
        model.optimizer = parser.parse_object({"optimizer": given}).optimizer
    if "objective" in model and model.objective is None:
        parser.add_argument("--objective", type=Objective)
        model.objective = parser.parse_object({"objective": "qerl_pl.algorithm.GRPO"}).objective
