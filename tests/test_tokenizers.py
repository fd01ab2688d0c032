"""Other tokenizers: tags and stop strings that are special tokens, SentencePiece, spaces, end tokens in texts."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from qerl_pl.chat.continuation import ChatContinuation
from qerl_pl.chat.template import render_prompt
from qerl_pl.datamodules import ConversationDataModule
from qerl_pl.models.folder import end_token_ids
from qerl_pl.rewards import Format, GSM8KAnswer
from qerl_pl.rollout.scoring import Scorer
from qerl_pl.toy.tokenizer import EOS, PAD, TAGS, build_tokenizer
from qerl_pl.types import Completion, Prompt

# Tags that are special tokens ----------------------------------------------------------------------------------------

TAGGED: dict[str, tuple[str, str]] = {
    "an end": ("<think>2+2</think><answer>4</answer><|eos|>", "<think>2+2</think><answer>4</answer>"),
    "no end": ("<think>2+2</think><answer>4</answer>", "<think>2+2</think><answer>4</answer>"),
    "another end": ("<think>x</think><answer>4</answer><|done|>", "<think>x</think><answer>4</answer>"),
    "padding inside": ("<think>x<|pad|></think><answer><|pad|>4</answer><|eos|>", "<think>x</think><answer>4</answer>"),
    "another special token": ("<answer>4<|user|></answer><|eos|>", "<answer>4<|user|></answer>"),
    "nothing": ("<|eos|>", ""),
}


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", TAGGED)
def test_rewards_see_all_tokens_but_end_and_padding(name: str, special: bool) -> None:
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([AddedToken(tag, special=special, normalized=False) for tag in TAGS])
    tokenizer.add_tokens([AddedToken("<|done|>", special=True)])
    sampled, text = TAGGED[name]
    ids = tuple(tokenizer(sampled)["input_ids"])
    completion = Completion(ids, (0.0,) * len(ids), "stop")
    ends = [tokenizer.convert_tokens_to_ids("<|done|>")]
    (group,) = Scorer([Format(), GSM8KAnswer()]).score(
        tokenizer, [Prompt("p", (1,), "2+2?", "4")], [[completion]], ends
    )
    assert group.texts == [text]
    complete = text.startswith("<think>")
    assert [values.tolist() for values in group.rewards.values()] == [[float(complete)], [float("4</" in text)]]


@pytest.mark.parametrize("text", ["a , b", "It 's 4 .", "do n't", "4 ! ?", " 're they", "<|user|> !"])
def test_texts_keep_their_spaces(text: str) -> None:
    tokenizer = build_tokenizer()
    tokenizer.clean_up_tokenization_spaces = True
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    ids = tuple(tokenizer(text)["input_ids"])
    assert tokenizer.decode(ids) != text  # what the tokenizer's own setting would do
    (group,) = Scorer([Format()]).score(tokenizer, [Prompt("p", (1,), "?", "4")], [[Completion(ids, (), "stop")]])
    assert group.texts == [text]
    assert ChatContinuation(tokenizer, []).text(ids) == text


# SentencePiece -------------------------------------------------------------------------------------------------------

LLAMA = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content + ' ' + eos_token }}"
    "{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
)
PHI = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
PLAIN = (
    "{{ bos_token }}{% for m in messages %}{{ m.role + ': ' + m.content }}{% if m.role == 'assistant' %}"
    "{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
TEMPLATES = {"llama": LLAMA, "phi": PHI, "plain": PLAIN}
SCHEMES = ("legacy", "always", "first", "never", "bytes")
PHI_TOKENS = ("<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")


@cache
def sentencepiece(scheme: str, template: str) -> PreTrainedTokenizerBase:
    """A tiny BPE tokenizer with byte fallback, or of bytes.

    The space before a text is that of a normalizer, as Llama 2, Mistral and Phi-3 have it, or of a pre-tokenizer,
    before each text between special tokens or before the first.
    """
    core = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=scheme != "bytes"))
    if scheme == "legacy":
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif scheme == "bytes":
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    space, byte = decoders.Replace("▁", " "), decoders.ByteFallback()
    core.decoder = (
        decoders.ByteLevel()
        if scheme == "bytes"
        else decoders.Sequence([space, byte, decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    )
    named, bytes_ = ["<unk>", "<s>", "</s>", *PHI_TOKENS], [f"<0x{byte:02X}>" for byte in range(256)]
    words = "user assistant: [INST] What is the sum [/INST] It is 12 and 345. said ... (cut) Call again".split()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if scheme == "bytes" else []
    trainer = trainers.BpeTrainer(
        vocab_size=1200, special_tokens=[*named, *bytes_], show_progress=False, initial_alphabet=alphabet
    )
    core.train_from_iterator([f" {word}" for word in words] * 5 + words * 3, trainer)
    described = json.loads(core.to_str())
    described["added_tokens"] = [
        token | {"rstrip": template == "phi" and token["content"] in PHI_TOKENS}
        for token in described["added_tokens"]
        if token["content"] in named
    ]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(described)),
        unk_token="<unk>",
        pad_token="<unk>",
        bos_token="<s>",
        eos_token="<|end|>" if template == "phi" else "</s>",
        chat_template=TEMPLATES[template],
        clean_up_tokenization_spaces=False,
    )


def asked(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(texts)]


CHATS: dict[str, list[dict[str, str]]] = {
    "a turn": asked("What is the sum?", "It is 12."),
    "a number": asked("What is 1 + 11?", "12"),
    "lines": asked("What\nis\n\nthe sum?", "12\nand 345"),
    "turns": asked("What is the sum?", "12", "And again?", "It is 345."),
    "long": asked("a", "b", "c", "d", "e", "f"),
    "other scripts": asked("数学 grüße?", "五 🙂"),
}


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_conversation_has_the_tokens_of_its_whole_text(scheme: str, template: str, name: str) -> None:
    tokenizer, messages = sentencepiece(scheme, template), CHATS[name]
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
    for settings in ({}, {"assistant_only_loss": True}, {"completion_only_loss": False}):
        data = ConversationDataModule([{"messages": messages}], batch_size=1, val_size=0, **settings)
        (conversation,) = data._render(tokenizer, data.train_rows(), "training")
        assert conversation.token_ids.tolist() == ids[: len(conversation.token_ids)]
        assert conversation.token_ids[-1] == tokenizer.eos_token_id
        if not settings:
            prompt = render_prompt(tokenizer, messages[:-1], None)  # as rollouts see it
            assert conversation.token_ids[: len(prompt)].tolist() == prompt
            learned = len(conversation.token_ids) - len(prompt)
            assert conversation.trained.tolist() == [False] * len(prompt) + [True] * learned


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        ("What is the sum?", " 12"),
        ("What is the sum? ", "12"),  # one token of the whole text would span both
        ("What is the su", "m? 12"),
        ("user", ": 12\n"),
        ("What</s>", "12"),
        ("12\n", "\n345"),
    ],
)
def test_text_goes_on_without_a_space_of_its_own(scheme: str, prompt: str, completion: str) -> None:
    tokenizer = sentencepiece(scheme, "plain")
    data = ConversationDataModule([{"prompt": prompt, "completion": completion}], batch_size=1, val_size=0)
    (conversation,) = data._render(tokenizer, data.train_rows(), "training")
    own = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert conversation.token_ids[: len(own)].tolist() == own
    after = " " if scheme in ("legacy", "always") and prompt.endswith(">") else ""  # a text after a special token
    decoded = tokenizer.decode(conversation.token_ids)
    assert decoded == f"{tokenizer.decode(own)}{after}{completion}</s>"


@pytest.mark.parametrize("answer", ["12", "12 ", "a\nb", "", "is <|end|> and </s> it", "grüße 数学", "12 and " * 400])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_environments_answer_has_the_tokens_of_the_whole_text(scheme: str, answer: str) -> None:
    tokenizer = sentencepiece(scheme, "phi")
    end = tokenizer.eos_token_id
    continuation = ChatContinuation(tokenizer, [end])
    continuation.check("tool")
    messages = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "Call"}]
    said = tokenizer(f"{tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)}Call")
    reply = {"role": "tool", "content": answer}
    text = tokenizer.apply_chat_template([*messages, reply], tokenize=False, add_generation_prompt=True)
    for turn, taken in ((said["input_ids"], []), ([*said["input_ids"], end], [end])):
        ids = list(continuation.suffix(turn, [reply]))
        if ">" not in answer:
            assert [*said["input_ids"], *taken, *ids] == tokenizer(text)["input_ids"]
        else:  # names of control tokens are split, and nothing is put between their parts
            plain = tokenizer.decode([token for token in ids if token not in continuation._added])
            assert answer in plain and ids.count(end) == 2 - len(taken)
    cut = continuation.suffix([end], [reply], max_tokens=3)
    assert len(answer) < 100 or tokenizer.decode(cut).count(" ... (cut)") == 1


def test_an_observation_follows_the_question() -> None:
    tokenizer = sentencepiece("legacy", "phi")
    ids = ChatContinuation(tokenizer, [], system_prompt="Sum.").prompt("What is", observation=" 12")
    assert list(ids) == tokenizer("<|system|>\nSum.<|end|>\n<|user|>\nWhat is 12<|end|>\n<|assistant|>\n")["input_ids"]


def test_an_end_that_the_template_puts_behind_a_space_is_not_written_twice() -> None:
    tokenizer = sentencepiece("legacy", "llama")
    reply = {"role": "user", "content": "12"}
    ids = ChatContinuation(tokenizer, [2]).suffix([2], [reply])
    assert tokenizer.decode(ids) == "[INST] 12 [/INST]"
    empty = ChatContinuation(tokenizer, [2]).suffix([2], [reply | {"content": ""}])
    assert tokenizer.decode(empty) == "[INST]  [/INST]"
    ids = ChatContinuation(tokenizer, [2]).suffix([5], [reply])  # of a turn without an end
    assert [*tokenizer("said")["input_ids"], *ids[:2]] == tokenizer("said </s>")["input_ids"]


def test_text_that_is_normalized_to_a_control_token_is_none() -> None:
    tokenizer = build_tokenizer()
    names = ["<\u00e9>", "\u00c5"]
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=True) for name in names])
    named = tokenizer.convert_tokens_to_ids(names)
    assert tokenizer("<e\u0301>\u212b")["input_ids"] == named
    ids = ChatContinuation(tokenizer, []).suffix([], [{"role": "user", "content": "a <e\u0301>\u212bb"}])
    assert tokenizer.decode(ids) == f"{EOS}<|user|>a <e\u0301>b<|assistant|>" and {*named}.isdisjoint(ids)


def test_an_end_behind_an_answer_is_not_that_of_the_turn() -> None:
    tokenizer = build_tokenizer(
        "{% for m in messages %}<|user|>{{ m.content }}{% if m.role == 'user' %}<|eos|>{% endif %}{% endfor %}"
        "<|assistant|>"
    )
    end = tokenizer.eos_token_id
    ids = ChatContinuation(tokenizer, [end]).suffix([end], [{"role": "user", "content": "12"}])
    assert tokenizer.decode(ids) == "<|user|>12<|eos|><|assistant|>"


# Rows as text --------------------------------------------------------------------------------------------------------

TEXT_ROWS: dict[str, tuple[dict[str, Any], str, str]] = {
    "an end inside": ({"prompt": "a", "completion": f"b{EOS} c"}, f"ab{EOS} c{EOS}", f"b{EOS} c{EOS}"),
    "an end in both": ({"prompt": f"a{EOS}", "completion": f"b{EOS}c{EOS}"}, f"a{EOS}b{EOS}c{EOS}", f"b{EOS}c{EOS}"),
    "an end and a line break": ({"prompt": "a", "completion": f"b{EOS}\n"}, f"ab{EOS}", f"b{EOS}"),
    "turns": (
        {"prompt": "<|bos|><|user|>a<|assistant|>", "completion": f"b{EOS}<|user|>c<|assistant|>d{EOS}"},
        f"<|bos|><|user|>a<|assistant|>b{EOS}<|user|>c<|assistant|>d{EOS}",
        f"b{EOS}<|user|>c<|assistant|>d{EOS}",
    ),
    "an answer that mentions it": (
        {"question": "What ends?", "answer": f"{EOS} does."},
        f"<|bos|><|user|>What ends?<|assistant|>{EOS} does.{EOS}",
        f"{EOS} does.{EOS}",
    ),
    "a question that mentions it": (
        {"question": f"What is {EOS}?", "answer": "An end."},
        f"<|bos|><|user|>What is {EOS}?<|assistant|>An end.{EOS}",
        f"An end.{EOS}",
    ),
    "a last question that mentions it": (
        {"messages": [*asked("a", "b", f"{EOS}c"), {"role": "system", "content": f"d{EOS}e"}]},
        f"<|bos|><|user|>a<|assistant|>b{EOS}<|user|>{EOS}c<|system|>d{EOS}e{EOS}",
        f"<|user|>a<|assistant|>b{EOS}<|user|>{EOS}c<|system|>d{EOS}e{EOS}",
    ),
    "padding behind the end": ({"prompt": "a", "completion": f"b{EOS}{PAD}\n"}, f"ab{EOS}", f"b{EOS}"),
}


@pytest.mark.parametrize("name", TEXT_ROWS)
def test_a_completion_ends_behind_its_text(name: str) -> None:
    tokenizer = build_tokenizer()
    row, whole, learned = TEXT_ROWS[name]
    last = "messages" not in row
    data = ConversationDataModule([row], batch_size=1, val_size=0, system_prompt=None, completion_only_loss=last)
    (conversation,) = data._render(tokenizer, data.train_rows(), "training")
    pairs = zip(conversation.token_ids, conversation.trained, strict=True)
    assert tokenizer.decode(conversation.token_ids) == whole
    assert tokenizer.decode([token for token, trained in pairs if trained]) == learned


@pytest.mark.parametrize(
    ("prompt", "starts"),
    [
        ("<s>user: 12", "<s>user"),
        ("user: 12", "<s>user"),
        ("", "<s>12"),
        ("<s>", "<s>12"),
        ("<s><s>user", "<s><s>user"),
        ("</s>user", "<s></s>user"),
    ],
)
def test_a_text_begins_once(prompt: str, starts: str) -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(sentencepiece("never", "plain").backend_tokenizer.to_str()),
        bos_token="<s>",
        eos_token="</s>",
    )
    tokenizer.add_bos_token = True
    tokenizer.update_post_processor()
    assert tokenizer("a")["input_ids"][0] == 1
    data = ConversationDataModule([{"prompt": prompt, "completion": "12"}], batch_size=1, val_size=0)
    (conversation,) = data._render(tokenizer, data.train_rows(), "training")
    assert tokenizer.decode(conversation.token_ids).startswith(starts)


def test_completions_end_at_any_end_that_a_models_files_name(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    ends = [tokenizer.eos_token_id + 1, tokenizer.eos_token_id + 2]
    for name, end in zip(("config", "generation_config"), ends, strict=True):
        (tmp_path / f"{name}.json").write_text(json.dumps({"model_type": "qwen2", "eos_token_id": end}))
    assert end_token_ids(tmp_path) == (tokenizer.eos_token_id, *ends)
