"""Conversations for supervised fine-tuning (SFT): rows in TRL's formats, rendered, with the tokens that are trained."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from qerl_pl.chat.template import (
    CACHED_PROMPTS,
    SYSTEM_PROMPT,
    TemplateFrame,
    cached_tensors,
    check_template_kwargs,
    render_conversation,
)
from qerl_pl.chat.text_parts import PartTokenizer, beginning
from qerl_pl.datamodules.base import ResumableDataModule, load_tokenizer
from qerl_pl.datamodules.conversation_rows import Conversation, Conversations
from qerl_pl.datamodules.tables import (
    ANSWER_MARK,
    check_sizes,
    draw,
    messages_of_text,
    read_table,
    table_source,
    warn_of_shared,
    without_thousands,
)
from qerl_pl.errors import UserError, require_at_least
from qerl_pl.runtime.checks import check_intervals
from qerl_pl.toy.task import ArithmeticTask, Split, careful_demonstration

log = logging.getLogger("qerl_pl")

_FORMATS = "prompt and completion, messages, or question and answer"
_COLUMNS = ("prompt", "completion", "messages", "question", "answer", "tools")


class _Named(NamedTuple):
    """A row to draw."""

    id: str
    row: int


@dataclass(frozen=True)
class ConversationBatch:
    """The conversations of a batch, of all ranks."""

    conversations: Sequence[Conversation]

    @cached_property
    def trained_tokens(self) -> int:
        """Tokens that the loss counts."""
        return sum(sum(conversation.trained) for conversation in self.conversations)

    def share(self, rank: int, ranks: int) -> list[Conversation]:
        """The conversations of one rank: every n-th by length."""
        by_length = sorted(self.conversations, key=lambda conversation: -len(conversation.token_ids))
        return by_length[rank::ranks]


def padded(conversations: Sequence[Conversation], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids int64 [B, T], right-padded, lengths int64 [B], and the trained tokens bool [B, T]."""
    tokens = [torch.tensor(conversation.token_ids) for conversation in conversations]
    masks = [torch.tensor(conversation.trained) for conversation in conversations]
    lengths = torch.tensor([len(row) for row in tokens])
    return pad_sequence(tokens, True).to(device), lengths.to(device), pad_sequence(masks, True).to(device)


