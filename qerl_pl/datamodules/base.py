"""What the data modules share: batches of rows, the same on all ranks, in a seeded order that checkpoints save."""

import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, cast

import numpy
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from qerl_pl.chat.template import SYSTEM_PROMPT, check_template_kwargs
from qerl_pl.datamodules.table_files import first_line
from qerl_pl.errors import UserError, require_at_least
from qerl_pl.runtime.checks import check_first, check_ranks_divide
from qerl_pl.runtime.communicator import planned_ranks
from qerl_pl.seeds import stream_seed

log = logging.getLogger("qerl_pl")


class PromptSampler(DistributedSampler[int]):
    """Indices of the training rows, shuffled by (seed, epoch) and resumable; the last batch is complete.

    A `DistributedSampler`, so that Lightning sets its epoch and does not replace it; but every rank gets the full
    batch, which the rollout partitions: a run may resume with another number of ranks. It shuffles at the first index,
    as loaders are restored before Lightning sets the epoch.
    """

    def __init__(self, size: int, batch_size: int, seed: int) -> None:
        self.epoch = 0
        self._size = size
        self._batch_size = batch_size
        self._seed = seed
        self._yielded = 0
        self._start = 0

    def __len__(self) -> int:
        return self._size // self._batch_size * self._batch_size

    def __iter__(self) -> Iterator[int]:
        start, self._start = self._start, 0
        generator = torch.Generator().manual_seed(stream_seed(self._seed, "order", self.epoch))
        order = torch.randperm(self._size, generator=generator)
        for position in range(start, len(self)):
            self._yielded = position + 1
            yield int(order[position])

    def set_epoch(self, epoch: int) -> None:
        """Start another epoch; the current epoch goes on at its position."""
        if epoch != self.epoch:
            self.epoch, self._yielded, self._start = epoch, 0, 0

    def state_dict(self) -> dict[str, int]:
        """The epoch, and how many of its indices were yielded."""
        return {"epoch": self.epoch, "yielded": self._yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume at a saved position."""
        self.epoch, self._yielded, self._start = state["epoch"], state["yielded"], state["yielded"]


class ResumableDataModule(LightningDataModule, ABC):
    """Training rows in batches whose position checkpoints save; a subclass reads the rows in `_prepare`.

    Args:
        batch_size: Rows a training batch, over all devices.
        val_size: Rows to validate on; 0 for none.
        val_batch_size: Rows a validation batch; null takes batch_size.
        system_prompt: The system message of questions without their own; null sends none.
        chat_template_kwargs: Variables of the chat template, such as `enable_thinking`.
        seed: Seed of the split and of the order; null takes the run's, or 0 without the command line.
        tokenizer: Folder or hub name of a tokenizer; null takes the policy's.
    """

    prepare_data_per_node = True  # read before `setup` can report that a subclass did not call the constructor
    _batch_class: ClassVar[type[Any]]
    """Makes a batch of a list of rows."""
    _prepared: str | None = None
    """Stage that `prepare_data` has prepared, until `setup` is called."""

    def __init__(
        self,
        *,
        batch_size: int = 8,
        val_size: int = 64,
        val_batch_size: int | None = None,
        system_prompt: str | None = SYSTEM_PROMPT,
        chat_template_kwargs: dict[str, Any] | None = None,
        seed: int | None = None,
        tokenizer: str | None = None,
    ) -> None:
        super().__init__()
        require_at_least(1, {"data.batch_size": batch_size, "data.val_batch_size": val_batch_size})
        require_at_least(0, {"data.val_size": val_size, "data.seed": seed})
        self.batch_size = batch_size
        self.val_size = val_size
        self.val_batch_size = batch_size if val_batch_size is None else val_batch_size
        self.system_prompt = system_prompt
        self.chat_template_kwargs = chat_template_kwargs or {}
        check_template_kwargs(self.chat_template_kwargs)
        self.seed = 0 if seed is None else seed
        self.tokenizer = tokenizer
        self._train: Sequence[Any] = []
        self._digest = ""

    @property
    @abstractmethod
    def _content(self) -> str:
        """Name of the training rows in checkpoints and messages."""

    def prepare_data(self) -> None:
        """Check the run and read the rows before the loggers write: a refused run leaves no files."""
        if self.trainer is not None and self.trainer.state.fn is not None:
            self._prepare(self.trainer.state.fn.value)
            self._prepared = self.trainer.state.fn.value

    def setup(self, stage: str) -> None:
        """Check and read, in a process in which Lightning does not call `prepare_data`, or without a trainer."""
        prepared, self._prepared = self._prepared, None
        if prepared != stage:
            self._prepare(stage)

    @abstractmethod
    def _prepare(self, stage: str) -> None:
        """Read, render and split the rows that the stage needs and that are not read yet, after all checks."""

    def _load_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer that `tokenizer` names, or the policy's; UserError if there is none."""
        if self.tokenizer is None:
            if self.trainer is None:
                raise UserError("without a Trainer there is no policy whose tokenizer could be used; set tokenizer.")
            return cast(PreTrainedTokenizerBase, self.trainer.lightning_module.tokenizer)
        try:
            return AutoTokenizer.from_pretrained(self.tokenizer)
        except (OSError, ValueError) as error:
            raise UserError(
                f"tokenizer must be a folder or hub name; {self.tokenizer} cannot be loaded: {first_line(error)}; "
                "correct it, or set null to take the policy's."
            ) from error

    def _check_settings(self, stage: str, rows: int | None, held_out: int) -> None:
        """Check sizes and the trainer's other settings.

        Of `rows`, None if none were read, some may yet prove too long.
        """
        if rows is not None:
            self._check_sizes(rows, held_out)
        if self.trainer is not None:
            if stage == "fit" and rows is not None:
                check_ranks_divide(self.batch_size, planned_ranks(self.trainer))
            check_first(self.trainer, stage)

    def _check_sizes(self, rows: int, held_out: int) -> None:
        """Refuse training rows that leave nothing to train on, or less than a batch."""
        if held_out >= rows:
            raise UserError(
                f"val_size must leave prompts to train on; got val_size={held_out} of {rows} prompts; lower it."
            )
        left = rows - held_out
        if left < self.batch_size:
            which = f" ({held_out} of {rows} are held out for validation by val_size)" if held_out else ""
            raise UserError(
                f"batch_size must not exceed the training set; got batch_size={self.batch_size} for {left} "
                f"prompts{which}; lower {'one of them' if held_out else 'it'}."
            )

    def _short(self, rows: Sequence[Any], limit: str, use: str) -> list[Any]:
        """The rows whose tokens are within the limit of that name; UserError if there is none."""
        most, kind = getattr(self, limit), self._content.removeprefix("training ")
        short = [row for row in rows if len(row.token_ids) <= most]
        if not short:
            raise UserError(
                f"{use} needs {kind} of at most {limit}={most} tokens; none of {len(rows)} is, the shortest has "
                f"{min(len(row.token_ids) for row in rows)}; raise it, or choose other rows."
            )
        log.info(f"{len(short)} {use} {kind}; {len(rows) - len(short)} longer than {limit}={most} dropped")
        self._check_tokens(short, use)
        return short

    def _check_tokens(self, rows: Sequence[Any], use: str) -> None:
        """Refuse tokens that the policy has no embedding of, such as those that were added to the tokenizer alone."""
        policy = getattr(self.trainer and self.trainer.lightning_module, "policy_config", None)
        if policy is None:
            return
        vocab_size = policy.vocab_size()
        for row in rows:
            if (largest := numpy.asarray(row.token_ids).max()) >= vocab_size:
                raise UserError(
                    f"a model has an embedding of each token; {row.id} of {use} has token {largest} of {vocab_size}; "
                    "resize the embeddings to the tokenizer, or leave the token out"
                )

    def _fitting_val_size(self, rows: int) -> int:
        """`val_size`, or a fifth of the rows, if fewer, where that leaves less than half of them or than a batch."""
        if self.val_size <= rows // 5 or rows - self.val_size >= max(self.batch_size, rows / 2):
            return self.val_size
        log.info("%d of %d rows are held out for validation: val_size=%d is too many", rows // 5, rows, self.val_size)
        return rows // 5

    def _draw(self, rows: Sequence[Any], count: int) -> list[Any]:
        """Rows to validate on, drawn by seed and id so that another token limit changes few of them."""
        drawn = sorted(rows, key=lambda row: stream_seed(self.seed, "held out", row.id))[:count]
        return sorted(drawn, key=lambda row: (len(row.id), row.id))

    def _set_train(self, rows: Sequence[Any], held_out: int) -> list[Any]:
        """Train on the rows but for those held out, which are returned."""
        self._check_sizes(len(rows), held_out)
        drawn = self._draw(rows, held_out)
        ids = {row.id for row in drawn}
        self._train = [row for row in rows if row.id not in ids]
        digest = hashlib.sha256()
        for row in self._train:
            digest.update(row.fingerprint().encode())
        self._digest = digest.hexdigest()
        self._check_validation_interval()
        return drawn

    def _check_validation_interval(self) -> None:
        """Refuse a validation after more batches than an epoch has, before Lightning does with all loaded."""
        if self.trainer is None or self.trainer.check_val_every_n_epoch is None:
            return
        interval, batches = self.trainer.val_check_interval, self.batches_per_epoch
        if isinstance(interval, int) and interval > batches:
            raise UserError(
                f"trainer.val_check_interval counts batches of an epoch; got {interval} of {batches}; lower it, or set "
                "trainer.check_val_every_n_epoch to null, which counts through all epochs"
            )

    @property
    def batches_per_epoch(self) -> int:
        """Training batches of an epoch, within the trainer's limit."""
        return self._batches(len(self._train))

    def _batches(self, rows: int) -> int:
        batches, limit = rows // self.batch_size, self.trainer.limit_train_batches if self.trainer else None
        if isinstance(limit, float):
            return int(batches * limit)
        return batches if limit is None else min(batches, limit)

    def train_dataloader(self) -> StatefulDataLoader[Any]:
        """Batches of `batch_size` rows, the same on every rank, without an incomplete last batch."""
        return StatefulDataLoader(
            self._train,
            batch_size=self.batch_size,
            sampler=PromptSampler(len(self._train), self.batch_size, self.seed),
            drop_last=True,
            collate_fn=self._batch_class,
            generator=torch.Generator(),  # loaders draw a seed, also without workers
        )

    def _fixed_loader(self, rows: Sequence[Any]) -> DataLoader[Any]:
        """Batches of held-out rows, in fixed order; of another sampler Lightning would give each rank a part."""
        data = cast(Any, rows)
        return DataLoader(
            data,
            batch_size=self.val_batch_size,
            sampler=DistributedSampler(data, num_replicas=1, rank=0, shuffle=False),
            collate_fn=self._batch_class,
            generator=torch.Generator(),
        )

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Return the batch itself: callbacks fill in a batch of prompts, and Lightning would copy a dataclass."""
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Seed, batch size and digest of the training rows; the loader saves its position."""
        return {"seed": self.seed, "batch_size": self.batch_size, self._content: self._digest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check that a resumed run has the checkpoint's order of rows.

        Raises:
            UserError: Seed, batch size or rows differ.
        """
        if self.trainer is None or self.trainer.state.fn != TrainerFn.FITTING:
            return  # a checkpoint may be evaluated on anything
        for name, value in self.state_dict().items():
            if state_dict[name] != value:
                difference = "differ" if name == self._content else f"is {value}, {state_dict[name]} in the checkpoint"
                raise UserError(
                    f"a resumed run goes on with the checkpoint's data in the same order; the {name} {difference}; "
                    "restore the data and their options, or start a new run in another trainer.default_root_dir"
                )
