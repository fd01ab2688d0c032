"""Token ids of the parts of a text, which SentencePiece tokenizers write in another way than the whole text."""

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase


class PartTokenizer:
    """Tokenizes the consecutive parts of a text as sampling sees them.

    A SentencePiece tokenizer puts a space before a text; before a part of one it would be a token too many. There each
    part has the tokens that it has in the whole text; where a token would span two parts, the later one is tokenized
    without the space. Other tokenizers tokenize each part by itself.

    Args:
        tokenizer: The policy's.
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


def beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The begin-of-sequence token if the tokenizer puts it before a text."""
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
