"""Dialogues without a model: chat templates of several families, environments in this process, an engine that talks."""

import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from qerl_pl.environments.contract import Opening, ToolAnswer
from qerl_pl.toy.tokenizer import CHAT_TEMPLATE, build_tokenizer
from qerl_pl.types import Completion, RolloutRequest, SamplingConfig

QWEN25 = """{%- if tools %}<|im_start|>system
# Tools, called in <tool_call></tool_call>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

QWEN3 = """{%- set ns = namespace(query=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.query = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}<|im_start|>system
Call in <tool_call></tool_call>: {{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- set said = message.content.split('</think>')[-1].lstrip() %}
{%- set thought = message.content.split('</think>')[0].split('<think>')[-1].strip() %}
{%- if '</think>' not in message.content %}{% set thought = '' %}{% endif %}
{%- if loop.index0 > ns.query and (loop.last or thought) %}<|im_start|>assistant
<think>
{{ thought }}
</think>

{{ said }}<|im_end|>
{% else %}<|im_start|>assistant
{{ said }}<|im_end|>
{% endif %}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""

LLAMA3 = """<|begin|>
{%- for message in messages %}
{%- if message.role in ('tool', 'ipython') %}<|start_header_id|>ipython<|end_header_id|>

{{ message.content | tojson }}<|eot_id|>
{%- else %}<|start_header_id|>{{ message.role }}<|end_header_id|>
{{- '\\n\\n' }}
{%- if loop.first and tools %}{{ 'Call by {"name": ..., "parameters": ...} ' + (tools | tojson) + '\\n' }}{% endif %}
{{- message.content | trim }}<|eot_id|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

IM_START, IM_END, EOT = "<|im_start|>", "<|im_end|>", "<|eot_id|>"
CONTROLS = (IM_START, IM_END, EOT, "<|begin|>", "<|start_header_id|>", "<|end_header_id|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
    }
]


@cache
def tokenizer_of(template: str) -> PreTrainedTokenizerBase:
    """The toy tokenizer with the control tokens of all families, and a chat template."""
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [*CONTROLS]}, replace_extra_special_tokens=False)
    tokenizer.add_tokens([*TAGS])
    tokenizer.chat_template = {"qwen2.5": QWEN25, "qwen3": QWEN3, "llama3": LLAMA3, "toy": CHAT_TEMPLATE}[template]
    return tokenizer


def end_of(template: str) -> str:
    """The token that ends a turn."""
    return {"qwen2.5": IM_END, "qwen3": IM_END, "llama3": EOT, "toy": "<|eos|>"}[template]


def expected_suffix(template: str, ended: bool, answers: Sequence[tuple[str, str]], thinks: bool) -> str:
    """What a template writes after a turn, put together by hand.

    Args:
        template: Its name.
        ended: Whether the turn's end was sampled.
        answers: Role and text of each answer; text as it is to stand there.
        thinks: False where the template's generation prompt has an empty thought.
    """
    end = "" if ended else end_of(template)
    if template == "toy":
        return end + "".join(f"<|{role}|>{text}" for role, text in answers) + "<|assistant|>"
    if template == "llama3":
        parts = "".join(
            f"<|start_header_id|>{'ipython' if role == 'tool' else role}<|end_header_id|>\n\n{text}<|eot_id|>"
            if role == "tool"
            else f"<|start_header_id|>user<|end_header_id|>\n\n{text}<|eot_id|>"
            for role, text in answers
        )
        return f"{end}{parts}<|start_header_id|>assistant<|end_header_id|>\n\n"
    if answers[0][0] == "user":
        middle = f"<|im_start|>user\n{answers[0][1]}<|im_end|>\n"
    else:
        blocks = "".join(f"\n<tool_response>\n{text}\n</tool_response>" for _, text in answers)
        middle = f"<|im_start|>user{blocks}<|im_end|>\n"
    empty_thought = "<think>\n\n</think>\n\n" if template == "qwen3" and not thinks else ""
    return f"{end}\n{middle}<|im_start|>assistant\n{empty_thought}"


class LocalSession:
    """An environment of this process; answers come from another thread."""

    def __init__(self, environment: Any, row: Mapping[str, Any], thread: ThreadPoolExecutor) -> None:
        self.environment = environment
        self.thread = thread
        self.closed = 0
        self.opened: Future[Opening] = thread.submit(self._open, dict(row))

    def _open(self, row: dict[str, Any]) -> Opening:
        observation = self.environment.reset(**row)
        steps = callable(getattr(self.environment, "step", None))
        return Opening(observation, [] if steps else getattr(self.environment, "tools", TOOLS), steps)

    def call(self, name: str, arguments: Mapping[str, Any]) -> Future[ToolAnswer]:
        return self.thread.submit(self.environment.called, name, dict(arguments))

    def step(self, text: str) -> Future[ToolAnswer]:
        return self.thread.submit(self.environment.step, text)

    def reward(self, messages: Sequence[Mapping[str, Any]] = ()) -> Future[float | None]:
        return self.thread.submit(lambda: float(self.environment.get_reward()))

    def close(self) -> None:
        self.closed += 1


class LocalPool:
    """Environments of this process.

    Args:
        factory: Makes an environment of a row.
        threads: Threads that answer.
    """

    def __init__(self, factory: Callable[[Mapping[str, Any]], Any], threads: int = 1) -> None:
        self.factory = factory
        self.thread = ThreadPoolExecutor(threads)
        self.sessions: list[LocalSession] = []
        self.seeds: list[int | None] = []

    def open(self, row: Mapping[str, Any], seed: int | None = None) -> LocalSession:
        self.seeds.append(seed)
        self.sessions.append(LocalSession(self.factory(row), row, self.thread))
        return self.sessions[-1]


class Answering:
    """An environment whose answers are drawn by the row's number.

    Args:
        row: Of the data; `number` seeds the answers.
        texts: What to answer.
        steps: Whether it answers text.
    """

    def __init__(self, row: Mapping[str, Any], texts: Sequence[str], steps: bool = False) -> None:
        self.rng = random.Random(row["number"])
        self.texts = texts
        self.answers: list[ToolAnswer] = []
        if steps:
            self.step = lambda text: self.called("step", {})

    def reset(self, **row: Any) -> str | None:
        self.observation = self.rng.choice([None, "", self.rng.choice(self.texts)])
        return self.observation

    def called(self, name: str, arguments: dict[str, Any]) -> ToolAnswer:
        answer = ToolAnswer(self.rng.choice(self.texts), self.rng.random() < 0.3, 0.25, self.rng.random() < 0.05)
        self.answers.append(answer)
        return answer

    def get_reward(self) -> float:
        return float(len(self.answers))


class Talking:
    """An engine that says what a function of prompt, seed and limit makes it say, and records it.

    Args:
        says: Token ids and whether they end the turn.
    """

    def __init__(self, says: Callable[[RolloutRequest], tuple[list[int], bool]]) -> None:
        self.says = says
        self.log: list[tuple[RolloutRequest, Completion]] = []
        self.rounds: list[int] = []

    def generate(self, requests: Sequence[RolloutRequest], sampling: SamplingConfig) -> list[list[Completion]]:
        self.rounds.append(len(requests))
        return [[self._completion(request)] for request in requests]

    def _completion(self, request: RolloutRequest) -> Completion:
        assert len(request.seeds) == 1 and request.max_tokens is not None
        ids, ended = self.says(request)
        cut = len(ids) > request.max_tokens or not ended
        ids = ids[: request.max_tokens]
        logprobs = tuple(-1.0 - token / 1000 - position / 10 for position, token in enumerate(ids))
        completion = Completion(tuple(ids), logprobs, "length" if cut else "stop")
        self.log.append((request, completion))
        return completion
