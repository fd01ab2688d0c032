"""Conversations for SFT: what is trained of each format, by hand and by transformers' own mask, and what is refused."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from qerl_pl.chat.template import render_prompt
from qerl_pl.datamodules import ArithmeticConversations, ConversationDataModule
from qerl_pl.datamodules.conversations import CACHED_ROWS, Conversation, ConversationBatch, padded
from qerl_pl.errors import UserError
from qerl_pl.toy.task import split_of

CHATML = (
    "{% for message in messages %}{{ '<|user|>' + message['role'] + ': ' + message['content'] + '<|eos|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|user|>assistant: {% endif %}"
)
"""A template that puts a line break behind the end-of-sequence token, as many models' do."""
DIALOGUE = [
    {"role": "user", "content": "What is 1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "And 2+2?"},
    {"role": "assistant", "content": "It is 4."},
]


@pytest.fixture(scope="module")
def tokenizer(tiny_policy_dir: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_policy_dir)


def conversations(tokenizer: PreTrainedTokenizerBase, *rows: dict[str, Any], **settings: Any) -> list[Conversation]:
    """The rows as a data module renders them, in their order."""
    data = ConversationDataModule([*rows], batch_size=1, val_size=0, **settings)
    return data._render(tokenizer, data.train_rows(), "training")


def texts(tokenizer: PreTrainedTokenizerBase, conversation: Conversation) -> tuple[str, str]:
    """The whole conversation, and what is trained of it."""
    pairs = zip(conversation.token_ids, conversation.trained, strict=True)
    learned = [token for token, trained in pairs if trained]
    return tokenizer.decode(conversation.token_ids), tokenizer.decode(learned)


def test_an_answer_is_learned_behind_the_prompt_that_rollouts_have(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [
        {"question": "What is 1 + 1,000?", "answer": "#### Sum\nAdd them. #### 1,001"},
        {"question": "Why?", "answer": "Because."},
    ]
    number, reason = conversations(tokenizer, *rows)
    prompt = render_prompt(tokenizer, "What is 1 + 1,000?")
    answer = tokenizer("<think>#### Sum\nAdd them.</think><answer>1001</answer>")["input_ids"]
    assert number.token_ids.tolist() == [*prompt, *answer, tokenizer.eos_token_id]
    assert number.trained.tolist() == [False] * len(prompt) + [True] * (len(answer) + 1)
    assert texts(tokenizer, reason)[1] == "Because.<|eos|>"
    for none in (None, ""):
        (bare,) = conversations(tokenizer, rows[1], system_prompt=none)
        assert texts(tokenizer, bare)[0] == "<|bos|><|user|>Why?<|assistant|>Because.<|eos|>"


BLUE = {"prompt": "The sky is", "completion": " blue."}
ASKED = "<|bos|><|user|>What is 1+1?<|assistant|>2<|eos|>"
WHOLE = f"{ASKED}<|user|>And 2+2?<|assistant|>It is 4.<|eos|>"
OPEN = f"{ASKED.removeprefix('<|bos|>')}<|user|>And 2+2?<|eos|>"
BOTH = "2<|eos|>It is 4.<|eos|>"
FORMATS: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "text": (BLUE, {}, "The sky is blue.<|eos|>", " blue.<|eos|>"),
    # Nothing predicts the first token, which is Th.
    "whole text": (BLUE, {"completion_only_loss": False}, "The sky is blue.<|eos|>", "e sky is blue.<|eos|>"),
    "prompt and completion": ({"prompt": DIALOGUE[:1], "completion": DIALOGUE[1:]}, {}, WHOLE, BOTH),
    "a prompt with turns": ({"prompt": DIALOGUE[:3], "completion": DIALOGUE[3:]}, {}, WHOLE, "It is 4.<|eos|>"),
    "messages": ({"messages": DIALOGUE}, {}, WHOLE, "It is 4.<|eos|>"),
    "messages that end with a question": ({"messages": DIALOGUE[:3]}, {}, ASKED, "2<|eos|>"),
    "every message of the assistant": ({"messages": DIALOGUE}, {"assistant_only_loss": True}, WHOLE, BOTH),
    "a whole conversation": ({"messages": DIALOGUE[:3]}, {"completion_only_loss": False}, f"<|bos|>{OPEN}", OPEN),
}


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_learned_of_each_format(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    row, settings, whole, learned = FORMATS[name]
    (conversation,) = conversations(tokenizer, row, **settings)
    assert texts(tokenizer, conversation) == (whole, learned)


def test_a_completion_ends_where_sampling_would(tiny_policy_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_policy_dir)
    tokenizer.chat_template = CHATML
    row = {"messages": DIALOGUE}
    (every,) = conversations(tokenizer, row, assistant_only_loss=True)
    whole, learned = texts(tokenizer, every)
    assert whole.endswith("assistant: It is 4.<|eos|>") and learned == "2<|eos|>It is 4.<|eos|>"
    (complete,) = conversations(tokenizer, row, completion_only_loss=False)  # also what stands behind an end
    text = "user: What is 1+1?<|eos|>\n<|user|>assistant: 2<|eos|>\n<|user|>user: And 2+2?<|eos|>\n"
    assert texts(tokenizer, complete)[1] == f"{text}<|user|>assistant: It is 4.<|eos|>"
    tokenizer.chat_template = CHATML.replace("<|eos|>", "")  # without an end, one is added
    (last,) = conversations(tokenizer, row)
    assert texts(tokenizer, last)[1] == "It is 4.\n<|eos|>"


QWEN3 = CHATML.replace(
    "message['content'] +",
    "('<think></think>' if loop.last and message['role'] == 'assistant' else '') + message['content'] +",
)
"""A template that writes the reasoning of the last turn alone."""


def test_turns_that_do_not_train_may_be_rewritten(tiny_policy_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_policy_dir)
    tokenizer.chat_template = QWEN3
    whole = "<|user|>user: What is 1+1?<|eos|>\n<|user|>assistant: 2<|eos|>\n<|user|>user: And 2+2?<|eos|>\n"
    whole += "<|user|>assistant: <think></think>It is 4.<|eos|>"
    for row in ({"messages": DIALOGUE}, {"prompt": DIALOGUE[:3], "completion": DIALOGUE[3:]}):
        (last,) = conversations(tokenizer, row)
        assert texts(tokenizer, last) == (whole, "<think></think>It is 4.<|eos|>")
    (complete,) = conversations(tokenizer, {"messages": DIALOGUE}, completion_only_loss=False)
    assert texts(tokenizer, complete) == (whole, whole.removeprefix("<|user|>"))  # nothing predicts the first token
    for row, settings, turn in (
        ({"messages": DIALOGUE}, {"assistant_only_loss": True}, 4),
        ({"prompt": DIALOGUE[:1], "completion": DIALOGUE[1:]}, {}, 4),
        ({"messages": DIALOGUE[:3]}, {"completion_only_loss": False}, 3),
    ):
        with pytest.raises(UserError, match=f"changes what stands before message {turn}"):
            conversations(tokenizer, row, **settings)


@pytest.mark.parametrize("given", [[{"name": "look"}], '[{"name": "look"}]'])
def test_the_tools_of_a_row_are_offered(tiny_policy_dir: Path, given: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_policy_dir)
    tokenizer.chat_template = "{% if tools %}Use {{ tools[0]['name'] }}. {% endif %}" + tokenizer.chat_template
    with_tools, without = conversations(
        tokenizer, {"messages": DIALOGUE[:2], "tools": given}, {"messages": DIALOGUE[:2], "tools": None}
    )
    assert texts(tokenizer, without)[0] == "<|bos|><|user|>What is 1+1?<|assistant|>2<|eos|>"
    assert texts(tokenizer, with_tools) == ("Use look. " + texts(tokenizer, without)[0], "2<|eos|>")


def test_the_assistants_tokens_are_those_of_transformers(tiny_policy_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_policy_dir)
    marked = (
        "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
        "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
        "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer.chat_template = marked
    theirs = tokenizer.apply_chat_template(DIALOGUE, return_dict=True, return_assistant_tokens_mask=True)
    (conversation,) = conversations(tokenizer, {"messages": DIALOGUE}, assistant_only_loss=True)
    assert conversation.token_ids.tolist() == theirs["input_ids"]
    assert conversation.trained.tolist() == [bool(one) for one in theirs["assistant_masks"]]


def test_arguments_of_the_chat_template_reach_it(tiny_policy_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_policy_dir)
    tokenizer.chat_template = "{% if think %}think {% endif %}" + tokenizer.chat_template
    (conversation,) = conversations(tokenizer, {"messages": DIALOGUE}, chat_template_kwargs={"think": True})
    assert texts(tokenizer, conversation)[0].startswith("think <|bos|>")


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no format": ({"text": "a"}, {}, "row 1 of the training data: conversations have the columns .*; got text; ren"),
    "half a format": ({"prompt": "a"}, {}, "got prompt; rename"),
    "no answer": ({"question": "a", "answer": None}, {}, "got question; fill in what is null, or rename"),
    "mixed": ({"prompt": "a", "completion": DIALOGUE}, {}, "with a role and a content; column prompt has 'a'"),
    "no messages": ({"messages": []}, {}, "with a role and a content; column messages has .."),
    "no role": ({"messages": [{"content": "a"}]}, {}, "messages with a role and a content"),
    "content in parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, DIALOGUE[1]]},
        {},
        "row 1 of the training data: the chat template of .* refuses the messages: .* correct them",
    ),
    "own arguments": (
        {"messages": DIALOGUE},
        {"chat_template_kwargs": {"tokenize": True}},
        "got tokenize, which rendering sets itself",
    ),
    "tools that are none": (
        {"messages": DIALOGUE, "tools": "look"},
        {},
        "row 1 .*: the column tools has a list of JSON schemas, or its JSON; got 'look'; correct it",
    ),
    "numpy's lists": (
        {"messages": "[{'role': 'user', 'content': 'a'}\n {'role': 'b'}]"},
        {},
        "row 1 .* are JSON; column messages",
    ),
    "broken JSON": (
        {"messages": '[{"role": "user", "content": "a}]'},
        {},
        "row 1 .*: messages that are text are JSON",
    ),
    "other objects": (
        {"messages": '[{"from": "human", "value": "a"}]'},
        {},
        "a role and a content; column messages has",
    ),
    "plain text": ({"messages": "1+1?"}, {}, "with a role and a content; column messages has"),
    "an empty question": ({"question": " \n", "answer": "2"}, {}, "row 1 .*: a question and its answer must not be"),
    "an empty answer": ({"question": "1+1?", "answer": ""}, {}, "row 1 .*: a question and its answer must not be"),
    "nothing at all": ({"prompt": "", "completion": ""}, {}, "row 1 .*: a prompt and its completion must not both be"),
    "nobody answers": ({"messages": DIALOGUE[:1]}, {}, "needs an assistant's message to learn; got .*user"),
    "text without roles": (
        {"prompt": "a", "completion": "b"},
        {"assistant_only_loss": True},
        "assistant_only_loss needs messages",
    ),
    "too long": (
        {"prompt": "a", "completion": "b"},
        {"max_length": 2},
        "at most max_length=2 tokens; none of 1 is, the shortest has 3; raise",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rows_without_something_to_learn_are_refused(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    row, settings, message = REFUSED[name]
    with pytest.raises(UserError, match=message):
        conversations(tokenizer, row, **settings)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "prompts need a chat template; .* has none"),
        ("{{ messages | length }}" + CHATML, "must continue .* changes what stands before message 4"),
        ("{{ raise_exception('no') }}", "refuses the messages: no; correct them"),
    ],
)
def test_templates_that_give_no_text_to_learn_are_refused(
    tiny_policy_dir: Path, template: str | None, message: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_policy_dir)
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=message):
        conversations(tokenizer, {"messages": DIALOGUE})
    (conversation,) = conversations(tokenizer, {"prompt": "a", "completion": "b"})  # text needs none
    assert texts(tokenizer, conversation) == ("ab<|eos|>", "b<|eos|>")


