"""Values that jsonargparse lets pass: null for a key that takes none, and for one that has keys of its own."""

import inspect
import json
import logging
import os
import re
import signal
import sys
from argparse import ArgumentError
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import is_dataclass
from pathlib import Path
from pkgutil import resolve_name
from types import FrameType
from typing import Any

import jsonargparse
import yaml
from jsonargparse import ArgumentParser, Namespace, set_parsing_settings
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException

from qerl_pl.callbacks import EvaluationReport, Preempted
from qerl_pl.cli.error_messages import explain
from qerl_pl.cli.export import export, take_adapter
from qerl_pl.cli.terminal import configure_terminal
from qerl_pl.datamodules.prompts import PromptDataModule
from qerl_pl.distributed.communicator import (
    check_ranks_divide,
    check_strategy,
    is_first_process,
    planned_ranks,
    writes_files,
)
from qerl_pl.distributed.strategy import UnwrappedDDPStrategy
from qerl_pl.errors import Stopped, UserError
from qerl_pl.formats.quantize import quantize_checkpoint
from qerl_pl.modules import QeRLModule
from qerl_pl.modules.qerl import BEFORE_TRAINING
from qerl_pl.persistence.atomic_files import atomic_write, locked
from qerl_pl.persistence.checkpoint_io import (
    FOLDER,
    AtomicCheckpointIO,
    finished_rollouts,
    newest_checkpoint,
    verify,
)
from qerl_pl.persistence.signals import StopSignals


def check_values(parser: ArgumentParser, config: Namespace) -> None:
    """Refuse null, which an empty place in a YAML file is, where a key does not take it.

    Args:
        parser: The main parser.
        config: What it has parsed.

    Raises:
        ArgumentError: A key has null for a value.
        UserError: A key that has keys of its own has another value in their place.
    """
    run = config[config["subcommand"]]
    _check_groups(QeRLModule, run["model"], "model")
    _check_classes(run, "")
    set_parsing_settings(unset_sentinel=True)  # or null means that nothing was given, whatever the type
    try:
        parser.validate(config)
    except TypeError as error:
        raise ArgumentError(None, str(error)) from error
    finally:
        set_parsing_settings(unset_sentinel=False)


def _check_classes(value: Any, key: str) -> None:
    """Check the arguments of every class that is named somewhere in `value`."""
    if isinstance(value, list):
        for item in value:
            name = item.get("class_path", "") if isinstance(item, Namespace) else ""
            _check_classes(item, f"{key}.{name.rpartition('.')[2]}".removesuffix("."))
    if not isinstance(value, Namespace):
        return
    if "class_path" in value and "init_args" in value:
        _check_groups(resolve_name(value["class_path"]), value["init_args"], key)
    for name, item in vars(value).items():
        _check_classes(item, f"{key}.{name}".removesuffix(".init_args").removeprefix("."))


def _check_groups(class_type: type, given: Namespace, key: str) -> None:
    for name, parameter in inspect.signature(class_type).parameters.items():
        if not is_dataclass(parameter.annotation) or not isinstance(parameter.annotation, type):
            continue
        if not isinstance(found := given.get(name), Namespace):
            raise UserError(f"{key}.{name} has keys of its own; found {found!r}; set them, or leave it out")
        _check_groups(parameter.annotation, found, f"{key}.{name}")


_ITEM = re.compile(r"^--([a-z_.]+)\.([A-Z]\w*(?:\.\w+)+)(?:=(.*))?$", re.DOTALL)

_SHOWS_ONLY = ("--print_config", "--help", "-h")


def expand_item_overrides(parser: ArgumentParser, args: list[str]) -> list[str]:
    """Replace overrides of list items by overrides of the whole lists, as the parser understands them.

    Args:
        parser: The main parser, with subcommands.
        args: The command line.

    Returns:
        The command line without `--LIST.Class.key value`, each such list appended whole as `--LIST JSON`.

    Raises:
        UserError: The list has no item of that class, or the override has no value.
    """
    plain: list[str] = []
    overrides: list[tuple[str, list[str], Any]] = []
    rest = iter(args)
    for arg in rest:
        match = _ITEM.match(arg)
        if match is None:
            plain.append(arg)
            continue
        text = match[3] if match[3] is not None else next(rest, None)
        if text is None:
            raise UserError(f"an override needs a value; found {arg} alone; write {arg} VALUE")
        overrides.append((match[1], match[2].split("."), _value(arg, text)))
    if not overrides:
        return plain
    config = parser.parse_args([arg for arg in plain if not arg.startswith(_SHOWS_ONLY)]).as_dict()
    config = config[config["subcommand"]]
    changed: dict[str, Any] = {}
    for key, path, value in overrides:
        if key not in changed:
            changed[key] = _lookup(config, key)
        _assign(changed[key], path, value, key)
    return [*plain, *(part for key, items in changed.items() for part in (f"--{key}", json.dumps(items)))]


