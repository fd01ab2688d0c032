"""Engines that take up requests while others run: the same completions as those of one call, and nobody waits."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from qerl_pl.engines import EngineSpec, RolloutEngine, TransformersEngine, VLLMEngine
from qerl_pl.engines.base import ContinuousEngine, generate_from
from qerl_pl.engines.vllm.requests import BatchSource, allocated_by_block, completion_of, processed_once
from qerl_pl.errors import UserError
from qerl_pl.types import Completion, PolicyWeights, RolloutRequest, SamplingConfig

SAMPLING = SamplingConfig(max_tokens=40)
ENGINES = ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)]


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, tiny_policy_dir: Path) -> Iterator[RolloutEngine]:
    engine: RolloutEngine = TransformersEngine()
    if request.param == "vllm":
        engine = VLLMEngine(kv_cache_gib=0.25, max_num_seqs=8, max_num_batched_tokens=256)
    engine.launch(EngineSpec(tiny_policy_dir, torch.float32, torch.device("cpu"), 0, (), 256))
    engine.sync(PolicyWeights(0, None, 1.0))
    yield engine
    engine.close()


class Growing:
    """Dialogues of several turns without an environment: the prompt of a turn is all tokens so far and a suffix.

    Args:
        limits: Tokens of each turn of each dialogue.
    """

    def __init__(self, limits: Sequence[Sequence[int]]) -> None:
        self.limits = limits
        self.prompts = [[3, 10 + key, 20, 30] for key in range(len(limits))]
        self.turns = [0] * len(limits)
        self.ready = list(range(len(limits)))
        self.log: list[tuple[int, RolloutRequest, Completion]] = []
        self.running: dict[int, RolloutRequest] = {}
        self.taken: list[tuple[bool, int]] = []

    def take(self, wait: bool, gather: bool = False) -> Sequence[tuple[int, RolloutRequest]]:
        ready, self.ready = self.ready, []
        self.taken.append((wait, len(ready)))
        for key in ready:
            limit = self.limits[key][self.turns[key]]
            self.running[key] = RolloutRequest(tuple(self.prompts[key]), (1000 * key + self.turns[key],), limit)
        return [(key, self.running[key]) for key in ready]

    def put(self, key: int, completion: Completion) -> None:
        self.log.append((key, self.running.pop(key), completion))
        self.prompts[key] += [*completion.token_ids, 7, 8]
        self.turns[key] += 1
        if self.turns[key] < len(self.limits[key]):
            self.ready.append(key)


def test_requests_of_a_source_are_sampled_as_by_themselves(engine: RolloutEngine) -> None:
    source = Growing([[3, 9, 2], [12], [1, 1, 1, 8], [5, 5]])
    generate_from(engine, source, SAMPLING)
    assert not source.running
    assert [sum(key == of for of, _, _ in source.log) for key in range(4)] == [3, 1, 4, 2]
    for _, request, completion in source.log:
        assert request.max_tokens is not None and len(completion.token_ids) <= request.max_tokens
        alone = engine.generate([request], SAMPLING)[0][0]
        assert alone.token_ids == completion.token_ids and alone.finish_reason == completion.finish_reason
        assert alone.logprobs == pytest.approx(completion.logprobs, abs=2e-5)


def test_a_limit_of_its_own_cuts_a_completion_and_changes_no_token(engine: RolloutEngine) -> None:
    prompt = (3, 10, 20, 30)
    whole = engine.generate([RolloutRequest(prompt, (4,))], SAMPLING)[0][0]
    cut, other = engine.generate([RolloutRequest(prompt, (4,), 5), RolloutRequest(prompt, (9,), 17)], SAMPLING)
    assert len(whole.token_ids) > 5 and cut[0].token_ids == whole.token_ids[:5]
    assert cut[0].logprobs == pytest.approx(whole.logprobs[:5], abs=2e-5) and cut[0].finish_reason == "length"
    assert 5 < len(other[0].token_ids) <= 17


def test_what_would_come_after_a_limit_changes_nothing(engine: RolloutEngine) -> None:
    """Of 200 completions that are sampled beside a longer one, some would end after their limit."""
    prompt = (3, 10, 20, 30)
    requests = [RolloutRequest(prompt, tuple(range(200)), 1), RolloutRequest(prompt, (500,), 40)]
    short, _ = engine.generate(requests, SAMPLING)
    whole = engine.generate([RolloutRequest(prompt, tuple(range(200)))], SAMPLING)[0]
    assert [one.token_ids for one in short] == [one.token_ids[:1] for one in whole]
    assert sum(1 < len(one.token_ids) < 40 for one in whole) > 3


def test_a_turn_that_is_ready_does_not_wait_for_others(engine: RolloutEngine) -> None:
    source = Growing([[40], [1, 1, 1, 1]])
    generate_from(engine, source, SAMPLING)
    order = [key for key, _, _ in source.log]
    if isinstance(engine, ContinuousEngine):
        assert order == [1, 1, 1, 1, 0]  # four turns while the first dialogue's only turn is sampled
        assert source.taken[0] == (True, 2) and source.taken[-1] == (True, 0)
        assert {wait for wait, _ in source.taken[1:-1]} == {False}
    else:
        assert order == [0, 1, 1, 1, 1] and [count for _, count in source.taken] == [2, 1, 1, 1, 0]


def test_after_an_error_the_engine_is_as_before(engine: RolloutEngine) -> None:
    class Failing(Growing):
        def put(self, key: int, completion: Completion) -> None:
            raise RuntimeError("a tool")

    with pytest.raises(RuntimeError, match="a tool"):
        generate_from(engine, Failing([[1], [30]]), SAMPLING)
    too_long = Growing([[300]])
    with pytest.raises(UserError, match="prompt and completion together may have 256 tokens"):
        generate_from(engine, too_long, SAMPLING)
    engine.sync(PolicyWeights(1, None, 1.0))  # vLLM refuses it while a request runs
    source = Growing([[4]])
    generate_from(engine, source, SAMPLING)
    assert len(source.log) == 1


def test_waiting_requests_are_admitted_several_at_a_time() -> None:
    """A step with a prefill has no full CUDA graph."""
    source = BatchSource([RolloutRequest((5,), tuple(range(30)), 7), RolloutRequest((6,), (40, 41))], max_num_seqs=16)
    first = source.take(wait=True)
    assert [(key, request.prompt_ids, request.seeds, request.max_tokens) for key, request in first] == [
        (key, (5,), (key,), 7) for key in range(16)
    ]
    answers = {key: Completion((key,), (-1.0,), "stop") for key in range(32)}
    assert source.take(wait=False) == []
    source.put(3, answers[3])
    assert source.take(wait=False) == []  # room for one of 16
    source.put(0, answers[0])
    assert [key for key, _ in source.take(wait=False)] == [16, 17]
    for key in {*range(18)} - {0, 3}:
        source.put(key, answers[key])
    last = source.take(wait=True)  # nothing runs
    assert [(key, request.prompt_ids, request.seeds) for key, request in last[-3:]] == [
        (29, (5,), (29,)),
        (30, (6,), (40,)),
        (31, (6,), (41,)),
    ]
    for key in range(18, 32):
        source.put(key, answers[key])
    assert list(source.take(wait=True)) == [] and source.completions == list(answers.values())
    few = BatchSource([RolloutRequest((5,), (0, 1))], max_num_seqs=1)
    assert [key for key, _ in few.take(wait=True)] == [0]
    few.put(0, answers[0])
    assert [key for key, _ in few.take(wait=True)] == [1]


def test_vllm_processes_a_request_once_with_all_its_tokens() -> None:
    def output(name: str, token: int, finish: str | None = None, first: int | None = None) -> Any:
        ids = np.array([[token if first is None else first, 99]])
        logprobs = SimpleNamespace(logprob_token_ids=ids, logprobs=np.array([[-token / 4, -9.0]], dtype=np.float32))
        return SimpleNamespace(request_id=name, new_token_ids=[token], new_logprobs=logprobs, finish_reason=finish)

    calls: list[list[str]] = []

    def process(outputs: Sequence[Any], timestamp: float = 0.0) -> Any:
        assert timestamp == 1.5 and all(one.new_logprobs is None for one in outputs)
        calls.append([one.request_id for one in outputs])
        flat = [SimpleNamespace(token_ids=[], logprobs=[]) for _ in outputs]
        found = [
            SimpleNamespace(token_ids=one.new_token_ids, logprobs=lists, finish_reason=one.finish_reason)
            for one, lists in zip(outputs, flat, strict=True)
        ]
        return SimpleNamespace(request_outputs=[SimpleNamespace(outputs=[one]) for one in found])

    processor = type("Processor", (), {"process_outputs": staticmethod(process)})()
    with processed_once(processor):
        steps = [
            [output("a", 1), output("b", 2)],
            [output("a", 3), output("b", 4, "length")],
            [output("a", 5, "stop"), output("b", 6), output("c", 7, "stop", first=8)],
        ]
        done = [processor.process_outputs(step, timestamp=1.5).request_outputs for step in steps]
    assert calls == [[], ["b"], ["a", "c"]]
    (b,), (a, c) = done[1:]
    assert completion_of(b.outputs[0]) == Completion((2, 4), (-0.5, -1.0), "length")
    assert completion_of(a.outputs[0]) == Completion((1, 3, 5), (-0.25, -0.75, -1.25), "stop")
    with pytest.raises(RuntimeError, match="it gave others'"):
        completion_of(c.outputs[0])
    with processed_once(processor):  # nothing is left of b, which was not at its end
        (again,) = processor.process_outputs([output("b", 4, "stop")], timestamp=1.5).request_outputs
    assert again.outputs[0].token_ids == [4] and "process_outputs" not in vars(processor)


def fake_engine(block_sizes: Sequence[int], calls: list[tuple[str, int]]) -> tuple[Any, Any]:
    """vLLM's engine with a KV cache manager that records its calls, and that manager."""

    def allocate_slots(self: Any, request: Any, num_new_tokens: int, **_: Any) -> str:
        calls.append((request.request_id, num_new_tokens))
        return "new blocks"

    managers = [SimpleNamespace(block_size=size) for size in block_sizes]
    manager = type("Manager", (), {"allocate_slots": allocate_slots})()
    manager.coordinator, manager.empty_kv_cache_blocks = SimpleNamespace(single_type_managers=managers), "no blocks"
    core = SimpleNamespace(scheduler=SimpleNamespace(kv_cache_manager=manager))
    return SimpleNamespace(engine_core=SimpleNamespace(engine_core=core)), manager


