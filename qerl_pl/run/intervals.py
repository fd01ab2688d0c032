"""After how many batches a run does what."""

from lightning.pytorch import Trainer

from qerl_pl.errors import UserError


def require_planned_end(trainer: Trainer) -> None:
    """Refuse a run without an end, by which schedules go.

    Raises:
        UserError: It has no limit on epochs or steps.
    """
    if max(trainer.max_epochs or 0, trainer.max_steps or 0) < 1:
        raise UserError(
            "schedules of noise and learning rate need a planned end; found none; "
            "set trainer.max_epochs or trainer.max_steps"
        )


def check_intervals(trainer: Trainer, batches: int) -> None:
    """Refuse what Lightning refuses in other words, after an engine has been started, or not at all.

    Args:
        trainer: What has the intervals.
        batches: Training batches of an epoch, within the trainer's limit.

    Raises:
        UserError: An epoch has no batch, or validation would come never, by the clock, or after the epoch's end.
    """
    if batches < 1:
        raise UserError(
            f"an epoch needs a batch to train on; trainer.limit_train_batches={trainer.limit_train_batches} leaves "
            "none; raise it"
        )
    epochs, interval = trainer.check_val_every_n_epoch, vars(trainer).get("val_check_interval")  # none by the clock
    if interval is None or interval <= 0 or (epochs is not None and epochs < 1):
        raise UserError(
            "validation comes after so many batches or epochs, not by the clock; found "
            f"val_check_interval={interval} and check_val_every_n_epoch={epochs}; set them above 0, or "
            "trainer.limit_val_batches to 0 for none"
        )
    if isinstance(interval, int) and epochs is not None and interval > batches:
        raise UserError(
            f"val_check_interval must not exceed an epoch's {batches} batches; found {interval}; "
            "lower it, or set trainer.check_val_every_n_epoch to null, which counts on over epochs"
        )
