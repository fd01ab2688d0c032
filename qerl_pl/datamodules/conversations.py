"""Conversations for supervised fine-tuning (SFT): rows in TRL's formats, rendered, with the tokens that are trained."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import chain
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from qerl_pl.chat.template import (
    RENDERED_AT_ONCE,
    TEMPLATE_DATE,
    PartTokenizer,
    TemplateFrame,
    bos_ids,
    messages_of,
    render_conversation,
)
from qerl_pl.datamodules.base import ResumableDataModule
from qerl_pl.datamodules.tables import (
    ANSWER_MARK,
    checked_messages,
    messages_of_text,
    read_table,
    table_source,
    warn_of_repeats,
    without_thousands,
)
from qerl_pl.errors import UserError, require_at_least
from qerl_pl.runtime.files import atomic_directory, build_once, cache_root

log = logging.getLogger("qerl_pl")

_FORMATS = "prompt and completion, messages, or question and answer"
CACHED_ROWS = 1000
"""From this many rows on, rendering takes longer than to look it up."""
_COLUMNS = ("prompt", "completion", "messages", "question", "answer", "tools")


@dataclass(frozen=True, eq=False)
class Conversation:
    """One row of a data set, rendered."""

    id: str
    token_ids: Tensor
    """int32 [T]; as Python's numbers they would take nine times the memory."""
    trained: Tensor
    """Whether the loss counts each token, bool [T]; False for the first, which nothing predicts."""

    def fingerprint(self) -> str:
        """Text of the row, equal in every process."""
        tokens, trained = tuple(self.token_ids.tolist()), tuple(self.trained.tolist())
        return f"Conversation(id={self.id!r}, token_ids={tokens}, trained={trained})"

    @property
    def prompt_and_answer(self) -> tuple[int, int]:
        """Hashes of the tokens before the last that train, and of those; of all and none where all train."""
        tokens, trained = tuple(self.token_ids.tolist()), self.trained.tolist()
        start = len(tokens) - trained[::-1].index(False)
        start = start if start > 1 else len(tokens)
        return hash(tokens[:start]), hash(tokens[start:])


@dataclass(frozen=True)
class ConversationBatch:
    """The conversations of a batch, of all ranks."""

    conversations: Sequence[Conversation]

    @cached_property
    def trained_tokens(self) -> int:
        """Tokens that the loss counts."""
        return sum(int(conversation.trained.sum()) for conversation in self.conversations)

    def share(self, rank: int, ranks: int) -> list[Conversation]:
        """The conversations of one rank: every n-th by length."""
        by_length = sorted(self.conversations, key=lambda conversation: -len(conversation.token_ids))
        return by_length[rank::ranks]


