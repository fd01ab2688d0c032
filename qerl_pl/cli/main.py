"""The program `qerl`: fit, validate and test by LightningCLI, with callbacks as top-level keys; other commands."""

import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import jsonargparse
from jsonargparse import Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint, ProgressBar, RichProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from rich import get_console

from qerl_pl.callbacks import EvaluationReport, Preempted, RolloutCallback, RolloutLines
from qerl_pl.callbacks.loggers import MainFirstLogger, SaveFitConfig
from qerl_pl.cli.commands import DESCRIPTION, USAGE_ERROR, answer, give_flags_values
from qerl_pl.cli.config_checks import (
    CALLBACKS,
    SFT_CALLBACKS,
    listed,
    module_class,
    name_defaults,
    named_module,
    refuse_automatic,
    refuse_lost_curves,
    refuse_lost_defaults,
    refuse_moved_run,
    refuse_null,
)
from qerl_pl.cli.configs import ConfigFile
from qerl_pl.cli.dry_run import DryRun, describe
from qerl_pl.cli.error_messages import explain
from qerl_pl.cli.export import export, take_adapter
from qerl_pl.cli.quantize import quantize
from qerl_pl.cli.terminal import configure_terminal
from qerl_pl.datamodules import ConversationDataModule, PromptDataModule
from qerl_pl.errors import Stopped, StopSignals, UserError
from qerl_pl.modules import QeRLModule
from qerl_pl.modules.qerl import BEFORE_TRAINING
from qerl_pl.rewards import Reward
from qerl_pl.runtime.checkpoint_io import (
    CHECKPOINTS,
    AtomicCheckpointIO,
    finished_rollouts,
    newest_checkpoint,
    verify,
)
from qerl_pl.runtime.checks import check_devices, check_ranks_divide, check_world
from qerl_pl.runtime.communicator import is_first_process, planned_ranks, writes_files
from qerl_pl.runtime.files import locked
from qerl_pl.runtime.random_state import set_cublas_config
from qerl_pl.runtime.strategy import UnwrappedDDPStrategy


def stop_at_once() -> Callback:
    """A callback that ends an evaluation on SIGTERM, SIGINT or SIGHUP at any point of it.

    Lightning itself checks for SIGTERM between batches only, and a set may be one batch; on SIGINT it exits with 1.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    signals = StopSignals(stop)

    def take(*_: Any) -> None:
        signals.install()

    def give_back(*_: Any, **__: Any) -> None:
        signals.restore()

    # After an exception Lightning tears no callback down.
    return LambdaCallback(on_test_start=take, on_validation_start=take, teardown=give_back, on_exception=give_back)


log = logging.getLogger(__name__)

COMMANDS: dict[str, Callable[..., None]] = {"quantize": quantize, "export": export}

DEFAULTS = {
    "model.policy.gradient_checkpointing": "auto",
    "model.policy.mlp_tile_tokens": "auto",
    "model.micro_batch_tokens": 16384,
    "trainer.log_every_n_steps": 1,
    "trainer.enable_model_summary": False,
    "trainer.num_sanity_val_steps": -1,
}
"""Defaults of the command line that differ from those of the classes: for models of billions of parameters on a GPU."""

VALIDATE = "validate"
"""The command, and the folder under the run's for its curves, each time a new `version_N`."""


