"""Rendering of questions to prompt token ids by the tokenizer's chat template."""

import re
from collections.abc import Sequence
from datetime import datetime

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from qerl_pl.errors import UserError

SYSTEM_PROMPT = "Think inside <think></think>, then give only the final answer inside <answer></answer>."
"""Requests the format that the rewards check."""
TEMPLATE_DATE = datetime(2024, 7, 26)
"""Date in templates that have one, such as Llama's, so that prompts are the same on every day of a run."""
_TODAY = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
"""A template's call for the current date, which no argument replaces."""


def render_prompts(
    tokenizer: PreTrainedTokenizerBase, questions: Sequence[str], system_prompt: str | None = SYSTEM_PROMPT
) -> list[list[int]]:
    """Token ids of the chats [system, user], each with the generation prompt.

    Args:
        tokenizer: Has a chat template.
        questions: User messages, one per chat.
        system_prompt: System message; None or "" sends none.

    Raises:
        UserError: The tokenizer has no chat template, or it refuses the chat.
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
