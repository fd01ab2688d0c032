"""Hyperparameters, tables, plots and the summary in TensorBoard and W&B."""

import logging
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from PIL import Image
from torch.utils.tensorboard.summary import hparams

from qerl_pl.runtime.communicator import writes_files
from qerl_pl.runtime.files import atomic_write

log = logging.getLogger(__name__)

COMPARED = ("reward/mean", "val/accuracy", "val/pass@1", "policy/entropy", "policy/kl")
"""Metrics beside the hyperparameters on TensorBoard's page."""
MAIN = {
    "reward/mean": "1 reward",
    "val/accuracy": "2 greedy accuracy",
    "val/pass@1": "3 sampled accuracy",
    "policy/entropy": "4 entropy",
    "completions/length_mean": "5 length",
}
"""Curves to look at first, by their tags; TensorBoard sorts tags, capital letters before others."""

LOGGED = ("seed_everything", "model", "data", "rollout", "noise", "trainer")
"""Top-level keys that may change what is learned."""


class MainFirstLogger(TensorBoardLogger):
    """TensorBoard's logger, which begins with a group `Main`: copies of the curves to look at first."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log the metrics, and those of `MAIN` once more; of several validation sets with the set's name."""
        first = {}
        for tag, value in metrics.items():
            group, _, rest = tag.partition("/")
            of_set, _, name = rest.rpartition("/")
            if (title := MAIN.get(f"{group}/{name}")) is not None:
                first[f"Main/{title} {of_set}".rstrip()] = value
        super().log_metrics({**metrics, **first}, step)


class SaveFitConfig(SaveConfigCallback):
    """Logs the configuration as hyperparameters, and saves RUN/config.yaml when training begins."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Save nothing yet."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the hyperparameters."""
        if writes_files(trainer):
            self._text = self.parser.dump(self.config, skip_unset=False)
            settings = _logged(self._text)
            for adapter in adapters(trainer.loggers):
                adapter.log_hyperparameters(settings)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save to the run's folder, after a checkpoint has been accepted, and warn if a resumed run has changed."""
        if writes_files(trainer):
            path = Path(trainer.default_root_dir) / self.config_filename
            if trainer.ckpt_path is not None and path.is_file() and (changed := changes(path.read_text(), self._text)):
                log.warning("this run goes on with other settings: %s", "; ".join(changed))
            atomic_write(path, self._text.encode())


def changes(before: str, after: str) -> list[str]:
    """Settings that differ between two configurations in YAML, without those of the trainer, such as its limits."""
    old, new = _logged(before), _logged(after)
    names = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    return [f"{name} was {old.get(name)} and is {new.get(name)}" for name in names if not name.startswith("trainer.")]


def _logged(text: str) -> dict[str, Any]:
    """Settings under `LOGGED` of a configuration in YAML, by their key on the command line."""
    settings = yaml.safe_load(text) or {}
    return flatten({key: settings.get(key) for key in LOGGED})


def flatten(settings: Any, key: str = "") -> dict[str, Any]:
    """Settings by their key on the command line, such as `noise.sigma_start`; classes by name, null left out.

    Args:
        settings: Contents of a YAML file.
        key: Of these settings.
    """
    if isinstance(settings, list) and any(isinstance(item, dict) for item in settings):
        names = [_class_name(item) or str(index) for index, item in enumerate(settings)]
        names = [f"{name}.{index}" if names.count(name) > 1 else name for index, name in enumerate(names)]
        settings = dict(zip(names, settings, strict=True))
    if not isinstance(settings, dict):
        return {} if settings is None else {key: settings}
    flat: dict[str, Any] = {}
    if name := _class_name(settings):
        # The keys of the run's module stand beside its class.
        beside = {part: value for part, value in settings.items() if part not in ("class_path", "dict_kwargs")}
        flat[key], settings = name, beside.pop("init_args", beside) or {}
    for part, value in settings.items():
        flat |= flatten(value, f"{key}.{part}" if key else part)
    return flat


