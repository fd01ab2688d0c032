"""Continues a chat after a sampled turn: token ids of tools' answers and of the next generation prompt.

Turns that were sampled are never rendered again. The suffix is what the chat template writes after an assistant's turn
of a conversation of placeholders, so that a template that rewrites earlier turns, such as one that drops their
reasoning, does not change a token that was sampled or read before.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from qerl_pl.chat.template import Chat, PartTokenizer, TemplateFrame, messages_of, template_texts
from qerl_pl.errors import UserError

CUT = " ... (cut)"
"""Ends an answer that is longer than its limit."""
CHARACTERS_PER_TOKEN = 32
"""Characters of an answer for each token of its limit that are tokenized at all."""


class ChatContinuation:
    """Renders the start of a chat with an environment, and what follows a sampled turn.

    Text of an environment never becomes a control token: what looks like one of the tokenizer's added tokens is split.

    Args:
        tokenizer: Has a chat template.
        ends: Token ids that end a turn.
        template_kwargs: Variables of the template, such as `enable_thinking`.
        system_prompt: System message of chats without their own; None sends none.
        instruction: Text behind chats that are a user's message, after a line break; None adds none.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        ends: Collection[int],
        template_kwargs: Mapping[str, Any] | None = None,
        system_prompt: str | None = None,
        instruction: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.instruction = instruction
        self._parts = PartTokenizer(tokenizer)
        self.ends = frozenset(ends)
        self.template_kwargs = dict(template_kwargs or {})
        self.system_prompt = system_prompt
        added = tokenizer.get_added_vocab()
        self._added = frozenset(added.values())
        longest_first = sorted(filter(None, added), key=lambda token: (-len(token), token))
        self._controls = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def prompt(
        self, chat: Chat, tools: Sequence[Mapping[str, Any]] = (), observation: str | None = None
    ) -> tuple[int, ...]:
        """Token ids of a chat with the generation prompt.

        Args:
            chat: The user's message, or a conversation.
            tools: JSON schemas of the tools to offer.
            observation: What the environment's `reset` returned, appended to the last message.

        Raises:
            UserError: As `render_prompts`, or the chat is text that the template has rendered already.
        """
        if isinstance(chat, str) and self._frame.made(chat):
            raise UserError(
                "the prompts of an environment are rendered with its tools and observation; got text that a chat "
                f"template has rendered already, {chat!r:.60}; give messages, or the user's text alone"
            )
        if isinstance(chat, str) and self.instruction:
            chat = f"{chat}\n{self.instruction}"
        messages: list[dict[str, Any]] = [*messages_of(chat, self.system_prompt)]
        texts = [] if observation is None else [observation]
        begin, end = self._marks(texts)
        if observation is not None:
            messages[-1]["content"] = f"{messages[-1]['content']}{begin}{_encodable(observation)}{end}"
        text = template_texts(self.tokenizer, [messages], self.template_kwargs, tools=tools)[0]
        parts = _split(text, begin, end)
        if len(parts) != 2 * len(texts) + 1:
            raise UserError(
                f"an observation is appended to the prompt's last message; the chat template of {self._name} leaves it "
                "out; give the rows a user's message"
            )
        return tuple(self._ids("", parts))

    def suffix(
        self,
        turn: Sequence[int],
        answers: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
    ) -> tuple[int, ...]:
        """Token ids after a sampled turn: the end of the turn unless it was sampled, the answers, a generation prompt.

        Args:
            turn: Token ids of the sampled turn, of which only the last is read.
            answers: Messages with `role`, `content` and further keys that the template reads.
            tools: JSON schemas of the tools that the prompt offers.
            max_tokens: Most tokens of an answer's own text, which is cut there.

        Raises:
            UserError: The chat template cannot go on after a turn.
        """
        limit = None if max_tokens is None else max_tokens * CHARACTERS_PER_TOKEN + 1  # by one more `_text_ids` knows
        texts = [_encodable(str(answer["content"])[:limit]) for answer in answers]
        begin, end = self._marks(texts)
        marked = [{**answer, "content": begin + text + end} for answer, text in zip(answers, texts, strict=True)]
        said = f"{begin}said{end}"
        conversation = [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": said}, *marked]
        text = template_texts(self.tokenizer, [conversation], self.template_kwargs, tools=tools)[0]
        _, separator, after = text.partition(said)
        parts = _split(after, begin, end)
        if not separator or len(parts) != 2 * len(texts) + 1:
            raise self._cannot_go_on(answers)
        ids = self._ids("said", parts, max_tokens)
        if turn and turn[-1] in self.ends:  # the template's own end is left out, and a space before it
            place = next((index for index, token in enumerate(ids) if token in self.ends), None)
            if place is not None and not str(self.tokenizer.decode(ids[:place])).strip():
                ids = ids[place + 1 :]
        return tuple(ids)

    def check(self, role: str, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """Refuse a chat template that cannot go on after a message of this role.

        Raises:
            UserError: It refuses such a message, leaves its content or the turn before it out, or does not ask for the
                next turn as it asks for the first.
        """
        answers = [_answer(role, number) for number in range(2 if role == "tool" else 1)]
        try:
            suffix = self.suffix((), answers, tools)
        except UserError as error:
            raise self._cannot_go_on(answers) from error
        user = [{"role": "user", "content": "Go on."}]
        plain, asking = (
            template_texts(self.tokenizer, [user], self.template_kwargs, generation_prompt, tools)[0]
            for generation_prompt in (False, True)
        )
        asks = self._parts.after(plain, asking.removeprefix(plain)) if asking.startswith(plain) else []
        if not asks or list(suffix[-len(asks) :]) != asks:
            raise self._cannot_go_on(answers)

    def text(self, ids: Sequence[int]) -> str:
        """Text of a sampled turn without the tokens that end it; control tokens stay."""
        text_ids = list(ids)
        while text_ids and text_ids[-1] in self.ends:
            del text_ids[-1]
        return str(self.tokenizer.decode(text_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @cached_property
    def _frame(self) -> TemplateFrame:
        return TemplateFrame(self.tokenizer, self.template_kwargs)

    @property
    def _name(self) -> str:
        return self.tokenizer.name_or_path or "the policy"

    def _cannot_go_on(self, answers: Sequence[Mapping[str, Any]]) -> UserError:
        role = answers[0]["role"] if answers else "user"
        return UserError(
            f"an environment needs a chat template that goes on after a turn with a message of role {role!r} and asks "
            f"for the next turn as for the first; that of {self._name} does not; put one that does into the model's "
            "folder as chat_template.jinja, or choose another model"
        )

    def _marks(self, texts: Sequence[str]) -> tuple[str, str]:
        """Marks to put around the environment's texts, which occur in none of them."""
        number = 0
        while any(f"qerlmark{number}" in text for text in texts):
            number += 1
        return f"qerlmark{number}begin", f"qerlmark{number}end"

    def _ids(self, before: str, parts: Sequence[str], max_tokens: int | None = None) -> list[int]:
        """Token ids of the template's own parts and, at odd indices, of the environment's text, after another text."""
        ids: list[int] = []
        for index, part in enumerate(parts):
            ids += self._text_ids(before, part, max_tokens) if index % 2 else self._parts.after(before, part)
            before = part or before
        return ids

    def _text_ids(self, before: str, text: str, max_tokens: int | None) -> list[int]:
        """Token ids of text after another one, without added tokens, also if the text contains their names."""
        pieces, start = [], 0
        for match in self._controls.finditer(text) if self._controls is not None else ():
            pieces.append(text[start : match.start() + 1])
            start = match.start() + 1
        first, *others = (*pieces, text[start:])
        ids = self._parts.after(before, first) + [token for piece in others for token in self._parts.alone(piece)]
        if not self._added.isdisjoint(ids):  # where normalization makes a control token of other characters
            ids = [token for character in text for token in self._parts.alone(character) if token not in self._added]
        if max_tokens is not None and (len(ids) > max_tokens or len(text) > max_tokens * CHARACTERS_PER_TOKEN):
            ids = ids[:max_tokens] + self._parts.alone(CUT)
        return ids


def _answer(role: str, number: int) -> dict[str, Any]:
    return {"role": role, "content": f"answer {number}"} | ({"name": "tool"} if role == "tool" else {})


def _encodable(text: str) -> str:
    """Text without unpaired surrogates, which tokenizers refuse."""
    return text.encode("utf-8", "replace").decode()


def _split(text: str, begin: str, end: str) -> list[str]:
    """Split text at marks: the text inside of them is at odd indices."""
    return re.split(f"{begin}(.*?){end}", text, flags=re.DOTALL)
