"""The order of the training prompts, kept in checkpoints."""

import hashlib
import logging
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from qerl_pl.chat_template import SYSTEM_PROMPT, render_prompts
from qerl_pl.datamodules.tables import (
    Row,
    TableConfig,
    checked_rows,
    draw,
    require_different_ids,
    require_prompts,
    sets_by_name,
    warn_of_repeats,
)
from qerl_pl.errors import UserError, require_at_least
from qerl_pl.persistence.random_state import stream_seed
from qerl_pl.types import Prompt


class PromptSampler(DistributedSampler[int]):
    """Indices of the prompts in the order of (seed, epoch), whole batches only, resumable at any of them.

    A `DistributedSampler`, so that Lightning sets its epoch and does not put its own in its place; but every rank sees
    the whole batch, and what samples deals it out: a run may go on with another number of ranks. Nothing is decided
    before the first index is asked for: loaders are restored before Lightning tells them their epoch.

    Args:
        size: number of prompts of the training set.
        batch_size: prompts of a batch; the rest of an epoch is left out.
        seed: of the order.
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
        """Shuffle anew for another epoch; the same one goes on where it is."""
        if epoch != self.epoch:
            self.epoch, self._yielded, self._start = epoch, 0, 0

    def state_dict(self) -> dict[str, int]:
        """The epoch, and how many of its indices were seen."""
        return {"epoch": self.epoch, "yielded": self._yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on at a saved position."""
        self.epoch, self._yielded, self._start = state["epoch"], state["yielded"], state["yielded"]


def check_intervals(trainer: Trainer, batches: int) -> None:
    """Refuse what Lightning refuses in other words, after an engine has been started, or not at all.

    Args:
        trainer: What has the intervals.
        batches: Training batches of an epoch, within the trainer's limit.

    Raises:
        UserError: The run has no step or epoch, an epoch has no batch, or validation would come never, by the clock, or
            after the epoch's end.
    """
    if trainer.max_steps == 0:
        raise UserError(
            "a run needs a step to take; trainer.max_steps=0 leaves none; raise it, or set it to -1 for no limit"
        )
    if trainer.max_epochs == 0:
        raise UserError("a run needs an epoch to train; trainer.max_epochs=0 leaves none; raise it")
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


log = logging.getLogger("qerl_pl")

FixedLoaders = DataLoader[list[Prompt]] | list[DataLoader[list[Prompt]]]


