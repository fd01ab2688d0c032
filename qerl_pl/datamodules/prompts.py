"""Data modules of prompts: their base class, which renders, splits and batches the rows."""

import itertools
import logging
import random
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from qerl_pl.chat.template import Chat, TemplateFrame, render_prompts, template_texts
from qerl_pl.datamodules.base import ResumableDataModule
from qerl_pl.datamodules.tables import Row, TableConfig, checked_rows, warn_of_repeats
from qerl_pl.errors import UserError, require_at_least
from qerl_pl.runtime.checks import SamplingCallback
from qerl_pl.seeds import stream_seed
from qerl_pl.types import Prompt, PromptBatch

log = logging.getLogger("qerl_pl")

FixedLoaders = DataLoader[PromptBatch] | list[DataLoader[PromptBatch]]


class PromptDataModule(ResumableDataModule):
    """Batches of prompts; subclasses return the questions in `train_rows`.

    Args:
        max_prompt_tokens: Limit of tokens, chat template included; longer prompts are dropped.
        sets: Tables to validate (`val_size` rows of each) and test on (all rows), by name, in place of the module's
            own; `qerl validate` and `qerl test` then read no training rows.
        instruction: Text behind each question that is no list of messages, after a line break, such as how to write
            the answer; null adds none.
        settings: Keyword arguments of `ResumableDataModule`.
    """

    _content = "training prompts"
    _batch_class = PromptBatch
    _train: list[Prompt]

    def __init__(
        self,
        *,
        max_prompt_tokens: int = 256,
        sets: dict[str, TableConfig] | None = None,
        instruction: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        require_at_least(1, {"data.max_prompt_tokens": max_prompt_tokens})
        self.max_prompt_tokens = max_prompt_tokens
        self.instruction = instruction
        self.tools: Sequence[Mapping[str, Any]] = ()
        """JSON schemas of the tools in the prompts; set as the rows are read, if all have the same."""
        self._tables = sets
        self._val: dict[str, list[Prompt]] = {}
        self._test: dict[str, list[Prompt]] = {}

    def train_rows(self) -> Sequence[Row]:
        """All rows to train on."""
        raise UserError(
            f"training needs rows, which a data module returns in train_rows; {type(self).__name__} has no such "
            "method; define it, set data to a module that has it, such as TableDataModule, or evaluate on data.sets by "
            "qerl validate or qerl test"
        )

    def val_rows(self) -> Sequence[Row] | None:
        """Rows of a validation set, of which `val_size` are used; None splits them off the training rows."""
        return None

    def test_rows(self) -> Sequence[Row] | None:
        """Rows of a test set, all used; None tests on the validation prompts."""
        return None

    def val_sets(self) -> Mapping[str, Sequence[Row]]:
        """Several validation sets by name, `val_size` rows of each, in place of `val_rows`.

        Each has its own metrics, as `val/<name>/accuracy`; a single set has `val/accuracy`.
        """
        return {}

    def test_sets(self) -> Mapping[str, Sequence[Row]]:
        """Several test sets by name, all rows used, in place of `test_rows`; see `val_sets`."""
        return {}

    def val_count(self, rows: int) -> int:
        """How many of the training rows to validate on where there is no validation set: `val_size`."""
        return self.val_size

    def _prepare(self, stage: str) -> None:
        """Read, render and split the rows, once per stage."""
        if "_train" not in vars(self):
            raise UserError(
                f"a data module's __init__ calls super().__init__(); {type(self).__name__}'s does not; add the call"
            )
        # Rows are read first: a wrong path is reported before a tokenizer or model is loaded.
        reads_train, owner = not self._train and (stage == "fit" or not self._tables), type(self).__name__
        rows = checked_rows(self.train_rows(), f"{owner}.train_rows") if reads_train else []
        reads_val = reads_train or (stage == "validate" and not self._val)
        held_out = self._held_out(self.val_sets, self.val_rows) if reads_val else None
        reads_test = stage == "test" and not self._test
        test_sets = self._held_out(self.test_sets, self.test_rows) if reads_test else None
        # Before a tokenizer or model is loaded; some rows may be longer than `max_prompt_tokens`.
        val_count = self.val_count(len(rows)) if rows and held_out is None else 0
        self._check_settings(stage, len(rows) or None, val_count)
        tokenizer = self._load_tokenizer()
        self._warn_of_lost_system_prompt(tokenizer)
        if self.trainer is not None:
            for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, SamplingCallback):
                    self.tools = callback.open_environments(self.trainer)
        if held_out is not None:
            rendered = self._render_sets(tokenizer, held_out, "validation") if self.val_size else {"": []}
            self._val = {name: self._draw(prompts, self.val_size) for name, prompts in rendered.items()}
        if reads_train:
            prompts = self._render(tokenizer, rows, "training and validation" if val_count else "training")
            drawn = self._set_train(prompts, self.val_count(len(prompts)) if held_out is None else 0)
            self._val = self._val if held_out is not None else {"": drawn}
            self._warn_of_repeats(self._val, "validation")
        if reads_test:
            self._test = self._val if test_sets is None else self._render_sets(tokenizer, test_sets, "test")
            self._warn_of_repeats({} if test_sets is None else self._test, "test")
        # Lightning would end without a message.
        if stage in ("validate", "test") and not any((self._val if stage == "validate" else self._test).values()):
            no_test_set = ", and there is no test set" if stage == "test" else ""
            raise UserError(
                f"{stage} needs held-out prompts; got none, as data.val_size is {self.val_size}{no_test_set}; "
                "raise it, or name sets in data.sets"
            )

    def val_dataloader(self) -> FixedLoaders:
        """The validation prompts, in fixed order; a loader per set if there are several."""
        return self._fixed_loaders(self._val)

    def test_dataloader(self) -> FixedLoaders:
        """The test prompts, in fixed order; a loader per set if there are several."""
        return self._fixed_loaders(self._test)

    @property
    def val_names(self) -> tuple[str, ...]:
        """Name of each loader's validation set; "" for a single set."""
        return tuple(self._val)

    @property
    def test_names(self) -> tuple[str, ...]:
        """Name of each loader's test set; "" for a single set."""
        return tuple(self._test)

    @property
    def columns(self) -> Collection[str]:
        """Names of the columns that any prompt has."""
        prompts = itertools.chain(self._train, *self._val.values(), *self._test.values())
        return dict.fromkeys(name for prompt in prompts for name in prompt.columns)

    @property
    def references(self) -> dict[str, str]:
        """References of all prompts, by "[name of the set ]id of the row"."""
        sets = [("", self._train), *self._val.items(), *self._test.items()]
        return {f"{name} {prompt.id}".strip(): prompt.reference for name, prompts in sets for prompt in prompts}

    def replacement_prompts(self, key: Sequence[int | str], count: int, exclude: Collection[str]) -> list[Prompt]:
        """Training prompts to sample in place of others, drawn without replacement.

        A draw depends on the data, the seed and the arguments only, not on earlier draws.

        Args:
            key: Name of the draw, such as ("resample", policy version, attempt).
            count: Number of prompts; fewer are returned if fewer are left.
            exclude: Ids of prompts that are not drawn.
        """
        excluded = set(exclude)
        candidates = [prompt for prompt in self._train if prompt.id not in excluded]
        return random.Random(stream_seed(self.seed, "replacement", *key)).sample(
            candidates, min(count, len(candidates))
        )

    def _held_out(
        self, sets: Callable[[], Mapping[str, Sequence[Row]]], single: Callable[[], Sequence[Row] | None]
    ) -> Mapping[str, Sequence[Row]] | None:
        """The configuration's sets, or else the module's own; one by itself has no name, nor have its metrics."""
        owner, tables = type(self).__name__, self._tables or {}
        named = {name: table.rows(name, key=f"data.sets.{name}.path") for name, table in tables.items()} or sets()
        if not isinstance(named, Mapping):
            raise UserError(f"{owner} must give its sets by name; got {named!r:.60}; return a dictionary of rows.")
        for name in named:
            if not isinstance(name, str) or not re.fullmatch(r"[\w.+-]+", name):
                raise UserError(f"sets are named by letters, digits, and . + - _; got {name!r}; rename it.")
        found = {name: checked_rows(rows, f"{owner}'s set {name}") for name, rows in named.items()}
        if len(found) > 1 or tables:
            return found
        rows = next(iter(found.values())) if found else single()
        return None if rows is None else {"": checked_rows(rows, f"{owner}.{single.__name__}")}

    def _warn_of_repeats(self, sets: Mapping[str, Sequence[Prompt]], use: str) -> None:
        train = [(prompt.text, prompt.reference) for prompt in self._train]
        for name, prompts in sets.items():
            questions = f"{use}{f' on {name}' if name else ''} questions"
            warn_of_repeats(train, [(prompt.id, prompt.text, None) for prompt in prompts], questions, "accuracy")

    def _fixed_loaders(self, sets: Mapping[str, list[Prompt]]) -> FixedLoaders:
        loaders = [self._fixed_loader(prompts) for prompts in sets.values()]
        return loaders if len(loaders) > 1 else loaders[0]

    def _render_sets(
        self, tokenizer: PreTrainedTokenizerBase, sets: Mapping[str, Sequence[Row]], use: str
    ) -> dict[str, list[Prompt]]:
        return {name: self._render(tokenizer, rows, f"{use} on {name}" if name else use) for name, rows in sets.items()}

    def _render(self, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], use: str) -> list[Prompt]:
        """Prompts of at most `max_prompt_tokens` tokens."""
        if not rows:
            raise UserError(f"{use} needs rows; {type(self).__name__} returns none; correct its method")
        ((repeated, count),) = Counter(row.id for row in rows).most_common(1)
        if count > 1:
            raise UserError(
                f"rows must have different ids, which seed their completions; {use} has {repeated!r} {count} times; "
                "number them"
            )
        frame = TemplateFrame(tokenizer, self.chat_template_kwargs)
        self._tell_of_control_tokens(frame, rows, use)
        chats: list[Chat] = [row.question if row.messages is None else row.messages for row in rows]
        if self.instruction:
            asked = f"\n{self.instruction}"
            if conversations := sum(row.messages is not None for row in rows):
                log.warning(
                    f"data.instruction is not added to {conversations} of {len(rows)} {use} prompts, which are lists "
                    "of messages: write it into them, or set data.system_prompt"
                )
            chats = [chat + asked if isinstance(chat, str) and not frame.made(chat) else chat for chat in chats]
        token_ids = render_prompts(tokenizer, chats, self.system_prompt, self.chat_template_kwargs, self.tools)
        prompts = [
            Prompt(row.id, tuple(ids), row.question, row.reference, row.messages, row.columns)
            for row, ids in zip(rows, token_ids, strict=True)
        ]
        return self._short(prompts, "max_prompt_tokens", use)

    def _warn_of_lost_system_prompt(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Log a warning if the chat template leaves system messages out."""
        if not self.system_prompt:
            return
        mark = "qerl-probe"
        chat = [{"role": "system", "content": mark}, {"role": "user", "content": "Go on."}]
        if mark not in template_texts(tokenizer, [chat], self.chat_template_kwargs)[0]:
            log.warning(
                "the chat template of %s leaves data.system_prompt out: ask by data.instruction, and set it to null",
                tokenizer.name_or_path or "the policy",
            )

    @staticmethod
    def _tell_of_control_tokens(frame: TemplateFrame, rows: Sequence[Row], use: str) -> None:
        """Log how many questions are rendered already, and warn of others that have the template's control tokens."""
        questions = [row for row in rows if row.messages is None and frame.mentioned(row.question)]
        asked = [row for row in questions if not frame.made(row.question)]
        if len(asked) < len(questions):
            log.info(
                f"{len(questions) - len(asked)} of {len(rows)} {use} prompts hold the chat template's text already and "
                "are taken as they are, without data.system_prompt"
            )
        if asked:
            log.warning(
                f"{len(asked)} of {len(rows)} {use} prompts, that of row {asked[0].id} the first, have control tokens "
                f"of the chat template, {', '.join(frame.control_tokens)}, and are a user's message all the same; to "
                "write a conversation, give its messages"
            )