def _class_name(settings: Any) -> str:
    return short_name(str(settings.get("class_path", ""))) if isinstance(settings, dict) else ""


def short_name(path: str) -> str:
    """The last name of an import path; one in a file, file.py:name, as it is."""
    return path if ":" in path else path.rpartition(".")[2]


class LoggerAdapter:
    """What a logger shows beside curves: of CSV files and unknown loggers, the hyperparameters alone."""

    def __init__(self, logger: Any) -> None:
        self.logger = logger

    def log_hyperparameters(self, settings: Mapping[str, Any]) -> None:
        """Log numbers, texts and lists by name, before the first metrics."""
        self.logger.log_hyperparams(dict(settings))

    def log_table(self, name: str, columns: list[str], rows: list[list[Any]], step: int) -> None:
        """Show a rollout's table."""

    def log_image(self, name: str, plot: Path, step: int) -> None:
        """Show a PNG file."""

    def log_summary(self, summary: Mapping[str, Any], step: int) -> None:
        """Show the contents of summary.json."""

    def address(self) -> str | None:
        """The command, URL or file that shows the content; None for an unknown logger."""
        return f"{self.logger.log_dir}/metrics.csv" if isinstance(self.logger, CSVLogger) else None


class TensorBoardAdapter(LoggerAdapter):
    """Writes HParams, Text and Images."""

    def log_hyperparameters(self, settings: Mapping[str, Any]) -> None:
        self.logger.log_hyperparams(dict(settings), metrics={})  # to hparams.yaml; its own page shows a metric, -1
        plain = {name: value if isinstance(value, int | float) else str(value) for name, value in settings.items()}
        for summary in hparams(plain, dict.fromkeys(COMPARED, 0)):
            self.logger.experiment.file_writer.add_summary(summary)

    def log_table(self, name: str, columns: list[str], rows: list[list[Any]], step: int) -> None:
        cells = [[escape(str(value)).replace("|", "&#124;").replace("\n", "<br>") for value in row] for row in rows]
        lines = [columns, ["---"] * len(columns), *cells]
        self.logger.experiment.add_text(name, "\n".join(f"| {' | '.join(line)} |" for line in lines), step)

    def log_image(self, name: str, plot: Path, step: int) -> None:
        with Image.open(plot) as image:
            self.logger.experiment.add_image(name, np.asarray(image.convert("RGB")), step, dataformats="HWC")

    def log_summary(self, summary: Mapping[str, Any], step: int) -> None:
        rows = "\n".join(f"| {name} | {value} |" for name, value in summary.items())
        self.logger.experiment.add_text("summary", f"| | |\n|---|---|\n{rows}", step)

    def address(self) -> str:
        page = "http://localhost:6006/#custom_scalars&_smoothingWeight=0"
        return f"tensorboard --logdir {Path(self.logger.log_dir).parent}, then {page}"


class WandbAdapter(LoggerAdapter):
    """Writes tables, media and the run's summary."""

    def log_table(self, name: str, columns: list[str], rows: list[list[Any]], step: int) -> None:
        self.logger.log_table(name, columns=columns, data=rows, step=step)

    def log_image(self, name: str, plot: Path, step: int) -> None:
        self.logger.log_image(name, [str(plot)], step)

    def log_summary(self, summary: Mapping[str, Any], step: int) -> None:
        self.logger.experiment.summary.update(dict(summary))

    def address(self) -> str:
        run = self.logger.experiment
        return f"wandb sync {run.sync_dir}" if run.offline else str(run.url)


ADAPTERS = {TensorBoardLogger: TensorBoardAdapter, WandbLogger: WandbAdapter}


def adapters(loggers: Iterable[Logger]) -> list[LoggerAdapter]:
    """An adapter for each of the trainer's loggers."""
    return [
        next((adapter for kind, adapter in ADAPTERS.items() if isinstance(logger, kind)), LoggerAdapter)(logger)
        for logger in loggers
    ]
