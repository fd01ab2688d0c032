"""Hyperparameters, tables, plots and the summary in TensorBoard, W&B and MLflow."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from PIL import Image
from torch.utils.tensorboard.summary import hparams

from qerl_pl.runtime.communicator import writes_files
from qerl_pl.runtime.files import atomic_write

log = logging.getLogger(__name__)

COMPARED = ("reward/mean", "val/accuracy", "val/pass@1", "policy/entropy", "policy/kl")
"""Metrics beside the hyperparameters on TensorBoard's page."""

LOGGED = ("seed_everything", "model", "data", "rollout", "noise", "trainer")
"""Top-level keys that may change what is learned."""


class SaveFitConfig(SaveConfigCallback):
    """Logs the configuration as hyperparameters, and saves RUN/config.yaml when training begins."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Save nothing yet."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the hyperparameters."""
        if writes_files(trainer):
            self._text = self.parser.dump(self.config, skip_unset=False)
            log_hyperparameters(trainer.loggers, _logged(self._text))

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
        flat[key], settings = name, settings.get("init_args") or {}
    for part, value in settings.items():
        flat |= flatten(value, f"{key}.{part}" if key else part)
    return flat


def _class_name(settings: Any) -> str:
    return (
        str(settings["class_path"]).rpartition(".")[2]
        if isinstance(settings, dict) and "class_path" in settings
        else ""
    )


def log_hyperparameters(loggers: Iterable[Logger], settings: Mapping[str, Any]) -> None:
    """Log settings to every logger, before the first metrics.

    Args:
        loggers: The trainer's.
        settings: Numbers, texts and lists by name.
    """
    for logger in loggers:
        given = dict(settings)
        if isinstance(logger, TensorBoardLogger):
            logger.log_hyperparams(given, metrics={})  # to hparams.yaml; Lightning's page shows a metric of its own, -1
            for summary in hparams(_plain(given), dict.fromkeys(COMPARED, 0)):
                logger.experiment.file_writer.add_summary(summary)
            continue
        if isinstance(logger, MLFlowLogger):  # which refuses a change, so that a resumed run keeps its first settings
            logged = logger.experiment.get_run(logger.run_id).data.params
            given = {name: value for name, value in given.items() if name not in logged}
        logger.log_hyperparams(given)


def _plain(settings: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    return {name: value if isinstance(value, bool | int | float) else str(value) for name, value in settings.items()}


def log_table(
    loggers: Iterable[Logger], name: str, columns: list[str], rows: Sequence[list[Any]], text: str, step: int
) -> None:
    """Show a table in W&B, and as Markdown in TensorBoard and MLflow.

    Args:
        loggers: The trainer's.
        name: Of the panel or the artifacts.
        columns: Headings.
        rows: Numbers and texts of each row.
        text: The same in Markdown.
        step: Rollout that they belong to.
    """
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_text(name, text, step)
        elif isinstance(logger, WandbLogger):
            logger.log_table(name, columns=columns, data=[*rows], step=step)
        elif isinstance(logger, MLFlowLogger):
            # Not `log_table`, which appends: a resumed run repeats rollouts.
            logger.experiment.log_text(logger.run_id, text, f"{name}/rollout-{step:06d}.md")


def log_result(loggers: Iterable[Logger], summary: Mapping[str, Any], plot: Path, step: int) -> None:
    """Show a run's summary and its plot in TensorBoard, W&B and MLflow.

    Args:
        loggers: The trainer's.
        summary: Contents of summary.json.
        plot: PNG file.
        step: Last rollout.
    """
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            rows = "\n".join(f"| {name} | {value} |" for name, value in summary.items())
            logger.experiment.add_text("summary", f"| | |\n|---|---|\n{rows}", step)
        elif isinstance(logger, WandbLogger):
            logger.experiment.summary.update(dict(summary))
        elif isinstance(logger, MLFlowLogger):
            logger.experiment.log_dict(logger.run_id, dict(summary), "summary.json")
        log_image([logger], "run", plot, step)


def log_image(loggers: Iterable[Logger], name: str, plot: Path, step: int) -> None:
    """Show a plot in TensorBoard, W&B and MLflow.

    Args:
        loggers: The trainer's.
        name: Of the panel.
        plot: PNG file.
        step: Rollout that it belongs to.
    """
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            with Image.open(plot) as image:
                logger.experiment.add_image(name, np.asarray(image.convert("RGB")), step, dataformats="HWC")
        elif isinstance(logger, WandbLogger):
            logger.log_image(name, [str(plot)], step)
        elif isinstance(logger, MLFlowLogger):
            logger.experiment.log_artifact(logger.run_id, str(plot))


def where_to_look(logger: Logger) -> str | None:
    """The command, URL or file that shows a logger's content; None for an unknown logger."""
    if isinstance(logger, TensorBoardLogger):
        return f"tensorboard --logdir {Path(logger.log_dir).parent}, then http://localhost:6006/#custom_scalars&_smoothingWeight=0"
    if isinstance(logger, WandbLogger):
        run = logger.experiment
        return f"wandb sync {run.sync_dir}" if run.offline else run.url
    if isinstance(logger, MLFlowLogger):
        address = logger.experiment.tracking_uri
        if address.startswith("http"):
            return f"{address}/#/experiments/{logger.experiment_id}/runs/{logger.run_id}"
        return f"mlflow ui --backend-store-uri {address}"
    return f"{logger.log_dir}/metrics.csv" if isinstance(logger, CSVLogger) else None
