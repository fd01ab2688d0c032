"""Hyperparameters and tables in TensorBoard and W&B, and the configuration in the run's folder."""

import logging
import shlex
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
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
            own = self.config.clone()
            own.resume = None  # of this command: another one with the file may evaluate the adapter
            self._text = self.parser.dump(own, skip_unset=False)
            for logger in trainer.loggers:
                log_hyperparameters(logger, _logged(self._text))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save to the run's folder, after a checkpoint has been accepted, and warn if a resumed run has changed."""
        if writes_files(trainer):
            path = Path(trainer.default_root_dir) / self.config_filename
            if trainer.ckpt_path is not None and path.is_file() and (changed := changes(path.read_text(), self._text)):
                log.warning("this run goes on with other settings than the last command: %s", "; ".join(changed))
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
        key: Key of these settings.
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
    """The last name of a class's import path; one in a file, file.py:name, as it is; empty for other settings."""
    path = str(settings.get("class_path", "")) if isinstance(settings, dict) else ""
    return path if ":" in path else path.rpartition(".")[2]


def log_hyperparameters(logger: Logger, settings: dict[str, Any]) -> None:
    """Log numbers, texts and lists by name, before the first metrics; TensorBoard shows them on its page HParams."""
    if not isinstance(logger, TensorBoardLogger):
        logger.log_hyperparams(settings)
        return
    logger.log_hyperparams(settings, metrics={})  # to hparams.yaml; its own page shows a metric, -1
    plain = {name: value if isinstance(value, int | float) else str(value) for name, value in settings.items()}
    for summary in hparams(plain, dict.fromkeys(COMPARED, 0)):
        logger.experiment.file_writer.add_summary(summary)


def log_table(logger: Logger, name: str, columns: list[str], rows: list[list[Any]], step: int) -> None:
    """Show a table, as W&B has them, or on TensorBoard's page Text; other loggers show none."""
    if isinstance(logger, WandbLogger):
        logger.log_table(name, columns=columns, data=rows, step=step)
    if isinstance(logger, TensorBoardLogger):
        cells = [[escape(str(value)).replace("|", "&#124;").replace("\n", "<br>") for value in row] for row in rows]
        lines = [columns, ["---"] * len(columns), *cells]
        logger.experiment.add_text(name, "\n".join(f"| {' | '.join(line)} |" for line in lines), step)


def address_of(logger: Logger) -> str | None:
    """The command, URL or file that shows what was logged; None for an unknown logger."""
    if isinstance(logger, TensorBoardLogger):
        page = "http://localhost:6006/#custom_scalars&_smoothingWeight=0"
        return f"tensorboard --logdir {shlex.quote(str(Path(logger.log_dir).parent))}, then {page}"
    if isinstance(logger, WandbLogger):
        run = logger.experiment
        return f"wandb sync {shlex.quote(run.sync_dir)}" if run.offline else str(run.url)
    return f"{logger.log_dir}/metrics.csv" if isinstance(logger, CSVLogger) else None
