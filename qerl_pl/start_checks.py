"""Checks of a run's settings before a policy, an engine or a file is made."""

from lightning.pytorch import Trainer


class ChecksFirst:
    """A module or callback that can refuse a run by its settings alone."""

    fills_batches = False
    """Whether it fills in the batches that training, validation and test steps read."""

    def check_first(self, trainer: Trainer, stage: str) -> None:
        """Check the settings without a policy or an engine; may be called more than once.

        Args:
            trainer: With all of its callbacks, its module and its data module.
            stage: fit, validate or test.

        Raises:
            UserError: A setting is wrong.
        """
        raise NotImplementedError


def check_first(trainer: Trainer, stage: str) -> None:
    """Call `check_first` of all callbacks, then of the module."""
    for hook in (*trainer.callbacks, trainer.lightning_module):  # type: ignore[attr-defined]
        if isinstance(hook, ChecksFirst):
            hook.check_first(trainer, stage)