def padded(conversations: Sequence[Conversation], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids int64 [B, T], right-padded, lengths int64 [B], and the trained tokens bool [B, T]."""
    tokens = pad_sequence([conversation.token_ids.long() for conversation in conversations], True)
    lengths = torch.tensor([len(conversation.token_ids) for conversation in conversations])
    masks = pad_sequence([conversation.trained for conversation in conversations], True)
    return tokens.to(device), lengths.to(device), masks.to(device)


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
        max_length: Limit of tokens; longer conversations are dropped, and counted in the log.
        completion_only_loss: Train on the completion alone, of `messages` on the last message; false trains on the
            whole conversation.
        assistant_only_loss: Train on each message of the assistant instead.
        settings: Keyword arguments of `ResumableDataModule`. Only rows with question and answer get `system_prompt`.
    """

    _content = "training conversations"
    _batch_class = ConversationBatch
    _train: Sequence[Conversation]

    def __init__(
        self,
        path: str | list[dict[str, Any]],
        split: str = "train",
        subset: str | None = None,
        *,
        max_length: int = 1024,
        completion_only_loss: bool = True,
        assistant_only_loss: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        require_at_least(1, {"data.max_length": max_length})
        self.path = table_source(path)
        self.split = split
        self.subset = subset
        self.max_length = max_length
        self.completion_only_loss = completion_only_loss
        self.assistant_only_loss = assistant_only_loss
        self._full_sequence = not (completion_only_loss or assistant_only_loss)
        self._val: Sequence[Conversation] = []

    def train_rows(self) -> Sequence[Mapping[str, Any]]:
        """All rows to train on, in one of the formats above."""
        return read_table(self.path, self.split, self.subset)

    def val_rows(self) -> Sequence[Mapping[str, Any]] | None:
        """Rows to validate on; None splits `val_size` rows off the training rows, or a fifth where that is too many."""
        return None

    def _prepare(self, stage: str) -> None:
        """Read, render and split the rows, once."""
        if stage == "validate" and not self.val_size:
            raise UserError("validate needs held-out rows; got none, as data.val_size is 0; raise it")
        if self._train:
            return
        rows, val_rows = self.train_rows(), self.val_rows()
        held_out = self._fitting_val_size(len(rows)) if val_rows is None else 0
        self._check_settings(stage, len(rows), held_out)
        tokenizer = self._load_tokenizer()
        self._val = self._set_train(self._render(tokenizer, rows, "training", held_out > 0), held_out)
        if val_rows is not None and self.val_size:
            self._val = self._render(tokenizer, val_rows[: self.val_size], "validation")
        if self._val:
            held_out_rows = [(row.id, *row.prompt_and_answer) for row in self._val]
            train = (row.prompt_and_answer for row in self._train)
            warn_of_repeats(train, held_out_rows, "validation rows", "the loss")

    def val_dataloader(self) -> DataLoader[ConversationBatch]:
        """The held-out conversations, in fixed order."""
        return self._fixed_loader(self._val)

    # Rendering -----------------------------------------------------------------------------------------------------

    def _render(
        self, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Mapping[str, Any]], use: str, validates: bool = False
    ) -> list[Conversation]:
        """Conversations of at most `max_length` tokens, from a cache on disk if there are many.

        Args:
            tokenizer: The policy's.
            rows: To render.
            use: `training` or `validation`, for ids and messages.
            validates: Whether some of the training rows will be held out.
        """
        rendered: Iterable[tuple[Tensor, Tensor]] = self._rendered(tokenizer, rows, use)
        if len(rows) >= CACHED_ROWS and tokenizer.is_fast:
            rendered = self._cached(tokenizer, rows, rendered)
        conversations = [Conversation(f"{use}-{number}", *tensors) for number, tensors in enumerate(rendered)]
        return self._short(conversations, "max_length", f"{use} and validation" if validates else use)

    def _cached(
        self,
        tokenizer: PreTrainedTokenizerBase,
        rows: Sequence[Mapping[str, Any]],
        rendered: Iterable[tuple[Tensor, Tensor]],
    ) -> Iterable[tuple[Tensor, Tensor]]:
        """The rendered rows from a cache on disk that one process of a machine fills and all of them map."""
        settings = [
            *(transformers.__version__, tokenizer.backend_tokenizer.to_str(), tokenizer.special_tokens_map),
            *(tokenizer.chat_template, self.chat_template_kwargs or None, self.system_prompt),
            *(self.completion_only_loss, self.assistant_only_loss, TEMPLATE_DATE.isoformat()),
        ]
        digest = hashlib.sha256()
        for item in chain([settings], ([row.get(name) for name in _COLUMNS] for row in rows)):
            digest.update(json.dumps(item, sort_keys=True, default=str).encode() + b"\n")
        folder = cache_root() / f"conversations-{digest.hexdigest()[:32]}"
        file = folder / "conversations.safetensors"
        with build_once(folder) as missing:
            if missing:
                tokens, trained = zip(*rendered, strict=True)
                lengths = torch.tensor([len(row) for row in tokens])
                tensors = {"tokens": torch.cat(tokens), "trained": torch.cat(trained), "lengths": lengths}
                with atomic_directory(folder) as unfinished:
                    save_file(tensors, unfinished / file.name)
        tensors = load_file(file)
        sizes = tensors["lengths"].tolist()
        return zip(tensors["tokens"].split(sizes), tensors["trained"].split(sizes), strict=True)

    def _rendered(
        self, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Mapping[str, Any]], use: str
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Tokens of all rows and what trains of them, rendered some at a time."""
        tokenize, bos = PartTokenizer(tokenizer), bos_ids(tokenizer)
        frame = cache(partial(TemplateFrame, tokenizer, self.chat_template_kwargs))  # rows as text need no template
        for start in range(0, len(rows), RENDERED_AT_ONCE):
            prefixes, parts = [], []
            for number, row in enumerate(rows[start : start + RENDERED_AT_ONCE], start=start + 1):
                try:
                    conversation, prompts = self._read(row, frame)
                    parts.append(self._parts(tokenizer, row, conversation, prompts))
                except UserError as error:
                    raise UserError(f"row {number} of the {use} data: {error}") from error
                prefixes.append(bos if isinstance(conversation, str) else [])
            token_ids = tokenize([[text for text, _ in row_parts] for row_parts in parts])
            for prefix, row_parts, ids in zip(prefixes, parts, token_ids, strict=True):
                masked = [(part, trained) for part, (_, trained) in zip(ids, row_parts, strict=True)]
                yield self._joined(tokenizer, prefix, masked)

    def _read(self, row: Mapping[str, Any], frame: Callable[[], TemplateFrame]) -> tuple[Any, Any]:
        """A row's messages, and how many of them are its prompt; or its prompt and completion, which are text."""
        messages, prompt = (messages_of_text(row.get(name), f"column {name}") for name in ("messages", "prompt"))
        completion, question, answer = (row.get(name) for name in ("completion", "question", "answer"))
        if isinstance(prompt, list):
            completion = messages_of_text(completion, "column completion")
        if isinstance(prompt, str) and isinstance(completion, str):
            if not prompt + completion:
                raise UserError("a prompt and its completion must not both be empty; fill them in, or remove the row")
            return prompt, completion
        if messages is not None:
            return checked_messages(messages, "column messages"), 0
        if prompt is not None and completion is not None:
            prompt = checked_messages(prompt, "column prompt")
            return [*prompt, *checked_messages(completion, "column completion")], len(prompt)
        if question is None or answer is None:
            columns = [name for name, value in row.items() if value is not None]
            remedy = "rename them" if len(columns) == len(row) else "fill in what is null, or rename them"
            got = ", ".join(columns) or "nothing"
            raise UserError(f"conversations have the columns {_FORMATS}; got {got}; {remedy}")
        question, answer = str(question), str(answer)
        if not (question.strip() and answer.strip()):
            raise UserError("a question and its answer must not be empty; fill them in, or remove the row")
        if frame().made(question):
            return question, _taught(answer)
        asked = messages_of(question, self.system_prompt)
        return [*asked, {"role": "assistant", "content": _taught(answer)}], len(asked)

    def _parts(
        self, tokenizer: PreTrainedTokenizerBase, row: Mapping[str, Any], messages: Any, prompts: Any
    ) -> list[tuple[str, bool]]:
        """Segments of a row's text, each with whether it trains; the last one does; see `_read`."""
        full_sequence = self._full_sequence
        if isinstance(messages, str):
            if self.assistant_only_loss:
                raise UserError("assistant_only_loss needs messages; got a prompt that is text; set it to false")
            return [(messages, full_sequence), (prompts, True)]
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

    def _joined(
        self, tokenizer: PreTrainedTokenizerBase, bos: list[int], parts: list[tuple[list[int], bool]]
    ) -> tuple[Tensor, Tensor]:
        """Tokens of a conversation, of its parts' tokens, and what trains of them.

        Unless the full sequence is trained, a trained part ends with the end-of-sequence token behind its text, which
        the last one always has.
        """
        doubled = next((ids for ids, _ in parts if ids), [])[:1] == bos  # a text may have been rendered with it
        tokens = [] if doubled else list(bos)
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
            trained += [learned and (self._full_sequence or place < end) for place in range(len(ids))]
        return torch.tensor(tokens, dtype=torch.int32), torch.tensor([False, *trained[1:]])


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