@pytest.mark.parametrize("groups", [1, 2])
def test_vllm_allocates_at_the_first_token_of_a_block(groups: int) -> None:
    calls: list[tuple[str, int]] = []
    engine, manager = fake_engine([16] * groups, calls)

    def allocate(name: str, computed: int, new: int = 1, **more: Any) -> str:
        request = SimpleNamespace(request_id=name, num_computed_tokens=computed)
        blocks: str = manager.allocate_slots(request, new, num_lookahead_tokens=0, **more)
        return blocks

    with allocated_by_block(engine):
        allocated = [
            allocate("first of a block", 32),
            allocate("within a block", 33),
            allocate("prefill", 33, new=2),
            allocate("waiting", 33, new_computed_blocks=1),
        ]
    within = "no blocks" if groups == 1 else "new blocks"
    assert allocated == ["new blocks", within, "new blocks", "new blocks"]
    delegated = ["within a block"] if groups > 1 else []
    assert [name for name, _ in calls] == ["first of a block", *delegated, "prefill", "waiting"]
    assert "allocate_slots" not in vars(manager)


@pytest.mark.vllm
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_completions_are_the_same_where_requests_are_preempted_for_memory(
    tiny_policy_dir: Path, prefix_caching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight requests of two blocks of 128 tokens each: 32 MiB hold them, 4 MiB do not."""
    drawn = torch.randint(10, 500, (8, 120), generator=torch.Generator().manual_seed(3)).tolist()
    requests = [RolloutRequest(tuple(row), (index,)) for index, row in enumerate(drawn)]
    token_ids, preemptions = [], 0
    for gib, by_block in ((32 / 1024, False), (4 / 1024, True)):
        engine = VLLMEngine(kv_cache_gib=gib, max_num_seqs=8, prefix_caching=prefix_caching)
        engine.launch(EngineSpec(tiny_policy_dir, torch.float32, torch.device("cpu"), 0, (), 256))
        engine.sync(PolicyWeights(0, None, 1.0))
        assert engine._llm is not None
        scheduler: Any = engine._llm.llm_engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
        preempt = scheduler._preempt_request

        def counted(*args: Any, preempt: Any = preempt, **settings: Any) -> Any:
            nonlocal preemptions
            preemptions += 1
            return preempt(*args, **settings)

        scheduler._preempt_request = counted
        with monkeypatch.context() as plain:
            if not by_block:
                plain.setattr("qerl_pl.engines.vllm.engine.allocated_by_block", lambda _: nullcontext())
            token_ids.append([group[0].token_ids for group in engine.generate(requests, SAMPLING)])
        assert bool(preemptions) is by_block
        engine.close()
    assert token_ids[0] == token_ids[1]