def rows_of(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{number} and 1 is", "completion": f" {number + 1}"} for number in range(count)]


def test_rows_are_held_out_and_come_once_an_epoch(
    tiny_policy_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "qerl_pl")
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of(11)))
    data = ConversationDataModule(str(tmp_path), batch_size=2, val_size=3, tokenizer=str(tiny_policy_dir))
    data.setup("fit")
    assert "11 training and validation conversations; 0 longer" in caplog.text
    held_out = [conversation.id for batch in data.val_dataloader() for conversation in batch.conversations]
    batches = [[conversation.id for conversation in batch.conversations] for batch in data.train_dataloader()]
    assert [len(batch) for batch in batches] == [2] * 4 and data.batches_per_epoch == 4 and len(held_out) == 3
    assert {id for batch in batches for id in batch} | {*held_out} == {f"training-{number}" for number in range(11)}
    other = ConversationDataModule(rows_of(11), batch_size=2, val_size=3, seed=1, tokenizer=str(tiny_policy_dir))
    other.setup("fit")
    assert [conversation.id for conversation in other._val] != held_out
    assert other.state_dict()["training conversations"] != data.state_dict()["training conversations"]


@pytest.mark.parametrize(("val_size", "held_out"), [(2, 2), (5, 5), (6, 2), (256, 2)])
def test_too_many_held_out_rows_are_a_fifth(
    val_size: int, held_out: int, tiny_policy_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    data = ConversationDataModule(rows_of(10), batch_size=2, val_size=val_size, tokenizer=str(tiny_policy_dir))
    data.setup("fit")
    assert (len(data._val), len(data._train)) == (held_out, 10 - held_out)
    message = f"2 of 10 rows are held out for validation: val_size={val_size} is too many"
    assert (message in caplog.messages) == (held_out != val_size)


@pytest.mark.parametrize(
    ("settings", "stage", "message"),
    [
        ({"batch_size": 5, "val_size": 0}, "fit", "batch_size=5 for 4 prompts; lower"),
        ({"val_size": 0}, "validate", "got none, as data.val_size is 0; raise it"),
    ],
)
def test_data_that_leave_nothing_to_do_are_refused(
    tiny_policy_dir: Path, settings: dict[str, Any], stage: str, message: str
) -> None:
    data = ConversationDataModule(rows_of(4), tokenizer=str(tiny_policy_dir), **{"batch_size": 1} | settings)
    with pytest.raises(UserError, match=message):
        data.setup(stage)
    with pytest.raises(UserError, match="data.max_length must be at least 1; got 0"):
        ConversationDataModule(rows_of(4), max_length=0)
    with pytest.raises(UserError, match="rows are dictionaries of columns; row 1 is 'a and b'"):
        ConversationDataModule(["a and b"]).setup("fit")  # type: ignore[list-item]


def test_a_checkpoint_of_other_conversations_is_refused(tiny_policy_dir: Path) -> None:
    data = ConversationDataModule(rows_of(6), batch_size=2, val_size=0, tokenizer=str(tiny_policy_dir))
    data.setup("fit")
    state = data.state_dict()
    data.trainer = Trainer(logger=False, enable_progress_bar=False)
    data.load_state_dict(state | {"seed": 9})  # to validate is free
    data.trainer.state.fn = "fit"  # type: ignore[assignment]
    data.load_state_dict(state)
    for name in state:
        with pytest.raises(UserError, match=f"goes on with .* in the same order; the {name} "):
            data.load_state_dict(state | {name: 9})


def test_ranks_share_a_batch_by_length_and_pad_it() -> None:
    lengths = (3, 9, 5, 2, 7)
    rows = [Conversation(str(size), torch.arange(size), torch.arange(size) > 0) for size in lengths]
    batch = ConversationBatch(rows)
    assert batch.trained_tokens == sum(lengths) - 5
    assert [[row.id for row in batch.share(rank, 2)] for rank in (0, 1)] == [["9", "5", "2"], ["7", "3"]]
    tokens, sizes, mask = padded(batch.share(1, 2), torch.device("cpu"))
    assert tokens.tolist() == [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 0, 0, 0, 0]] and sizes.tolist() == [7, 3]
    assert mask.tolist() == [[False] + [True] * 6, [False, True, True] + [False] * 4]