class QeRLCLI(LightningCLI):
    """LightningCLI for this package's modules, with one folder for all files of a run, and `--resume`."""

    def __init__(self, args: ArgsType = None) -> None:
        given = sys.argv[1:] if args is None else args
        self._only = _named_first(given)
        self._module = module_class(given)
        self._has_rollouts = issubclass(self._module, QeRLModule)
        self._callback_keys = CALLBACKS if self._has_rollouts else SFT_CALLBACKS
        super().__init__(
            self._module,
            LightningDataModule,  # prompts, or conversations for supervised fine-tuning
            subclass_mode_data=True,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            save_config_callback=SaveFitConfig,
            save_config_kwargs={"overwrite": True},  # a resumed run goes on in its folder
            # No abbreviations: --model.lr would set model.lr_scheduler.
            parser_kwargs={"exit_on_error": False, "allow_abbrev": False, "description": DESCRIPTION},
            args=args,
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Methods of the trainer, each with the arguments that the CLI passes itself."""
        own = {"model", "dataloaders", "datamodule"}
        return {"fit": own | {"train_dataloaders", "val_dataloaders"}, "validate": own, "test": own}

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        """Add the hundreds of keys to the subcommand that is called only, which saves 0.1 s for each other one."""
        if self._only in (None, subcommand):
            return super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        return self.init_parser(**kwargs)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("seed_everything", "model.seed", compute_fn=_run_seed)
        parser.add_argument(
            "--model.class_path",
            type=str,
            default=jsonargparse.SUPPRESS,
            help="The module: QeRLModule (default), SFTModule, or one of yours, my_package.Mine or my_file.py:Mine.",
        )
        # Or jsonargparse reads a table that data.path names as configuration, and takes a .csv's text for the path.
        parser._option_string_actions["--data"].sub_add_kwargs["sub_configs"] = False  # type: ignore[attr-defined]
        if self._has_rollouts:
            # Not instantiated by the parser: a configuration that lists its RolloutCallback has no rewards here.
            parser.add_class_arguments(RolloutCallback, "rollout", instantiate=False, skip={"rewards"})
            parser.add_argument(
                "--rollout.rewards",
                type=dict[str, Reward | str] | list[Reward | str],
                default={},
                help="What scores a completion, by name: classes, or functions named module.function or "
                "file.py:function.",
            )
            parser.set_defaults({"rollout.engine": {"class_path": "qerl_pl.engines.VLLMEngine"}})
        for key, (kind, settings, text) in self._callback_keys.items():
            class_path = f"{kind.__module__}.{kind.__qualname__}"
            default = None if settings is None else {"class_path": class_path, "init_args": settings}
            parser.add_argument(f"--{key}", type=kind | None, default=default, help=text)
        parser.set_defaults(DEFAULTS)
        parser.add_argument(
            "--dry-run",
            action="store_true",
            help="Print what the run needs of memory, estimated, and the longest completion that fits; load nothing.",
        )
        parser.add_argument(
            "--resume",
            type=str | None,
            default=None,
            help="`auto` loads the newest complete checkpoint under trainer.default_root_dir, a path that checkpoint: "
            "fit goes on from it (and starts fresh if there is none), validate and test evaluate it. null starts "
            "fresh, in a folder without any, and evaluates the policy before training.",
        )

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """A parser that raises its errors instead of exiting; `main` prints them."""
        parser = LightningArgumentParser(**{**kwargs, "exit_on_error": False})
        explained = "A YAML file, or a name that `qerl configs` lists; of several, later ones override."
        parser.add_argument("-c", "--config", action=ConfigFile, help=explained)
        return parser

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse, and set defaults that depend on other keys: the objective, the data's seed, the run's folder."""
        is_parsed = isinstance(args, dict | Namespace)
        self.config = parser.parse_object(args) if is_parsed else parser.parse_args(args)  # type: ignore[arg-type]
        command = self.config["subcommand"]
        config = self.config[command]
        defaults = self._parser(command).get_defaults()
        refuse_null(parser, self.config, defaults)
        if command == "fit":
            refuse_automatic(config.trainer)
            refuse_lost_defaults(config.get("best"))
        if named_module(config.model.get("class_path")) is not self._module:
            raise UserError(
                "model.class_path is read before other keys; it stands in a pipe, or in no file that -c names; "
                "add --model.class_path"
            )
        if self._module is QeRLModule:  # so that RUN/config.yaml is the same with and without it
            config.model.pop("class_path", None)
        name_defaults(config.model)
        if config.data.get("init_args", {}).get("seed", 0) is None:
            config.data.init_args.seed = config.model.seed
        if config.trainer.default_root_dir is None:
            stems = [Path(path).stem for path in config.get("config") or [] if path is not None]
            config.trainer.default_root_dir = f"runs/{'_'.join(stems) or 'default'}"
        take_adapter(config.model.policy, command, config.get("resume"))
        if config.get("ckpt_path") is not None:
            verify(Path(config.ckpt_path))

    def before_instantiate_classes(self) -> None:
        """Build a module of another class from the keys under `model`; stop a dry run.

        Raises:
            DryRun: The run is not to start.
        """
        if self._module is not QeRLModule:
            # In place of Lightning's own, which keeps hyperparameters. For the parser the class's name is an argument.
            self.parser.add_instantiator(
                lambda kind, class_path, **settings: kind(**settings), self._module, subclasses=False, prepend=True
            )
        if self._get(self.config, "dry_run"):
            if (command := self.config["subcommand"]) != "fit":
                raise UserError(f"--dry-run plans the memory of a training; got qerl {command}; say qerl fit --dry-run")
            settings = self.parser.instantiate_classes(self.config)[command]
            callbacks = listed(settings.trainer.callbacks)
            rollouts = [callback for callback in callbacks if isinstance(callback, RolloutCallback)]
            if not rollouts and self._has_rollouts:
                rollouts = [RolloutCallback(**settings.rollout)]
            plan = describe(settings.model, settings.data, rollouts[0] if rollouts else None)
            if rollouts:
                rollouts[0].check_sizes(settings.model, settings.data, trains=True)
            raise DryRun(plan)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The trainer with atomic checkpoints, and TensorBoard in the run's folder unless the YAML names a logger."""
        config = self._get(self.config_init, "trainer")
        root = os.path.expanduser(config["default_root_dir"])
        kwargs["default_root_dir"] = root
        for folder in (Path(root), Path(root) / CHECKPOINTS):  # before TensorBoard, whose thread fails at the end
            if folder.exists() and not os.access(folder, os.W_OK | os.X_OK):
                raise UserError(
                    f"a run writes to its folder; {folder} is read-only; choose another trainer.default_root_dir, or "
                    "allow it"
                )
        kwargs["plugins"] = [*listed(config["plugins"]), AtomicCheckpointIO()]
        self._logger: MainFirstLogger | None = None
        if config["logger"] in (None, True):
            # The run's curve has a validation of that step already, or one with other settings.
            own: dict[str, Any] = {"name": VALIDATE} if self.subcommand == VALIDATE else {"name": "", "version": ""}
            kwargs["logger"] = self._logger = MainFirstLogger(save_dir=root, **own)
        kwargs["use_distributed_sampler"] = False  # every rank sees the complete batch
        trainer = self._trainer(kwargs, config)
        check_world(trainer)
        if planned_ranks(trainer) > 1 and type(trainer.strategy) is DDPStrategy:
            trainer = self._trainer(kwargs | {"strategy": UnwrappedDDPStrategy()}, config)
        check_devices(trainer)
        refuse_lost_curves(trainer)
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
                # As its __init__ has it: on resumption it compares the folder, or forgets its best score.
                callback.dirpath = os.path.realpath(Path(root) / CHECKPOINTS)
        return trainer

    def _trainer(self, given: dict[str, Any], config: Any) -> Trainer:
        own = [] if self.subcommand == "fit" else [stop_at_once()]
        callbacks = [*own, *self._callbacks(config)]
        if config["enable_progress_bar"] is not False and not any(isinstance(one, ProgressBar) for one in callbacks):
            shows_bar = self.subcommand != "fit" and get_console().is_terminal
            callbacks.append(RichProgressBar() if shows_bar else RolloutLines())
        try:
            return super().instantiate_trainer(**given, callbacks=callbacks)
        except (MisconfigurationException, RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            text = " ".join(str(error).split())
            raise UserError(f"Lightning's Trainer refuses a key: {text:.480}; see qerl fit --help") from error

    def _callbacks(self, trainer: Namespace) -> list[Callback]:
        """`trainer.callbacks` and those of the other top-level keys; a list with a RolloutCallback is complete."""
        callbacks = listed(trainer["callbacks"])
        kinds = {type(callback) for callback in callbacks}
        if any(issubclass(kind, RolloutCallback) for kind in kinds):
            log.info("trainer.callbacks has a RolloutCallback and is complete: keys of callbacks have no effect")
            return callbacks
        if self._has_rollouts:
            rollout = self._get(self.config_init, "rollout")
            if not rollout.rewards and rollout.environment.factory is None:
                raise UserError(
                    "a run needs rewards; rollout.rewards names none; set it to {accuracy: GSM8KAnswer}, say"
                )
            callbacks = [RolloutCallback(**rollout), *callbacks]
        off = ("best", "checkpoint") if trainer["enable_checkpointing"] is False else ()
        named = [self._get(self.config_init, key) for key in self._callback_keys if key not in off]
        return [*callbacks, *(one for one in named if one is not None and type(one) not in kinds)]

    def fit(self, model: LightningModule, datamodule: LightningDataModule, **kwargs: Any) -> None:
        """Train, from the checkpoint of `--resume` or `--ckpt_path`."""
        root = Path(self.trainer.default_root_dir)
        if (ranks := planned_ranks(self.trainer)) > 1:
            assert isinstance(datamodule, PromptDataModule | ConversationDataModule)
            check_ranks_divide(datamodule.batch_size, ranks)
        with locked(root) if self.trainer.is_global_zero else nullcontext():
            kwargs |= self._checkpoint(kwargs)
            if self._get(self.config, "resume") == "auto" and kwargs["ckpt_path"] is None:
                log.info("no checkpoint in %s to resume from; starting fresh", root.absolute() / CHECKPOINTS)
            elif kwargs.get("ckpt_path") is None and writes_files(self.trainer) and (old := newest_checkpoint(root)):
                raise UserError(
                    f"a run that starts fresh needs a folder without another run's checkpoints; got {old}; add "
                    "--resume auto to go on, or choose another trainer.default_root_dir"
                )
            self._log_from(kwargs.get("ckpt_path"))
            self.trainer.fit(model, datamodule=datamodule, **kwargs)

    def _log_from(self, checkpoint: str | Path | None) -> None:
        """Start TensorBoard's log at the checkpoint, so that steps that a killed run logged after it are hidden."""
        if self._logger is not None and self.trainer.logger is self._logger:  # a trial run has another
            first = BEFORE_TRAINING if checkpoint is None else finished_rollouts(Path(checkpoint))
            self.trainer.logger = MainFirstLogger(self._logger.save_dir, name="", version="", purge_step=first)

    def validate(self, model: LightningModule, datamodule: LightningDataModule, **kwargs: Any) -> None:
        """Evaluate on the validation prompts."""
        self.trainer.validate(model, datamodule=datamodule, **kwargs | self._evaluated(kwargs))

    def test(self, model: LightningModule, datamodule: LightningDataModule, **kwargs: Any) -> None:
        """Evaluate on the test prompts."""
        if not is_overridden("test_step", model):
            raise UserError(
                f"qerl test samples answers, which {type(model).__name__} does not; evaluate its loss by qerl "
                "validate, or its adapter by qerl test -c evaluate --model.policy.path RUN/adapter"
            )
        self.trainer.test(model, datamodule=datamodule, **kwargs | self._evaluated(kwargs))

    def _checkpoint(self, given: dict[str, Any]) -> dict[str, Path | None]:
        """Lightning's `ckpt_path` by `--resume`; empty if that is not set."""
        resume = self._get(self.config, "resume")
        if resume is None:
            return {}
        if given.get("ckpt_path") is not None:
            raise UserError(f"--resume and --ckpt_path exclude each other; got both, --resume {resume}; leave one out")
        if resume == "auto":
            root = Path(self.trainer.default_root_dir)
            refuse_moved_run(self._get(self.config, "config"), root)
            path = newest_checkpoint(root)
        else:
            path = Path(resume)
            verify(path)
        if path is not None:
            log.info("resuming from %s", path)
        return {"ckpt_path": path}

    def _evaluated(self, given: dict[str, Any]) -> dict[str, Any]:
        limit = f"limit_{'val' if self.subcommand == VALIDATE else 'test'}_batches"
        if getattr(self.trainer, limit) == 0:
            raise UserError(f"qerl {self.subcommand} evaluates prompts; got trainer.{limit} 0; set it to 1.0")
        options: dict[str, Any] = self._checkpoint(given)
        if options.get("ckpt_path", "") is None:
            raise UserError(
                f"--resume auto needs a checkpoint; {self.trainer.default_root_dir} has none; name the run's folder by "
                "trainer.default_root_dir, or leave --resume out to evaluate the policy before training"
            )
        if not options and given.get("ckpt_path") is None:
            start = self._get(self.config, "model")["policy"]["adapter"]
            log.info("no checkpoint is named: this evaluates %s", start or "the policy before training")
        if any(isinstance(callback, EvaluationReport) for callback in self.trainer.callbacks):  # type: ignore[attr-defined]
            options["verbose"] = False  # the report has a table
        return options


def _named_first(args: Any) -> str | None:
    """The subcommand if it is the first argument, or of a parsed configuration; else None."""
    word = args.get("subcommand") if isinstance(args, dict | Namespace) else next(iter(args), None)
    return word if word in QeRLCLI.subcommands() else None


def _run_seed(seed: bool | int | None) -> int:
    """The run's seed by `seed_everything`, in Lightning's bounds."""
    if seed is None or isinstance(seed, bool) or not 0 <= seed < 2**32:
        raise UserError(f"a run needs a seed from 0 to {2**32 - 1}; got {seed}; set seed_everything to 0, say")
    return seed


INTERRUPTED = 128 + signal.SIGINT, "stopped by SIGINT; give the same command again"
_interrupts: list[int] = []
"""Signals that `interrupt` has handled."""


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, as Python does at SIGINT, and note it: an extension may raise its own error instead."""
    _interrupts.append(number)
    signal.default_int_handler(number, frame)


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
    set_cublas_config()
    sys.path.insert(0, str(Path.cwd()))  # for a user's own reward or data module
    try:
        if answer(argv):
            return 0
        if argv[0] in COMMANDS:
            jsonargparse.auto_cli(
                COMMANDS[argv[0]],
                args=give_flags_values(COMMANDS[argv[0]], argv[1:]),
                as_positional=True,
                exit_on_error=False,
                allow_abbrev=False,
                prog=f"qerl {argv[0]}",
            )
            return 0
        sys.argv = [sys.argv[0], *argv]
        cli = QeRLCLI()
        if isinstance(cli.trainer.strategy, UnwrappedDDPStrategy):  # last: closing the engines needs the group
            return cli.trainer.strategy.finish()
        return 0
    except DryRun as done:
        print(done)
        return 0
    except Preempted as stop:
        status, message = 128 + stop.signal_number, f"{stop}; go on with the same command and --resume auto"
    except Stopped as stop:
        status, message = stop.status, f"{stop}; give the same command again"
    except (KeyboardInterrupt, SystemExit) as end:  # Lightning exits with status 1 on a KeyboardInterrupt
        if isinstance(end, SystemExit) and not isinstance(end.__context__, KeyboardInterrupt):
            raise
        status, message = INTERRUPTED
    except SIGTERMException:  # Lightning's own end on SIGTERM, without a ResumeCheckpoint
        return 128 + signal.SIGTERM
    except Exception as error:  # a user's class may raise anything
        status, line = INTERRUPTED if _interrupts else (USAGE_ERROR, explain(error, argv))
        if line is None or os.environ.get("QERL_DEBUG") == "1":
            raise
        message = line
    if is_first_process():
        with suppress(OSError):  # of a terminal that has gone
            print(f"qerl: {message}", file=sys.stderr)
    return status
