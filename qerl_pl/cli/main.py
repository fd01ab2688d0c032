"""`qerl fit`, `validate` and `test`, LightningCLI with a run's callbacks as top-level keys; `quantize` and `export`."""

import inspect
import logging
import os
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
from jsonargparse import ActionConfigFile, ArgumentParser, Namespace, set_parsing_settings
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException

from qerl_pl.callbacks import (
    AdaptiveQuantizationNoise,
    CompletionLog,
    EvaluationReport,
    Monitor,
    Preempted,
    ResumeCheckpoint,
    RolloutCallback,
    RunSummary,
)
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
from qerl_pl.rewards import Reward


def check_values(parser: ArgumentParser, config: Namespace) -> None:
    """Refuse null, which an empty value in a YAML file is, where a key does not take it.

    Raises:
        ArgumentError: A key has null for a value.
        UserError: A key that has keys of its own has another value in their place.
    """
    run = config[config["subcommand"]]
    for key, kind in {"model": QeRLModule, "rollout": RolloutCallback, "trainer": Trainer}.items():
        _check_group(kind, run[key], key)
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
    for item in value if isinstance(value, list) else []:
        name = item.get("class_path", "") if isinstance(item, Namespace) else ""
        _check_classes(item, f"{key}.{name.rpartition('.')[2]}".removesuffix("."))
    if isinstance(value, Namespace):
        if "class_path" in value and "init_args" in value:
            _check_group(resolve_name(value["class_path"]), value["init_args"], key)
        for name, item in vars(value).items():
            _check_classes(item, f"{key}.{name}".removesuffix(".init_args").removeprefix("."))


def _check_group(kind: type, value: Any, key: str) -> None:
    """Check that the keys of a class, and of each dataclass among its arguments, have not been replaced."""
    if not isinstance(value, Namespace):
        raise UserError(f"{key} has keys of its own; found {value!r}; set them, or leave it out")
    for name, parameter in inspect.signature(kind).parameters.items():
        if isinstance(parameter.annotation, type) and is_dataclass(parameter.annotation):
            _check_group(parameter.annotation, value.get(name), f"{key}.{name}")


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
fit, validate and test take -c CONFIG.yaml, also several times (the later one overrides), and any key of it as
--key value, such as --rollout.group_size 16. Besides them: `qerl quantize --help` (write a 4-bit checkpoint) and
`qerl export --help` (write an adapter or merged weights)."""

CALLBACKS: dict[str, tuple[type[Callback], dict[str, Any] | None, str]] = {
    "noise": (AdaptiveQuantizationNoise, None, "Adaptive quantization noise of the rollouts. null samples without."),
    "best": (
        ModelCheckpoint,
        # Not step=N, the name of a checkpoint that --resume auto takes.
        {"monitor": "val/accuracy", "mode": "max", "filename": "best-{rollouts:.0f}"},
        "Saves the checkpoint of the best validation. null saves none.",
    ),
    "checkpoint": (ResumeCheckpoint, {}, "Saves the checkpoints that --resume auto goes on from. null saves none."),
    "monitor": (Monitor, {}, "TensorBoard's layout and the peak of memory. null logs neither."),
    "completions": (CompletionLog, {}, "Shows completions in TensorBoard, or writes all of them. null does neither."),
    "summary": (RunSummary, {}, "Writes summary.json and run.png, and prints a table at the end. null does none of it."),
    "report": (EvaluationReport, None, "Report of `qerl test` and `qerl validate`, with every sample. null writes none."),
}
"""Top-level keys for callbacks: class, arguments by default or None for a callback that is off, help."""

DEFAULTS = {
    "model.policy.gradient_checkpointing": "auto",
    "model.micro_batch_tokens": 16384,
    "trainer.log_every_n_steps": 1,
    "trainer.enable_model_summary": False,
    "trainer.num_sanity_val_steps": -1,
    "rollout.engine": {"class_path": "qerl_pl.engines.VLLMEngine"},
}
"""Of the command line, for a model of billions of parameters on a GPU, where a class or Lightning has others."""

USAGE_ERROR = 2

VALIDATE = "validate"

"""The command, and the folder under the run's where its curves go, each time a new `version_N`."""