def _value(arg: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or type(error).__name__
        raise UserError(f"an override's value is YAML; that of {arg} is {text!r}: {problem}; quote it") from error


def _lookup(config: dict[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            raise UserError(f"an override names a key of the configuration; --{key} is none; see --help")
        value = value[part]
    return value


def _assign(node: Any, path: list[str], value: Any, where: str) -> None:
    """Set the value at `path` below `node`, through lists by class name and through init_args."""
    head, *tail = path
    if isinstance(node, dict) and _class_name(node) == head:  # one item where a list may be
        node = [node]
    if isinstance(node, list):
        for item in node:
            if isinstance(item, dict) and _class_name(item) == head:
                return _assign(item, tail, value, f"{where}.{head}")
        found = [_class_name(item) or "?" for item in node if isinstance(item, dict)]
        raise UserError(f"an override names an item of the list by its class; --{where} has {found} and no {head}")
    if isinstance(node, dict) and "class_path" in node and head not in ("class_path", "init_args"):
        node = node.setdefault("init_args", {})
    if not isinstance(node, dict):
        raise UserError(f"an override names a key of the configuration; --{where} has no keys; set it whole")
    if not tail:
        node[head] = value
        return None
    if isinstance(node.get(head), str):  # a class given by its path alone
        node[head] = {"class_path": node[head]}
    return _assign(node.setdefault(head, {}), tail, value, f"{where}.{head}")


def _class_name(item: dict[str, Any]) -> str:
    return str(item.get("class_path", "")).rpartition(".")[2]


class StopsAtOnce(Callback):
    """Ends an evaluation on SIGTERM or SIGINT, wherever it is.

    Lightning itself heeds SIGTERM between batches alone, and a whole set may be one; on SIGINT its status is 1.
    """

    def __init__(self) -> None:
        self._signals = StopSignals(_stop)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listen, in place of Lightning's own handlers."""
        self._signals.take()

    on_validation_start = on_test_start

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the signals back."""
        self._signals.give_back()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The same where it breaks off: Lightning tears no callback down then."""
        self.teardown(trainer, pl_module, "")


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)


log = logging.getLogger(__name__)

COMMANDS: dict[str, Callable[..., None]] = {"quantize": quantize_checkpoint, "export": export}

DESCRIPTION = """Reinforcement learning of 4-bit language models with LoRA and adaptive quantization noise.
fit, validate and test take -c CONFIG.yaml and any key of it as --key value; an item of a list is named by its class, as
in --trainer.callbacks.AdaptiveQuantizationNoise.sigma_start 0.02. Besides them: `qerl quantize --help` (write a 4-bit
checkpoint) and `qerl export --help` (write an adapter or merged weights)."""

USAGE_ERROR = 2

VALIDATE = "validate"

"""The command, and the folder under the run's where its curves go, each time a new `version_N`."""


class SaveFitConfig(SaveConfigCallback):
    """Keeps RUN/config.yaml as it was trained with: saved once training begins, and the checkpoint is accepted."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Save nothing yet."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save, whatever folder the logger has."""
        if writes_files(trainer):
            text = self.parser.dump(self.config, skip_unset=False)
            atomic_write(Path(trainer.default_root_dir) / self.config_filename, text.encode())


class QeRLCLI(LightningCLI):
    """LightningCLI with a fixed module, a run folder that holds everything, and `--resume`."""

    def __init__(self, args: ArgsType = None) -> None:
        super().__init__(
            QeRLModule,
            PromptDataModule,
            subclass_mode_data=True,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            save_config_callback=SaveFitConfig,
            save_config_kwargs={"overwrite": True},  # a resumed run goes on in its folder
            # A key is taken as it is spelled: abbreviated, --model.lr would set model.lr_scheduler.
            parser_kwargs={"exit_on_error": False, "allow_abbrev": False, "description": DESCRIPTION},
            args=args,
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """The trainer's methods that make sense here, each with the arguments that the CLI gives itself."""
        given = {"model", "dataloaders", "datamodule"}
        return {"fit": given | {"train_dataloaders", "val_dataloaders"}, "validate": given, "test": given}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("seed_everything", "model.seed", compute_fn=_run_seed)
        parser.add_argument(
            "--resume",
            type=str | None,
            default=None,
            help="`auto` takes the newest whole checkpoint under trainer.default_root_dir, a path takes that one: fit "
            "goes on from it (and starts fresh where there is none at all), validate and test evaluate it. null "
            "starts fresh, in a folder without any, and evaluates the policy before training.",
        )

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Subcommands report errors as the main parser does: by an exception that `main` prints."""
        return super().init_parser(**{**kwargs, "exit_on_error": False})

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse, after items of lists that are named by their class have been looked up."""
        try:
            if not isinstance(args, dict | jsonargparse.Namespace):
                args = expand_item_overrides(parser, sys.argv[1:] if args is None else list(args))
                self.config = parser.parse_args(args)
            else:
                self.config = parser.parse_object(args)
        except UnicodeDecodeError as error:
            raise UserError(
                f"a configuration is text in UTF-8; it holds {error.object[:40]!r}; save it as such"
            ) from error
        check_values(parser, self.config)
        command = self.config["subcommand"]
        self._adapter = take_adapter(self.config[command].model.policy, command, self.config[command].get("resume"))
        checkpoint = self.config[self.config["subcommand"]].get("ckpt_path")
        if checkpoint is not None:
            verify(Path(checkpoint))

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The trainer with whole checkpoints, and TensorBoard in the run folder unless the YAML names a logger."""
        config = self._get(self.config_init, "trainer")
        root = os.path.expanduser(config["default_root_dir"] or "runs/default")
        kwargs["default_root_dir"] = root
        try:
            Path(root).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"a run needs a folder; trainer.default_root_dir {root} cannot be made ({error.strerror}); "
                "choose another"
            ) from error
        kwargs["plugins"] = [*_listed(config["plugins"]), AtomicCheckpointIO()]
        self._logger: TensorBoardLogger | None = None
        if config["logger"] in (None, True):
            # A validation by itself is no point of the run's curve, which has one of that step, or another's settings.
            own: dict[str, Any] = {"name": VALIDATE} if self.subcommand == VALIDATE else {"name": "", "version": ""}
            kwargs["logger"] = self._logger = TensorBoardLogger(save_dir=root, **own)
        kwargs["use_distributed_sampler"] = False  # every rank sees the whole batch
        trainer = self._trainer(kwargs, config)
        check_strategy(trainer)
        if planned_ranks(trainer) > 1:
            trainer = self._trainer(kwargs | {"strategy": UnwrappedDDPStrategy()}, config)
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
                callback.dirpath = str(Path(root) / FOLDER)
        return trainer

    def _trainer(self, given: dict[str, Any], config: Any) -> Trainer:
        # Lightning puts its own beside those it is given.
        ours = [*([] if self.subcommand == "fit" else [StopsAtOnce()]), *([self._adapter] if self._adapter else [])]
        callbacks = [*ours, *_listed(config["callbacks"])]
        try:
            trainer: Trainer = super().instantiate_trainer(**given, callbacks=callbacks)
        except (RuntimeError, TypeError, ValueError) as error:
            said = " ".join(str(error).split())
            raise UserError(
                f"Lightning's Trainer refuses a key of trainer: {said:.180}; see qerl fit --help"
            ) from error
        return trainer

    def fit(self, model: LightningModule, datamodule: LightningDataModule, **kwargs: Any) -> None:
        """Train, from a checkpoint where `--resume` or `--ckpt_path` names one."""
        root = Path(self.trainer.default_root_dir)
        if (ranks := planned_ranks(self.trainer)) > 1:
            assert isinstance(datamodule, PromptDataModule)
            check_ranks_divide(datamodule.batch_size, ranks)
        with locked(root) if self.trainer.is_global_zero else nullcontext():
            kwargs |= self._checkpoint(kwargs)
            if self._get(self.config, "resume") == "auto" and kwargs["ckpt_path"] is None:
                log.info("no checkpoint to resume from; starting fresh")
            elif kwargs.get("ckpt_path") is None and (old := newest_checkpoint(root)):
                raise UserError(
                    f"a run that starts fresh needs a folder without another run's checkpoints; found {old}; add "
                    "--resume auto to go on, or choose another trainer.default_root_dir"
                )
            self._log_from(kwargs.get("ckpt_path"))
            self.trainer.fit(model, datamodule=datamodule, **kwargs)

    def _log_from(self, checkpoint: str | Path | None) -> None:
        """Have TensorBoard show one curve: its readers drop what a killed run logged beyond the checkpoint."""
        if self._logger is not None and self.trainer.logger is self._logger:  # a trial run has another
            first = BEFORE_TRAINING if checkpoint is None else finished_rollouts(Path(checkpoint))
            self.trainer.logger = TensorBoardLogger(self._logger.save_dir, name="", version="", purge_step=first)

    def validate(self, model: LightningModule, datamodule: LightningDataModule, **kwargs: Any) -> None:
        """Evaluate on the validation prompts, a checkpoint where one is named."""
        self.trainer.validate(model, datamodule=datamodule, **kwargs | self._evaluated(kwargs))

    def test(self, model: LightningModule, datamodule: LightningDataModule, **kwargs: Any) -> None:
        """Evaluate on the test prompts, a checkpoint where one is named."""
        self.trainer.test(model, datamodule=datamodule, **kwargs | self._evaluated(kwargs))

    def _checkpoint(self, given: dict[str, Any]) -> dict[str, Path | None]:
        """`ckpt_path` by `--resume`, as Lightning takes it; nothing where that is not set."""
        resume = self._get(self.config, "resume")
        if resume is None:
            return {}
        if given.get("ckpt_path") is not None:
            raise UserError(f"one checkpoint is taken; --resume is {resume} and --ckpt_path is set too; leave one out")
        if resume == "auto":
            found = newest_checkpoint(Path(self.trainer.default_root_dir))
        else:
            found = Path(resume)
            verify(found)
        if found is not None:
            log.info("resuming from %s", found)
        return {"ckpt_path": found}

    def _evaluated(self, given: dict[str, Any]) -> dict[str, Any]:
        taken: dict[str, Any] = self._checkpoint(given)
        if "ckpt_path" in taken and taken["ckpt_path"] is None:
            raise UserError(
                f"--resume auto needs a checkpoint; {self.trainer.default_root_dir} has none; name the run's folder by "
                "trainer.default_root_dir, or leave --resume out to evaluate the policy before training"
            )
        if not taken and given.get("ckpt_path") is None and self._adapter is None:
            log.info("no checkpoint is named: this evaluates the policy before training")
        if any(isinstance(callback, EvaluationReport) for callback in self.trainer.callbacks):  # type: ignore[attr-defined]
            taken["verbose"] = False  # the report has a table
        return taken


def _listed(given: Any) -> list[Any]:
    """What Lightning takes alone, in a list, or not at all."""
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]


def _run_seed(seed: bool | int | None) -> int:
    """The run's seed by `seed_everything`, in Lightning's bounds."""
    if seed is None or isinstance(seed, bool) or not 0 <= seed < 2**32:
        raise UserError(f"a run needs a seed from 0 to {2**32 - 1}; found {seed}; set seed_everything to 0, say")
    return seed


def main(argv: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments after the program's name; None takes the process's.

    Returns:
        Exit status: 0, 2 for a user's mistake (one line on standard error; QERL_DEBUG=1 shows the traceback), or 128 +
        the signal's number for a run that was asked to stop.
    """
    argv = sys.argv[1:] if argv is None else argv
    configure_terminal()
    # What PyTorch asks for where results must repeat, and the size it takes anyway; read when cuBLAS starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    sys.path.insert(0, str(Path.cwd()))  # a user's own reward or data module lies where the command is run
    try:
        if argv and argv[0] in COMMANDS:
            jsonargparse.auto_cli(
                COMMANDS[argv[0]],
                args=argv[1:],
                as_positional=True,
                exit_on_error=False,
                allow_abbrev=False,
                prog=f"qerl {argv[0]}",
            )
            return 0
        sys.argv = [sys.argv[0], *argv]
        cli = QeRLCLI()
        if isinstance(
            cli.trainer.strategy, UnwrappedDDPStrategy
        ):  # last: the engines have been closed within the group
            return cli.trainer.strategy.finish()
    except Preempted as stop:
        if is_first_process():
            print(f"qerl: {stop}; go on with the same command and --resume auto", file=sys.stderr)
        return 128 + stop.signal_number
    except Stopped as stop:
        if is_first_process():
            print(f"qerl: {stop}; give the same command again", file=sys.stderr)
        return stop.status
    except SIGTERMException:  # Lightning's own end on SIGTERM, where no ResumeCheckpoint listens
        return 128 + signal.SIGTERM
    except Exception as error:  # a user's class may raise anything; what is no user's mistake goes on
        debugging = os.environ.get("QERL_DEBUG") == "1"
        message = None if debugging else explain(error, argv, {*COMMANDS, *QeRLCLI.subcommands()})
        if message is None:
            raise
        if is_first_process():
            print(f"qerl: {message}", file=sys.stderr)
        return USAGE_ERROR
    return 0
