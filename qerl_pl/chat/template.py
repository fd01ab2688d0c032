"""Rendering of questions and conversations to token ids by the tokenizer's chat template, whole or in parts."""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from qerl_pl.errors import UserError

SYSTEM_PROMPT = "Think inside <think></think>, then give only the final answer inside <answer></answer>."
"""Asks for the format that the rewards check."""
TEMPLATE_DATE = datetime(2024, 7, 26)
"""Date in templates that have one, such as Llama's, so that prompts are the same on every day of a run."""
RENDERED_AT_ONCE = 1000
"""Texts of a call of the tokenizer, whose own records of a token take far more memory than its number."""
_TODAY = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
"""A template's call for the current date, which no argument replaces."""
_OWN = (
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "return_assistant_tokens_mask",
    "return_dict", "sanitize_control_tokens", "tokenize", "tools",
)  # fmt: skip

Chat = str | Sequence[Mapping[str, str]]
"""A user's message, or a conversation: messages with `role` and `content`."""


def check_template_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments of chat templates that the rendering sets itself.

    Raises:
        UserError: There is such an argument.
    """
    own = sorted(set(kwargs) & set(_OWN))
    if own:
        raise UserError(
            "chat_template_kwargs are variables of the chat template, such as enable_thinking; got "
            f"{', '.join(own)}, which rendering sets itself; take it out"
        )


def render_prompts(
    tokenizer: PreTrainedTokenizerBase,
    chats: Sequence[Chat],
    system_prompt: str | None = SYSTEM_PROMPT,
    template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[list[int]]:
    """Token ids of chats, each with the generation prompt.

    Args:
        tokenizer: Has a chat template.
        chats: User messages, or conversations; a text that the template has rendered already is taken as it is.
        system_prompt: System message of chats without their own; None or "" sends none.
        template_kwargs: Variables of the template, such as `enable_thinking`.
        tools: JSON schemas of the tools that the template offers.

    Raises:
        UserError: The tokenizer has no chat template, or it refuses the chat.
    """
    if not chats:
        return []
    frame = TemplateFrame(tokenizer, template_kwargs)
    bos = bos_ids(tokenizer)
    interned: dict[int, int] = {}  # one object a token id, however often it occurs
    token_ids = []
    for start in range(0, len(chats), RENDERED_AT_ONCE):
        part = chats[start : start + RENDERED_AT_ONCE]
        rendered = [isinstance(chat, str) and frame.made(chat) for chat in part]
        others = [messages_of(chat, system_prompt) for chat, done in zip(part, rendered, strict=True) if not done]
        texts = iter(template_texts(tokenizer, others, template_kwargs, tools=tools) if others else [])
        all_texts = [str(chat) if done else next(texts) for chat, done in zip(part, rendered, strict=True)]
        for ids, done in zip(tokenizer(all_texts, add_special_tokens=False)["input_ids"], rendered, strict=True):
            with_bos = [*bos, *ids] if done and ids[: len(bos)] != bos else ids
            token_ids.append([interned.setdefault(token, token) for token in with_bos])
    return token_ids


class TemplateFrame:
    """What a chat template writes around a user's message, by which texts are known that it has rendered.

    Raises:
        UserError: As `template_texts`.
    """

    _PROBE = "qerlprobe"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None = None) -> None:
        (text,) = template_texts(tokenizer, [[{"role": "user", "content": self._PROBE}]], template_kwargs)
        added = tokenizer.added_tokens_decoder.values()
        self.control_tokens = tuple(str(token) for token in added if token.special and str(token) in text)
        self._end = text.rpartition(self._PROBE)[2].rstrip()

    def made(self, text: str) -> bool:
        """Whether a text begins with a control token, or ends as a prompt does: it is rendered already."""
        return text.lstrip().startswith(self.control_tokens) or bool(self._end and text.rstrip().endswith(self._end))

    def mentioned(self, text: str) -> bool:
        """Whether a text has control tokens."""
        return any(token in text for token in self.control_tokens)


def template_texts(
    tokenizer: PreTrainedTokenizerBase,
    chats: Sequence[Sequence[Mapping[str, Any]]],
    template_kwargs: Mapping[str, Any] | None,
    generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[str]:
    """Texts of conversations by the chat template; arguments and errors as of `render_prompts`."""
    name = tokenizer.name_or_path or "the policy"
    if tokenizer.chat_template is None:
        raise UserError(
            f"prompts need a chat template; the tokenizer of {name} has none; use an instruct model, or add "
            "chat_template.jinja to the folder that model.policy.path names"
        )
    offered = {"tools": [dict(tool) for tool in tools]} if tools else {}
    template = tokenizer.get_chat_template(tools=offered.get("tools"))  # of several, such as Hermes', that with tools
    try:
        texts = tokenizer.apply_chat_template(
            [[dict(message) for message in chat] for chat in chats],
            tokenize=False,
            add_generation_prompt=generation_prompt,
            chat_template=_TODAY.sub(lambda call: repr(TEMPLATE_DATE.strftime(call[2])), template),
            **{"date_string": TEMPLATE_DATE.strftime("%d %b %Y"), **offered, **(template_kwargs or {})},
        )
    except (TemplateError, TypeError) as error:  # TypeError: of what the template does with other content than text
        raise UserError(
            f"the chat template of {name} refuses the messages: {error}; "
            "correct them; if it has no system message, set data.init_args.system_prompt to null and put the "
            "request into the question."
        ) from error
    return [str(text) for text in texts]


def messages_of(chat: Chat, system_prompt: str | None) -> list[dict[str, str]]:
    """The messages of a chat, with the system message if it has none of its own."""
    messages = [{"role": "user", "content": chat}] if isinstance(chat, str) else [dict(message) for message in chat]
    if system_prompt and messages[0]["role"] != "system":
        return [{"role": "system", "content": system_prompt}, *messages]
    return messages


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, chat: Chat, system_prompt: str | None = SYSTEM_PROMPT
) -> list[int]:
    """Token ids of one chat, see `render_prompts`."""
    return render_prompts(tokenizer, [chat], system_prompt)[0]


def render_conversation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    template_kwargs: Mapping[str, Any] | None = None,
    first: int = 0,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[tuple[str, int | None]]:
    """Segments of a conversation's text, each with the index of its assistant's message, or None for other text.

    The assistant's segments begin where the generation prompt ends, as sampled completions do.

    Args:
        tokenizer: Has a chat template.
        messages: Dictionaries with `role` and `content`.
        template_kwargs: Variables of the template, such as `enable_thinking`.
        first: Index of the first message of the assistant that needs its own segment; those before it may be part of
            its prompt.
        tools: JSON schemas of the tools that the template offers.

    Raises:
        UserError: The tokenizer has no chat template, it refuses the messages, or it writes a turn from `first` on in
            another way once more turns follow, so that there is no text to train on.
    """
    done = ""
    parts: list[tuple[str, int | None]] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = template_texts(tokenizer, [messages[:index]], template_kwargs, tools=tools)[0]
        text = template_texts(tokenizer, [messages[: index + 1]], template_kwargs, False, tools)[0]
        if index <= first and not prompt.startswith(done):  # a template that drops the reasoning of earlier turns, say
            parts, done = [], ""
        if index < first and not text.startswith(prompt):
            continue
        if not (prompt.startswith(done) and text.startswith(prompt)):
            raise _rewrites(tokenizer, index + 1)
        parts += [(prompt[len(done) :], None), (text[len(prompt) :], index)]
        done = text
    text = template_texts(tokenizer, [messages], template_kwargs, False, tools)[0]
    if not text.startswith(done):
        raise _rewrites(tokenizer, len(messages))
    return [*parts, (text[len(done) :], None)] if len(text) > len(done) else parts


def _rewrites(tokenizer: PreTrainedTokenizerBase, number: int) -> UserError:
    return UserError(
        "a chat template must continue a conversation's text with each turn; that of "
        f"{tokenizer.name_or_path or 'the policy'} changes what stands before message {number}; give each assistant's "
        "turn its own row, or set chat_template_kwargs"
    )


class PartTokenizer:
    """Tokenizes the consecutive parts of a text as sampling sees them.

    A SentencePiece tokenizer puts a space before a text; before a part of one it would be a token too many. There each
    part has the tokens that it has in the whole text; where a token would span two parts, the later one is tokenized
    without the space. Other tokenizers tokenize each part by itself.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._spaceless: Tokenizer | None = None
        if tokenizer.is_fast:
            described = json.loads(tokenizer.backend_tokenizer.to_str())
            steps = {name: described[name] for name in ("normalizer", "pre_tokenizer")}
            if (spaceless := _without_leading_space(steps)) != steps:
                self._spaceless = Tokenizer.from_str(json.dumps(described | spaceless))

    def __call__(self, rows: Sequence[Sequence[str]]) -> list[list[list[int]]]:
        """Token ids of each part of each row, without special tokens that the parts do not name."""
        if self._spaceless is None:
            ids = iter(self._whole([part for parts in rows for part in parts]))
            return [[next(ids) for _ in parts] for parts in rows]
        prefixes = ["".join(parts[: count + 1]) for parts in rows for count in range(len(parts))]
        ids = iter(self._whole(prefixes))
        found: list[list[list[int]]] = []
        for parts in rows:
            before: list[int] = []
            found.append([])
            for part in parts:
                whole = next(ids)
                fits = whole[: len(before)] == before
                found[-1].append(whole[len(before) :] if fits else self.alone(part))
                before = whole
        return found

    def after(self, before: str, text: str) -> list[int]:
        """Token ids of a text that follows another one."""
        if self._spaceless is None or not before:
            return self._whole([text])[0] if text else []
        return self([[before, text]])[0][1]

    def alone(self, text: str) -> list[int]:
        """Token ids of a text without the space that a SentencePiece tokenizer would put before it."""
        if self._spaceless is None:
            return self.after("", text)
        return list(self._spaceless.encode(text, add_special_tokens=False).ids)

    def _whole(self, texts: list[str]) -> list[list[int]]:
        return [list(ids) for ids in self.tokenizer(texts, add_special_tokens=False)["input_ids"]] if texts else []


def bos_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The beginning-of-sequence (BOS) token id if the tokenizer adds it to a text; else none."""
    return [tokenizer.bos_token_id] if list(tokenizer("")["input_ids"])[:1] == [tokenizer.bos_token_id] else []


def _without_leading_space(step: Any) -> Any:
    """The description of a normalizer or pre-tokenizer without what puts a space before a text."""
    if isinstance(step, list):
        return [_without_leading_space(item) for item in step]
    if not isinstance(step, dict):
        return step
    if step.get("type") == "Prepend":
        return {"type": "Sequence", "normalizers": []}
    never = {"prepend_scheme": "never", "add_prefix_space": False}
    return {name: never.get(name, _without_leading_space(value)) for name, value in step.items()}
