"""How a question becomes the token ids of a prompt."""

from transformers import PreTrainedTokenizerBase

SYSTEM_PROMPT = "Think inside <think></think>, then give only the final answer inside <answer></answer>."
"""Asks for exactly the format that the rewards check."""


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, question: str, system_prompt: str | None = SYSTEM_PROMPT
) -> list[int]:
    """Token ids of the chat [system, user] with the generation prompt that opens the answer.

    Args:
        tokenizer: has a chat template.
        question: what the user says.
        system_prompt: the system message; None sends none.
    """
    messages = [{"role": "user", "content": question}]
    if system_prompt is not None:
        messages.insert(0, {"role": "system", "content": system_prompt})
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