class ConversationDataModule(ResumableDataModule):
    """Conversations to learn by supervised fine-tuning, from a table in one of TRL's formats.

    A row has `prompt` and `completion`, both text, which is taken as it is, or both lists of messages; or `messages`;
    or `question` and `answer`, which follow the system prompt as in reinforcement learning, where an answer with ####
    becomes `<think>what stands before</think><answer>what stands behind</answer>`. Messages are rendered by the chat
    template, which offers the tools of the column `tools` if there is one: a list of JSON schemas, or its JSON text. A
    completion ends with the end-of-sequence token, which ends sampling, too.

    Args:
        path: JSONL or parquet file, folder with a file per split, hub name, or a list of rows (dictionaries).
        split: Split of the table; a single file has none.
        subset: Configuration of a hub data set or its folder; files have none.
        batch_size: Conversations an optimizer step, over all devices.
        val_size: Conversations held out to validate on; 0 for none.
        val_batch_size: Conversations a validation batch; null takes batch_size.
        max_length: Limit of tokens; longer conversations are dropped, and counted in the log.
        completion_only_loss: Train on the completion alone, of `messages` on the last message; false trains on the
            whole conversation.
        assistant_only_loss: Train on each message of the assistant instead.
        system_prompt: The system message of rows with `question` and `answer`; null sends none.
        chat_template_kwargs: More arguments of the chat template, such as `enable_thinking: false`.
        seed: Seed of the split and of the order; null takes the run's, or 0 without the command line.
        tokenizer: Folder or hub name of a tokenizer; null takes the policy's.
    """

    _content = "training conversations"
    _batch_class = ConversationBatch
    _train: Sequence[Conversation]

    def __init__(
        self,
        path: str | list[dict[str, Any]],
        split: str = "train",
        subset: str | None = None,
        batch_size: int = 8,
        val_size: int = 64,
        val_batch_size: int | None = None,
        max_length: int = 1024,
        completion_only_loss: bool = True,
        assistant_only_loss: bool = False,
        system_prompt: str | None = SYSTEM_PROMPT,
        chat_template_kwargs: dict[str, Any] | None = None,
        seed: int | None = None,
        tokenizer: str | None = None,
    ) -> None:
        super().__init__(batch_size, val_size, val_batch_size, seed, tokenizer)
        require_at_least(1, {"data.max_length": max_length})
        self.path = table_source(path)
        self.split = split
        self.subset = subset
        self.max_length = max_length
        self.completion_only_loss = completion_only_loss
        self.assistant_only_loss = assistant_only_loss
        self.system_prompt = system_prompt
        self.chat_template_kwargs = chat_template_kwargs
        check_template_kwargs(chat_template_kwargs or {})
        self._val: Sequence[Conversation] = []

    def train_rows(self) -> Sequence[Mapping[str, Any]]:
        """All rows to train on, in one of the formats above."""
        return read_table(self.path, self.split, (), self.subset)

    def val_rows(self) -> Sequence[Mapping[str, Any]] | None:
        """Rows to validate on; None splits `val_size` rows off the training rows."""
        return None

    def setup(self, stage: str) -> None:
        """Read, render and split the rows, once.

        Raises:
            UserError: Data is missing, malformed or smaller than a batch, or there is nothing to validate on.
        """
        if stage == "validate" and not self.val_size:
            raise UserError("validate needs held-out rows; got none, as data.val_size is 0; raise it")
        if self._train:
            return
        rows, val_rows = self.train_rows(), self.val_rows()
        held_out = self.val_size if val_rows is None else 0
        self._check_settings(stage, len(rows), held_out)
        tokenizer = load_tokenizer(self.trainer, self.tokenizer)
        train = self._render(tokenizer, rows, "training")
        check_sizes(len(train), held_out, self.batch_size)
        if val_rows is None:
            self._val, train = self._hold_out(train, self.val_size)
        elif self.val_size:
            self._val = self._render(tokenizer, val_rows[: self.val_size], "validation")
        self._set_train(train)
        self._warn_of_repeats()
        if stage == "fit" and self.trainer is not None:
            check_intervals(self.trainer, self.batches_per_epoch)

    def _warn_of_repeats(self) -> None:
        """Warn of held-out rows that are trained on, and of those whose prompt has its only answer there."""
        if not self._val:
            return
        answers: dict[int, set[int]] = {}
        for prompt, answer in (row.prompt_and_answer for row in self._train):
            answers.setdefault(hash(prompt), set()).add(hash(answer))
        shared = []
        for row in self._val:
            prompt, answer = row.prompt_and_answer
            known = answers.get(hash(prompt), set())
            shared += [row.id] if hash(answer) in known or len(known) == 1 else []
        warn_of_shared(shared, len(self._val), "validation rows", "the loss")

    def val_dataloader(self) -> DataLoader[ConversationBatch]:
        """The held-out conversations, in fixed order."""
        return self._fixed_loader(self._val)

    # Rendering -----------------------------------------------------------------------------------------------------

    def _render(self, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Mapping[str, Any]], use: str) -> Conversations:
        """Conversations of at most `max_length` tokens, from a cache on disk if there are many."""
        if len(rows) < CACHED_PROMPTS or not tokenizer.is_fast:
            tensors = Conversations.packed(self._rendered(tokenizer, rows, use))
        else:
            settings = [tokenizer.chat_template, self.chat_template_kwargs, self.system_prompt]
            settings += [self.completion_only_loss, self.assistant_only_loss]
            read = ([row.get(name) for name in _COLUMNS] for row in rows)
            make = partial(Conversations.packed, self._rendered(tokenizer, rows, use))
            tensors = cached_tensors("conversations", tokenizer, settings, read, make)
        lengths = tensors["lengths"].tolist()
        kept = [row for row, length in enumerate(lengths) if length <= self.max_length]
        if not kept:
            raise UserError(
                f"{use} needs conversations of at most max_length={self.max_length} tokens; none of {len(rows)} is, "
                f"the shortest has {min(lengths)}; raise it."
            )
        counts = len(kept), use, len(rows) - len(kept), self.max_length
        log.info("%d %s conversations; %d longer than max_length=%d dropped", *counts)
        return Conversations(use, tensors, kept)

    def _rendered(
        self, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Mapping[str, Any]], use: str
    ) -> Iterator[Conversation]:
        """All rows, rendered some at a time."""
        tokenize, begins = PartTokenizer(tokenizer), beginning(tokenizer)
        frame = cache(partial(TemplateFrame, tokenizer, self.chat_template_kwargs))  # rows as text need no template
        for start in range(0, len(rows), CACHED_PROMPTS):
            readable, parts = [], []
            for number, row in enumerate(rows[start : start + CACHED_PROMPTS], start=start + 1):
                try:
                    readable.append(_readable(row, frame))
                    parts.append(self._parts(tokenizer, readable[-1]))
                except UserError as error:
                    raise UserError(f"row {number} of the {use} data: {error}") from error
            ids = tokenize([[text for text, _ in row_parts] for row_parts in parts])
            for index, (row, row_parts, encoded) in enumerate(zip(readable, parts, ids, strict=True), start=start):
                masked = list(zip(encoded, (trained for _, trained in row_parts), strict=True))
                begin = begins if _is_text(row) else []
                yield _conversation(f"{use}-{index}", begin, masked, tokenizer, self._full_sequence)

    def _hold_out(self, rows: Conversations, count: int) -> tuple[Conversations, Conversations]:  # type: ignore[override]
        """As for other rows, without making them."""
        held_out = {one.row: None for one in draw([_Named(rows.name(row), row) for row in rows.rows], count, self.seed)}
        return rows.take([*held_out]), rows.take([row for row in rows.rows if row not in held_out])

    @property
    def _full_sequence(self) -> bool:
        """Whether the loss counts the complete conversation."""
        return not (self.completion_only_loss or self.assistant_only_loss)

    def _parts(self, tokenizer: PreTrainedTokenizerBase, row: Mapping[str, Any]) -> list[tuple[str, bool]]:
        """Segments of a row's text, each with whether it trains; the last one does."""
        full_sequence = self._full_sequence
        if _is_text(row):
            if self.assistant_only_loss:
                raise UserError("assistant_only_loss needs messages; got a prompt that is text; set it to false")
            return [(row["prompt"], full_sequence), (row["completion"], True)]
        messages, prompts = self._messages(row)
        assistant = [
            index
            for index, message in enumerate(messages)
            if message["role"] == "assistant" and (index >= prompts or self.assistant_only_loss)
        ]
        if not assistant:
            raise UserError(f"a conversation needs an assistant's message to learn; got {messages[-1]!r:.60}; add one")
        if full_sequence or (self.completion_only_loss and not self.assistant_only_loss and not prompts):
            assistant = assistant[-1:]
        rendered = messages if full_sequence else messages[: assistant[-1] + 1]
        parts = render_conversation(tokenizer, rendered, self.chat_template_kwargs, assistant[0], _tools(row))
        trained = [full_sequence or index in assistant for _, index in parts]
        last = max(position for position, one in enumerate(trained) if one)
        joined: list[tuple[str, bool]] = []
        for (text, _), one in list(zip(parts, trained, strict=True))[: last + 1]:
            if joined and not (one or joined[-1][1]):  # a prompt is tokenized in one piece, as in rollouts
                joined[-1] = joined[-1][0] + text, False
            else:
                joined.append((text, one))
        return joined

    def _messages(self, row: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]], int]:
        """A row's messages, and how many of them are its prompt."""
        if row.get("messages") is not None:
            return _checked(row["messages"], "messages"), 0
        if row.get("prompt") is not None and row.get("completion") is not None:
            prompt = _checked(row["prompt"], "prompt")
            return [*prompt, *_checked(row["completion"], "completion")], len(prompt)
        if row.get("question") is None or row.get("answer") is None:
            columns = ", ".join(name for name, value in row.items() if value is not None)
            raise UserError(f"conversations have the columns {_FORMATS}; got {columns or 'nothing'}; rename them")
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        question = {"role": "user", "content": str(row["question"])}
        return [*system, question, {"role": "assistant", "content": _taught(str(row["answer"]))}], len(system) + 1