def test_generated_sums_differ_between_training_and_validation(tokenizer: PreTrainedTokenizerBase) -> None:
    data = ArithmeticConversations(train_size=9, val_size=5)
    assert (len(data.train_rows()), len(data.val_rows())) == (9, 5)
    for split, rows in (("train", data.train_rows()), ("validation", data.val_rows())):
        for row in rows:
            words = row["question"].replace(".", " ").replace("?", " ").split()
            numbers = tuple(int(word) for word in words if word.isdigit())
            assert split_of(numbers) == split and row["answer"].endswith(f"<answer>{sum(numbers)}</answer>")


MESSAGES = '[{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2\\n"}]'
AS_TEXT: dict[str, dict[str, Any]] = {
    "JSON": {"messages": MESSAGES},
    "indented JSON": {"messages": f"\n {json.dumps(json.loads(MESSAGES), indent=2)}\n"},
    "what Python prints": {"messages": repr(json.loads(MESSAGES))},
    "two lists": {"prompt": MESSAGES.partition("}, ")[0] + "}]", "completion": str(json.loads(MESSAGES)[1:])},
    "one message each": {"prompt": json.dumps(json.loads(MESSAGES)[0]), "completion": repr(json.loads(MESSAGES)[1])},
    "a list": {"messages": json.loads(MESSAGES)},
    "a question that is rendered": {"question": "<|bos|><|user|>1+1?<|assistant|>", "answer": "2\n"},
}  # fmt: skip


