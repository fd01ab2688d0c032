"""A search over a local corpus as a tool, by BM25."""

import hashlib
import json
from pathlib import Path
from typing import Any

from qerl_pl.errors import UserError, require_at_least
from qerl_pl.runtime.files import atomic_directory, build_once, cache_root

_RULE = "a corpus is a .jsonl file with one passage a line, or a text file with empty lines between passages"


class Search:
    """Environment with a search over a corpus by BM25 (bm25s, the extra `search`).

    The index is built once and kept in the cache ($QERL_CACHE), from where every worker maps it into memory.

    Args:
        corpus: A .jsonl file with an object for each passage, or a text file with empty lines between passages.
        k: Passages of an answer.
        text: Key of a passage's text.
        title: Key of a passage's title, shown and searched with the text where a passage has one.
    """

    def __init__(self, corpus: str, k: int = 3, text: str = "text", title: str = "title") -> None:
        require_at_least(1, {"Search's k": k})
        try:
            import bm25s
        except ImportError as error:
            raise UserError("Search needs bm25s, which is not installed; run pip install bm25s") from error
        self._bm25s = bm25s
        path = Path(corpus).expanduser()
        if not path.is_file():
            raise UserError(f"{_RULE}; there is no file {path}; correct the path")
        folder = cache_root() / f"bm25-{bm25s.__version__}-{_identity(path, text, title)}"
        with build_once(folder) as missing:
            if missing:
                passages = read_passages(path, text, title)
                index = bm25s.BM25()
                index.index(self._tokens(passages), show_progress=False)
                with atomic_directory(folder) as unfinished:
                    index.save(unfinished, corpus=[{"text": passage} for passage in passages], show_progress=False)
        self._index = bm25s.BM25.load(folder, mmap=True, load_corpus=True, show_progress=False)
        self._k = min(k, self._index.scores["num_docs"])

    def reset(self, **row: Any) -> None:
        """Begin a dialogue; a search has no state."""

    def search(self, query: str) -> str:
        """Search for passages.

        Args:
            query: Words to look for.

        Returns:
            The passages that fit best, numbered.
        """
        tokens = self._tokens([query])
        if not tokens.vocab:
            return "Nothing found."
        passages, scores = self._index.retrieve(
            tokens, k=self._k, show_progress=False, n_threads=0, backend_selection="numpy"
        )
        texts = [passage["text"] for passage, score in zip(passages[0], scores[0], strict=True) if score > 0]
        return "\n\n".join(f"[{number}] {text}" for number, text in enumerate(texts, start=1)) or "Nothing found."

    def _tokens(self, texts: list[str]) -> Any:
        return self._bm25s.tokenize(texts, stopwords="en", show_progress=False)


def read_passages(path: Path, text: str = "text", title: str = "title") -> list[str]:
    """The passages of a corpus, each with its title in the first line.

    Raises:
        UserError: A line is no object with the text, or there is no passage.
    """
    try:
        content = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{_RULE}, in UTF-8; {path} is not ({error}); convert it") from error
    if path.suffix != ".jsonl":
        passages = [part.strip() for part in content.split("\n\n") if part.strip()]
    else:
        passages = []
        for number, line in enumerate(content.split("\n"), start=1):  # splitlines also splits at breaks within JSON
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                body = row[text]
                passages.append(f"{row[title]}\n{body}" if row.get(title) else str(body))
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f"{_RULE}, with the key {text!r}; line {number} of {path} has none; correct it"
                ) from error
    if not passages:
        raise UserError(f"{_RULE}; {path} has no passage; add some")
    return passages


def _identity(path: Path, *settings: str) -> str:
    """A digest of a file's place, size and time, and of settings."""
    status = path.stat()
    facts = [str(path.absolute()), status.st_size, status.st_mtime_ns, *settings]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