def _readable(row: Mapping[str, Any], frame: Callable[[], TemplateFrame]) -> Mapping[str, Any]:
    """A row with messages in place of their text, and prompt and completion of a question that is rendered already.

    Raises:
        UserError: Messages cannot be read, or a question or an answer is empty.
    """
    read = {**row} | {name: messages_of_text(row.get(name), f"column {name}") for name in ("messages", "prompt")}
    if isinstance(read["prompt"], list):
        read["completion"] = messages_of_text(row.get("completion"), "column completion")
    has_messages = read["messages"] is not None or None not in (read["prompt"], read.get("completion"))
    if has_messages or row.get("question") is None or row.get("answer") is None:
        return read
    question, answer = str(row["question"]), str(row["answer"])
    if not (question.strip() and answer.strip()):
        raise UserError("a question and its answer must not be empty; fill them in, or remove the row")
    if frame().made(question):
        return {"prompt": question, "completion": _taught(answer)}
    return read


def _checked(messages: Any, column: str) -> list[Mapping[str, Any]]:
    """A list of messages; UserError for anything else."""
    if not isinstance(messages, list) or not messages or not all(_is_message(message) for message in messages):
        raise UserError(
            f"the column {column} must have a list of messages with role and content, or prompt and completion text; "
            f"got {messages!r:.60}; correct it"
        )
    return messages


