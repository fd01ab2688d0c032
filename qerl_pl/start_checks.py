"""What is checked before anything is made for a run: a policy, an engine, a file."""

from lightning.pytorch import Trainer


class ChecksFirst:
    """A module or callback that can refuse a run by its settings alone."""

    fills_batches = False
    """Whether it samples what training, validation and test steps read from their batch."""

    def check_first(self, trainer: Trainer, stage: str) -> None:
        """Refuse what needs no policy and no engine to be seen; may be called more than once.

        Args:
            trainer: With all of its callbacks, its module and its data module.
            stage: fit, validate or test.

        Raises:
            UserError: A setting is wrong.
        """
        raise NotImplementedError


def check_first(trainer: Trainer, stage: str) -> None:
    """Have callbacks and module check, the module last: what it needs of callbacks they have said by then."""
    for hook in (*trainer.callbacks, trainer.lightning_module):  # type: ignore[attr-defined]
        if isinstance(hook, ChecksFirst):
            hook.check_first(trainer, stage)
