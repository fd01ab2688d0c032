"""How a question becomes the token ids of a prompt."""

import re
from collections.abc import Sequence
from datetime import datetime

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from qerl_pl.errors import UserError

SYSTEM_PROMPT = "Think inside <think></think>, then give only the final answer inside <answer></answer>."

"""Asks for exactly the format that the rewards check."""

TEMPLATE_DATE = datetime(2024, 7, 26)

"""What templates that name the day are told (Llama's do), so that prompts are the same on every day of a run."""

_TODAY = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")

"""A template's own way to ask for the day, which takes no argument from outside."""


def render_prompts(
    tokenizer: PreTrainedTokenizerBase, questions: Sequence[str], system_prompt: str | None = SYSTEM_PROMPT
) -> list[list[int]]:
    """Token ids of the chats [system, user], each with the generation prompt that opens the answer.

    Args:
        tokenizer: has a chat template.
        questions: what the user says, one chat each.
        system_prompt: the system message; None or "" sends none.

    Raises:
        UserError: the tokenizer has no chat template, or one that refuses the chat.
    """
    if not questions:
        return []
    if tokenizer.chat_template is None:
        raise UserError(
            f"prompts need a chat template; the tokenizer of {tokenizer.name_or_path or 'the policy'} has none; "
            "use an instruct model, or add chat_template.jinja to the model's folder."
        )
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    chats = [[*system, {"role": "user", "content": question}] for question in questions]
    try:
        texts = tokenizer.apply_chat_template(
            chats,
            tokenize=False,
            add_generation_prompt=True,
            chat_template=_TODAY.sub(lambda call: repr(TEMPLATE_DATE.strftime(call[2])), tokenizer.get_chat_template()),
            date_string=TEMPLATE_DATE.strftime("%d %b %Y"),
        )
    except TemplateError as error:
        raise UserError(
            f"the chat template of {tokenizer.name_or_path or 'the policy'} refuses the prompt: {error}; "
            "where it knows no system message, set data.init_args.system_prompt to null and ask in the question."
        ) from error
    return [list(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, question: str, system_prompt: str | None = SYSTEM_PROMPT
) -> list[int]:
    """Token ids of one chat, see `render_prompts`."""
    return render_prompts(tokenizer, [question], system_prompt)[0]