def _is_text(row: Mapping[str, Any]) -> bool:
    """Whether a row's prompt and completion are plain text, to which no chat template is applied."""
    return isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str)


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("role"), str) and "content" in message


def _tools(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """JSON schemas of the tools that a row offers; UserError for anything else in its column."""
    try:
        tools = json.loads(row["tools"]) if isinstance(row.get("tools"), str) else row.get("tools") or []
    except ValueError:
        tools = None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise UserError(
            f"the column tools has a list of JSON schemas, or its JSON; got {row['tools']!r:.60}; correct it"
        )
    return tools


def _taught(answer: str) -> str:
    """A GSM8K answer in the format that rewards read: reasoning and number in tags."""
    thought, mark, number = answer.rpartition(ANSWER_MARK)
    if not mark:
        return answer
    return f"<think>{thought.strip()}</think><answer>{without_thousands(number.strip())}</answer>"


def _conversation(
    id: str,
    begins: list[int],
    parts: list[tuple[list[int], bool]],
    tokenizer: PreTrainedTokenizerBase,
    full_sequence: bool,
) -> Conversation:
    """Join the parts' tokens; unless the full sequence is trained, a trained part ends with the end-of-sequence token
    behind its text, which the last one always has."""
    doubled = next((ids for ids, _ in parts if ids), [])[:1] == begins  # a text may have been rendered with it
    tokens = [] if doubled else list(begins)
    trained, eos = [False] * len(tokens), int(tokenizer.eos_token_id)
    for position, (ids, learned) in enumerate(parts):
        end = len(ids) - ids[::-1].index(eos) if eos in ids else len(ids)
        ended = eos in ids and not str(tokenizer.decode(ids[end:], skip_special_tokens=True)).strip()
        if not ended:  # the text goes on behind one that it mentions
            end = len(ids)
        if position == len(parts) - 1:
            ids = ids[:end] if ended else [*ids, eos]
            end = len(ids)
        tokens += ids
        trained += [learned and (full_sequence or place < end) for place in range(len(ids))]
    return Conversation(id, tuple(tokens), (False, *trained[1:]))


class ArithmeticConversations(ConversationDataModule):
    """Word problems whose answer is a sum, with careful solutions; training and validation have no sum in common.

    Args:
        task: Difficulty of the problems.
        train_size: Problems of the training set.
        batch_size: Conversations an optimizer step, over all devices.
        val_size: Conversations to validate on; 0 for none.
        val_batch_size: Conversations a validation batch; null takes batch_size.
        max_length: Limit of tokens; longer conversations are dropped, and counted in the log.
        completion_only_loss: Train on the solution alone; false trains on the problem, too.
        system_prompt: The system message; null sends none.
        seed: Seed of the order; null takes the run's. The problems have their own, in the task.
        tokenizer: Folder or hub name of a tokenizer; null takes the policy's.
    """

    def __init__(
        self,
        task: ArithmeticTask = ArithmeticTask(),  # noqa: B008 - frozen, and jsonargparse reads the default
        train_size: int = 4096,
        batch_size: int = 8,
        val_size: int = 64,
        val_batch_size: int | None = None,
        max_length: int = 256,
        completion_only_loss: bool = True,
        system_prompt: str | None = SYSTEM_PROMPT,
        seed: int | None = None,
        tokenizer: str | None = None,
    ) -> None:
        super().__init__(
            [],
            batch_size=batch_size,
            val_size=val_size,
            val_batch_size=val_batch_size,
            max_length=max_length,
            completion_only_loss=completion_only_loss,
            system_prompt=system_prompt,
            seed=seed,
            tokenizer=tokenizer,
        )
        require_at_least(1, {"data.train_size": train_size})
        self.task = task
        self.train_size = train_size

    def train_rows(self) -> Sequence[Mapping[str, Any]]:
        return self._rows("train", self.train_size)

    def val_rows(self) -> Sequence[Mapping[str, Any]]:
        return self._rows("validation", self.val_size)

    def _rows(self, split: Split, size: int) -> list[dict[str, str]]:
        problems = (self.task.problem(index, split) for index in range(size))
        return [{"question": problem.question, "answer": careful_demonstration(problem)} for problem in problems]