@pytest.mark.parametrize("name", AS_TEXT)
def test_messages_may_be_text(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    (conversation,) = conversations(tokenizer, AS_TEXT[name])
    assert texts(tokenizer, conversation) == ("<|bos|><|user|>1+1?<|assistant|>2\n<|eos|>", "2\n<|eos|>")


def test_json_is_text_in_a_completion(tokenizer: PreTrainedTokenizerBase) -> None:
    (conversation,) = conversations(tokenizer, {"prompt": "Write messages:", "completion": MESSAGES})
    assert texts(tokenizer, conversation)[1] == f"{MESSAGES}<|eos|>"


def test_many_rows_are_cached_and_lie_in_tensors(tiny_policy_dir: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("QERL_CACHE", str(tmp_path))
    rows = [{"question": f"Is it {n}?", "answer": "Yes. " * (9 * n % 50)} for n in range(1, CACHED_ROWS + 1)]
    rows = [row | {"answer": row["answer"] or "No."} for row in rows]

    def read(rows: list[dict[str, Any]], **settings: Any) -> ConversationDataModule:
        given = {"batch_size": 8, "val_size": 9, "tokenizer": str(tiny_policy_dir)} | settings
        data = ConversationDataModule(rows, **given)
        data.setup("fit")
        return data

    first, again = read(rows), read(rows)
    assert len([*tmp_path.glob("conversations-*")]) == 1
    assert first.state_dict() == again.state_dict()
    few = read(rows[:-1])  # too few for the cache
    held_out = {row.id for row in first._val}
    expected = {row.id: row.fingerprint() for row in (*few._train, *few._val)}
    found = {row.id: row.fingerprint() for row in (*first._train, *first._val)}
    assert expected.items() <= found.items() and len(expected) == len(found) - 1
    assert [row.id for row in first._val] == sorted(held_out, key=lambda id: (len(id), id))
    assert [row.id for row in first._train] == [f"training-{n}" for n in range(1000) if f"training-{n}" not in held_out]
    for row in first._train:  # five bytes a token, not forty-four
        assert (row.token_ids.dtype, row.trained.dtype) == (torch.int32, torch.bool)
    short = read(rows, max_length=150)  # of the same cache
    read(rows, system_prompt=None), read(rows, completion_only_loss=False), read([*rows[1:], rows[1]])
    read(rows, assistant_only_loss=True)
    assert len(short._train) < len(first._train) and len([*tmp_path.glob("conversations-*")]) == 5


def test_another_tokenizer_template_or_tool_renders_anew(
    tiny_policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QERL_CACHE", str(tmp_path))
    tokenizer = AutoTokenizer.from_pretrained(tiny_policy_dir)
    rows: list[dict[str, Any]] = [{"question": "Why?", "answer": "So."}] * CACHED_ROWS
    data = ConversationDataModule(rows, batch_size=8)

    def folders() -> int:
        data._render(tokenizer, rows, "training")
        return len([*tmp_path.glob("conversations-*")])

    assert folders() == folders() == 1
    tokenizer.chat_template += "{# other #}"
    assert folders() == 2
    data.chat_template_kwargs = {"a": 1}
    assert folders() == 3
    tokenizer.add_tokens(["zz"])
    assert folders() == 4
    tokenizer.eos_token = tokenizer.pad_token
    assert folders() == 5
    rows[0] = rows[0] | {"tools": [{}]}
    assert folders() == 6


def answers(prompt: str, *texts: str) -> list[dict[str, Any]]:
    return [{"prompt": prompt, "completion": text} for text in texts]


CALL: list[dict[str, Any]] = [{"messages": DIALOGUE[:2]}]
REPEATS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any], int]] = {
    "a row": (answers("a", "b"), answers("a", "b"), {}, 1),
    "a row in another format": (CALL, [{"prompt": DIALOGUE[:1], "completion": DIALOGUE[1:2]}], {}, 1),
    "one of several answers": (answers("a", "b", "c"), answers("a", "c", "d"), {}, 1),
    "a conversation that begins alike": (CALL, [{"messages": DIALOGUE}], {}, 0),
    "whole conversations": (answers("a", "b"), answers("a", "b", "c"), {"completion_only_loss": False}, 1),
    "every turn": ([{"messages": DIALOGUE}], [{"messages": DIALOGUE}] * 2, {"assistant_only_loss": True}, 2),
    "nothing": (answers("a", "b"), answers("b", "b"), {}, 0),
}


@pytest.mark.parametrize("name", REPEATS)
def test_rows_that_are_trained_on_and_held_out_are_counted(
    tiny_policy_dir: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    train, held_out, settings, count = REPEATS[name]

    class Both(ConversationDataModule):
        def val_rows(self) -> list[dict[str, Any]]:
            return held_out

    Both(train, batch_size=1, tokenizer=str(tiny_policy_dir), **settings).setup("fit")
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == bool(count)
    for warning in warnings:
        assert warning.startswith(f"{count} of {len(held_out)} validation rows (the first is that of validation-")
        assert warning.endswith("the loss there is not that of new rows; take them out of one of the two")