class ConfigFile(ActionConfigFile):
    """A configuration file whose rewards are added, by name, to those of the files before it."""

    @staticmethod
    def apply_config(parser: ArgumentParser, cfg: Namespace, dest: str, value: str) -> None:
        """Merge a file into what is parsed; jsonargparse by itself replaces a dictionary."""
        earlier = cfg.get("rollout.rewards")
        ActionConfigFile.apply_config(parser, cfg, dest, value)
        rewards = cfg.get("rollout.rewards")
        if isinstance(earlier, dict) and isinstance(rewards, dict):
            cfg["rollout.rewards"] = earlier | rewards


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
        # Not instantiated by the parser: a configuration that lists its callbacks has no rewards here.
        parser.add_class_arguments(RolloutCallback, "rollout", instantiate=False, skip={"rewards"})
        parser.add_argument(
            "--rollout.rewards",
            type=dict[str, Reward] | list[Reward],
            default={},
            help="What scores a completion, by name; the total is the weighted sum.",
        )
        for key, (kind, settings, text) in CALLBACKS.items():
            class_path = f"{kind.__module__}.{kind.__qualname__}"
            default = None if settings is None else {"class_path": class_path, "init_args": settings}
            parser.add_argument(f"--{key}", type=kind | None, default=default, help=text)
        parser.set_defaults(DEFAULTS)
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
        parser = LightningArgumentParser(**{**kwargs, "exit_on_error": False})
        parser.add_argument("-c", "--config", action=ConfigFile, help="A YAML file; of several, later ones override.")
        return parser

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse; the run's folder is named for its configuration files, and its seed orders the data, by default."""
        parse = parser.parse_object if isinstance(args, dict | Namespace) else parser.parse_args
        try:
            self.config = parse(args)
        except UnicodeDecodeError as error:
            raise UserError(
                f"a configuration is text in UTF-8; it holds {error.object[:40]!r}; save it as such"
            ) from error
        check_values(parser, self.config)
        command = self.config["subcommand"]
        config = self.config[command]
        if config.model.objective is None:  # no default of the key's, or one that is named would take its beta
            config.model.objective = Namespace(class_path="qerl_pl.algorithm.GRPO", init_args=Namespace(beta=0.0))
        if config.data.get("init_args", {}).get("seed", 0) is None:
            config.data.init_args.seed = config.model.seed
        if config.trainer.default_root_dir is None:
            stems = [Path(path).stem for path in config.get("config") or [] if path is not None]
            config.trainer.default_root_dir = f"runs/{'_'.join(stems) or 'default'}"
        self._adapter = take_adapter(config.model.policy, command, config.get("resume"))
        if config.get("ckpt_path") is not None:
            verify(Path(config.ckpt_path))

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The trainer with whole checkpoints, and TensorBoard in the run folder unless the YAML names a logger."""
        config = self._get(self.config_init, "trainer")
        root = os.path.expanduser(config["default_root_dir"])
        kwargs["default_root_dir"] = root
        try:
            Path(root).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"a run needs a folder; trainer.default_root_dir {root} cannot be made ({error.strerror}); "
                "choose another"
            ) from error
        kwargs["plugins"] = [*(config["plugins"] or []), AtomicCheckpointIO()]
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
        try:
            trainer: Trainer = super().instantiate_trainer(**given, callbacks=[*ours, *self._callbacks(config)])
        except (RuntimeError, TypeError, ValueError) as error:
            said = " ".join(str(error).split())
            raise UserError(
                f"Lightning's Trainer refuses a key of trainer: {said:.180}; see qerl fit --help"
            ) from error
        return trainer

    def _callbacks(self, trainer: Namespace) -> list[Callback]:
        """The callbacks of the top-level keys around those of `trainer.callbacks`, noise before the rollout.

        A list that has a RolloutCallback is complete: to it nothing is added.
        """
        listed = trainer["callbacks"] or []
        listed = [*listed] if isinstance(listed, list) else [listed]
        if not any(isinstance(callback, RolloutCallback) for callback in listed):
            rollout = self._get(self.config_init, "rollout")
            if not rollout.rewards:
                raise UserError("a run needs rewards; rollout.rewards names none; set it to {accuracy: GSM8KAnswer}, say")
            others = {key: self._get(self.config_init, key) for key in CALLBACKS}
            if trainer["enable_checkpointing"] is False:
                others |= {"best": None, "checkpoint": None}
            taken = {type(callback) for callback in listed}
            added = [one for one in others.values() if one is not None and type(one) not in taken]
            listed = [RolloutCallback(**rollout), *listed, *added]
        return sorted(listed, key=lambda callback: not isinstance(callback, AdaptiveQuantizationNoise))

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
        for callback in cli.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, RolloutCallback):
                callback.close()
        if isinstance(cli.trainer.strategy, UnwrappedDDPStrategy):
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