class PromptDataModule(LightningDataModule):
    """Yields batches (lists) of prompts; a subclass says where the questions come from, in `train_rows`.

    Training batches are shuffled by (seed, epoch), keep their position in checkpoints, and draw nothing from the global
    random state.

    Args:
        batch_size: Prompts a training batch, over all devices.
        val_size: Prompts to validate on; 0 for none.
        val_batch_size: Prompts a validation batch; null takes batch_size.
        max_prompt_tokens: Longer prompts, chat template included, are dropped.
        system_prompt: The system message; null sends none.
        seed: Seed of the split and of the order; null takes the run's, or 0 without the command line.
        tokenizer: Folder or hub name of a tokenizer; null takes the policy's.
        sets: Tables to validate (`val_size` rows of each) and test on (all rows), by name, in place of the module's
            own. With them, validating and testing needs no training rows.
    """

    def __init__(
        self,
        batch_size: int = 8,
        val_size: int = 64,
        val_batch_size: int | None = None,
        max_prompt_tokens: int = 256,
        system_prompt: str | None = SYSTEM_PROMPT,
        seed: int | None = None,
        tokenizer: str | None = None,
        sets: dict[str, TableConfig] | None = None,
    ) -> None:
        super().__init__()
        sizes = {"batch_size": batch_size, "val_batch_size": val_batch_size, "max_prompt_tokens": max_prompt_tokens}
        require_at_least(1, {f"data.{name}": size for name, size in sizes.items()})
        require_at_least(0, {"data.val_size": val_size, "data.seed": seed})
        self.batch_size = batch_size
        self.val_size = val_size
        self.val_batch_size = batch_size if val_batch_size is None else val_batch_size
        self.max_prompt_tokens = max_prompt_tokens
        self.system_prompt = system_prompt
        self.seed = 0 if seed is None else seed
        self.tokenizer = tokenizer
        self._tables = sets
        self._train: list[Prompt] = []
        self._val: dict[str, list[Prompt]] = {}
        self._test: dict[str, list[Prompt]] = {}
        self._digest = ""

    # What a subclass says ------------------------------------------------------------------------------------------

    def train_rows(self) -> Sequence[Row]:
        """All rows to train on."""
        raise UserError(
            f"a data module gives its rows in train_rows; {type(self).__name__} lacks that method; define it"
        )

    def val_rows(self) -> Sequence[Row] | None:
        """Rows of a validation set, of which `val_size` are used; None holds them out of the training rows."""
        return None

    def test_rows(self) -> Sequence[Row] | None:
        """Rows of a test set, all used; None tests on the validation prompts."""
        return None

    def val_sets(self) -> Mapping[str, Sequence[Row]]:
        """Several validation sets by name, `val_size` rows of each, in place of `val_rows`; none: that one.

        Each is measured by itself, as `val/<name>/accuracy`; a single one as `val/accuracy`.
        """
        return {}

    def test_sets(self) -> Mapping[str, Sequence[Row]]:
        """Several test sets by name, all rows used, in place of `test_rows`; as for `val_sets`."""
        return {}

    # Lightning's hooks ---------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Read, render and split, once.

        Raises:
            UserError: data is missing, malformed or too little for one batch, none is held out where that is measured,
                or the tokenizer has no chat template.
        """
        if "_train" not in vars(self):
            raise UserError(
                f"a data module's constructor calls that of PromptDataModule; {type(self).__name__}'s does not"
            )
        # Rows come first: a wrong path is told before a tokenizer is downloaded, or a model made for it.
        new, owner = not self._train and (stage == "fit" or not self._tables), type(self).__name__
        rows = checked_rows(self.train_rows(), f"{owner}.train_rows") if new else []
        unread = new or (stage == "validate" and not self._val)
        held_out = (
            sets_by_name(self._given(self.val_sets), self.val_rows, owner, bool(self._tables)) if unread else None
        )
        tokenizer = self._load_tokenizer()
        if held_out is not None:
            drawn = self._render_sets(tokenizer, held_out, "validation") if self.val_size else {"": []}
            self._val = {name: draw(prompts, self.val_size, self.seed) for name, prompts in drawn.items()}
        if new:
            train = self._render(tokenizer, rows, "training")
            if held_out is None:
                if self.val_size >= len(train):
                    raise UserError(
                        f"val_size must leave prompts to train on; got val_size={self.val_size} of {len(train)} "
                        "prompts; lower it."
                    )
                self._val = {"": draw(train, self.val_size, self.seed)}
                chosen = {prompt.id for prompt in self._val[""]}
                train = [prompt for prompt in train if prompt.id not in chosen]
            if len(train) < self.batch_size:
                raise UserError(
                    f"batch_size must not exceed the training set; got batch_size={self.batch_size} for {len(train)} "
                    "prompts; lower it."
                )
            self._train = train
            self._digest = hashlib.sha256("".join(map(repr, train)).encode()).hexdigest()
            warn_of_repeats(train, self._val, "validation")
        if stage == "fit" and self.trainer is not None:
            check_intervals(self.trainer, self.batches_per_epoch)
        if stage == "test" and not self._test:
            tested = sets_by_name(self._given(self.test_sets), self.test_rows, owner, bool(self._tables))
            self._test = self._val if tested is None else self._render_sets(tokenizer, tested, "test")
            warn_of_repeats(self._train, {} if tested is None else self._test, "test")
        if stage in ("validate", "test"):
            require_prompts(stage, self._val if stage == "validate" else self._test, self.val_size)

    def train_dataloader(self) -> StatefulDataLoader[list[Prompt]]:
        """Batches of `batch_size` prompts, the same on every rank; the rest of an epoch is left out."""
        return StatefulDataLoader(
            self._train,
            batch_size=self.batch_size,
            sampler=PromptSampler(len(self._train), self.batch_size, self.seed),
            drop_last=True,
            collate_fn=list,
            generator=torch.Generator(),  # loaders draw a seed for workers, even without any
        )

    @property
    def batches_per_epoch(self) -> int:
        """Training batches of an epoch, within the trainer's limit, counted without making a loader."""
        batches = len(self._train) // self.batch_size
        limit = self.trainer.limit_train_batches if self.trainer else None
        if isinstance(limit, float):
            return int(batches * limit)
        return batches if limit is None else min(batches, limit)

    def val_dataloader(self) -> FixedLoaders:
        """The validation prompts, in one order; of several sets a loader each."""
        return self._fixed_loaders(self._val)

    def test_dataloader(self) -> FixedLoaders:
        """The test prompts, in one order; of several sets a loader each."""
        return self._fixed_loaders(self._test)

    @property
    def val_names(self) -> tuple[str, ...]:
        """Name of each loader's validation set; of a single one ""."""
        return tuple(self._val)

    @property
    def test_names(self) -> tuple[str, ...]:
        """Name of each loader's test set; of a single one ""."""
        return tuple(self._test)

    @property
    def references(self) -> dict[str, str]:
        """Reference of each prompt that was read, by the id of its row, after the name of its set where it has one."""
        sets = [("", self._train), *self._val.items(), *self._test.items()]
        return {f"{name} {prompt.id}".strip(): prompt.reference for name, prompts in sets for prompt in prompts}

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Prompts hold no tensors; Lightning would try to rebuild them."""
        return batch

    def state_dict(self) -> dict[str, Any]:
        """What the order of the training prompts depends on; the loader itself keeps the position in it."""
        return {"seed": self.seed, "batch_size": self.batch_size, "training prompts": self._digest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check that a resumed run trains on the prompts that the checkpoint's run did.

        Raises:
            UserError: the seed or the prompts are others.
        """
        if self.trainer is None or self.trainer.state.fn != TrainerFn.FITTING:
            return  # a checkpoint may be evaluated on anything
        for name, value in self.state_dict().items():
            if state_dict[name] != value:
                raise UserError(
                    f"a resumed run goes on in the same order; the {name} (or their digest) are {value!s:.12}, "
                    f"{state_dict[name]!s:.12} in the checkpoint; restore the data's options, or start a new run."
                )

    # What the rollout asks for -------------------------------------------------------------------------------------

    def replacement_prompts(self, key: Sequence[int | str], count: int, exclude: Collection[str]) -> list[Prompt]:
        """Training prompts to sample in place of others, drawn without replacement.

        A draw depends only on the data, the seed and the arguments, never on earlier draws.

        Args:
            key: what the draw is for, such as ("resample", policy version, attempt).
            count: how many; fewer come back where fewer are left.
            exclude: ids that must not come.
        """
        excluded = set(exclude)
        candidates = [prompt for prompt in self._train if prompt.id not in excluded]
        return random.Random(stream_seed(self.seed, "replacement", *key)).sample(
            candidates, min(count, len(candidates))
        )

    # -----------------------------------------------------------------------------------------------------------------

    def _given(self, own: Callable[[], Mapping[str, Sequence[Row]]]) -> Mapping[str, Sequence[Row]]:
        """The sets of the configuration, or else the module's own."""
        return {name: table.rows(name) for name, table in self._tables.items()} if self._tables else own()

    def _fixed_loaders(self, sets: Mapping[str, list[Prompt]]) -> FixedLoaders:
        loaders: list[DataLoader[list[Prompt]]] = [
            DataLoader(cast(Any, prompts), batch_size=self.val_batch_size, collate_fn=list, generator=torch.Generator())
            for prompts in sets.values()
        ]
        return loaders if len(loaders) > 1 else loaders[0]

    def _load_tokenizer(self) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            if self.trainer is None:
                raise UserError("outside of a Trainer there is no policy to take the tokenizer of; set tokenizer.")
            return cast(PreTrainedTokenizerBase, self.trainer.lightning_module.tokenizer)
        try:
            return AutoTokenizer.from_pretrained(self.tokenizer)
        except (OSError, ValueError) as error:
            raise UserError(
                f"tokenizer must be a folder or hub name; {self.tokenizer} cannot be loaded: "
                f"{str(error).partition(chr(10))[0]}; correct it, or set null to take the policy's."
            ) from error

    def _render_sets(
        self, tokenizer: PreTrainedTokenizerBase, sets: Mapping[str, Sequence[Row]], use: str
    ) -> dict[str, list[Prompt]]:
        return {name: self._render(tokenizer, rows, f"{use} on {name}" if name else use) for name, rows in sets.items()}

    def _render(self, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], use: str) -> list[Prompt]:
        """Prompts of the rows that are short enough."""
        require_different_ids(rows, use)
        token_ids = render_prompts(tokenizer, [row.question for row in rows], self.system_prompt)
        prompts = [
            Prompt(id=row.id, token_ids=tuple(ids), text=row.question, reference=row.reference)
            for row, ids in zip(rows, token_ids, strict=True)
            if len(ids) <= self.max_prompt_tokens
        ]
        if not prompts:
            if not rows:
                raise UserError(f"{use} needs rows; {type(self).__name__} gives none; have it give some")
            raise UserError(
                f"{use} needs prompts of at most max_prompt_tokens={self.max_prompt_tokens} tokens; none of "
                f"{len(rows)} is, the shortest has {min(map(len, token_ids))}; raise it or change the filters."
            )
        log.info(
            "%d %s prompts; %d longer than max_prompt_tokens=%d dropped",
            len(prompts),
            use,
            len(rows) - len(prompts),
            self.max_prompt_tokens,
        )
        return prompts
