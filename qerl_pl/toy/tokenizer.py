"""A small byte-level BPE tokenizer, trained on the arithmetic task."""

import random
import re
from collections.abc import Iterator

from transformers import AddedToken, Qwen2Tokenizer

from qerl_pl.chat.template import SYSTEM_PROMPT
from qerl_pl.toy.task import ArithmeticTask, careful_demonstration, careless_demonstration

VOCABULARY = 512
PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
SENTENCES = (
    "She works for 8 hours a day and earns $12 an hour, so how much money does he make each week if they spend half of"
    " their time at school? What is the total number of miles per year? It costs him twice as much to buy 3 of them and"
    " each day her friend had to pay for one more than that. After the first week there were some left over."
)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

TOOLS_TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|system|>Tools:"
    "{% for tool in tools %} {{ tool['function']['name'] }} {{ tool['function']['parameters']['properties'] | join }}"
    "{% endfor %}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|' + ('user' if message['role'] == 'tool' else message['role']) + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Chat template with tools, whose answers have the user's role."""


def build_tokenizer(chat_template: str = CHAT_TEMPLATE) -> Qwen2Tokenizer:
    """Train the toy tokenizer, which is deterministic.

    Its 512 tokens are: every byte, so that any text encodes, and decodes to its NFC form; digits; most words of the
    task; and the tags, which are no special tokens, so that decoding keeps them. Its class is Qwen2's, which
    transformers loads for any Qwen2 model.
    """
    blank = Qwen2Tokenizer(
        unk_token=PAD,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        extra_special_tokens=list(ROLES),
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )
    tokenizer = blank.train_new_from_iterator(_corpus(), vocab_size=VOCABULARY - len(TAGS), show_progress=False)
    assert isinstance(tokenizer, Qwen2Tokenizer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return tokenizer


def _corpus() -> Iterator[str]:
    """Text of small and large tasks without tags, and common words of other word problems."""
    rng = random.Random(0)
    yield from [SENTENCES] * 10
    for task in (ArithmeticTask(), ArithmeticTask(digits=6, operands=3)):
        for index in range(500):
            problem = task.problem(index, "train")
            for text in (SYSTEM_PROMPT, careful_demonstration(problem), careless_demonstration(problem, rng)):
                yield from re.split("|".join(TAGS), text)
            yield problem.question
