"""One contract for every engine, against plain transformers and PEFT on the same ids."""

import io
import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from jsonargparse import ArgumentParser
from peft import LoraConfig, PeftModel, get_peft_model
from qerl_kernels import select_backend, selected_backend
from qerl_kernels.reference import nvfp4_global_scale, quantize_nvfp4
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from qerl_pl.algorithm.noise import NormNoise
from qerl_pl.engines import EngineSpec, RolloutEngine, TransformersEngine, VLLMEngine
from qerl_pl.engines.base import check_requests
from qerl_pl.engines.transformers import pick_tokens, sampling_log_probs
from qerl_pl.engines.vllm import worker as vllm_worker
from qerl_pl.engines.vllm.linear_methods import check_marlin_shapes
from qerl_pl.engines.vllm.requests import request_params
from qerl_pl.engines.vllm.startup import vllm_errors_as_user_errors
from qerl_pl.errors import UserError
from qerl_pl.formats.dense_checkpoint import iterate_dense, write_dense_checkpoint
from qerl_pl.types import Completion, PolicyWeights, RolloutRequest, SamplingConfig

VOCAB, EOS, RANK, ALPHA, MAX_TOKENS = 256, 1, 8, 16, 192
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROMPTS = [
    (5, 9, 200),
    tuple(range(20, 60)),
    (7,),
    (31, 77, 12, 250, 4, 4, 90),
    tuple(range(10, 150)),  # longer than a block of vLLM's prefix cache
]
GREEDY = SamplingConfig(max_tokens=24, temperature=0.0)
LOGPROB_BOUND = 2e-5  # float32; measured 3e-6
ENGINES = ["transformers", *(pytest.param(name, marks=pytest.mark.vllm) for name in ("vllm", "vllm-merged"))]
QUICK = [*ENGINES[:2], pytest.param("vllm-merged", marks=[pytest.mark.vllm, pytest.mark.nightly])]


def make_engine(kind: str) -> RolloutEngine:
    if kind == "transformers":
        return TransformersEngine(max_batch=16)
    adapter: Literal["fused", "merged"] = "merged" if kind == "vllm-merged" else "fused"
    return VLLMEngine(kv_cache_gib=0.25, max_num_seqs=16, max_num_batched_tokens=192, adapter=adapter)


def spec_of(base: Path, dtype: torch.dtype = torch.float32) -> EngineSpec:
    return EngineSpec(base, dtype, torch.device("cpu"), RANK, TARGETS, MAX_TOKENS)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Qwen2 whose random weights are large enough that every part of it shows in the output."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        eos_token_id=EOS,
        bos_token_id=None,
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.15 if "lm_head" in name else 0.08)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.1)
    folder = tmp_path_factory.mktemp("engines") / "base"
    model.save_pretrained(folder)
    words = {f"w{index}": index for index in range(VOCAB)}
    words = {"<pad>": 0, "<eos>": EOS} | {word: index for word, index in words.items() if index > 1}
    core = Tokenizer(WordLevel(words, unk_token="<pad>"))
    core.pre_tokenizer = WhitespaceSplit()
    special = {
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "extra_special_tokens": [f"w{n}" for n in range(2, VOCAB, 2)],
    }
    PreTrainedTokenizerFast(tokenizer_object=core, **special).save_pretrained(folder)
    # Mistral's repositories have the weights in a second layout, too, which vLLM would take.
    names = dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    save_file({"output.weight": torch.zeros(1)}, folder / "consolidated.safetensors")
    (folder / "params.json").write_text(json.dumps({"dim": 128, "n_layers": 2}))
    return folder


@pytest.fixture(scope="module")
def reference(base: Path) -> PeftModel:
    """The same model by transformers and PEFT, its adapter's B not zero."""
    model = Qwen2ForCausalLM.from_pretrained(base, dtype=torch.float32)
    peft = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(TARGETS)))
    randomize(peft, seed=1)
    return peft.eval()


def randomize(peft: PeftModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.06)


def weights_of(peft: PeftModel, version: int = 1) -> PolicyWeights:
    """What a trainer that holds this PEFT model would hand the engine."""
    adapter = {
        name.removeprefix("base_model.model."): (module.lora_A["default"].weight, module.lora_B["default"].weight)
        for name, module in peft.named_modules()
        if hasattr(module, "lora_A")
    }
    return PolicyWeights(version, {k: (a.detach(), b.detach()) for k, (a, b) in adapter.items()}, ALPHA / RANK)


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, base: Path) -> Iterator[RolloutEngine]:
    made = make_engine(request.param)
    made.launch(spec_of(base))
    assert made.shared_weights() is None
    yield made
    made.close()


def requests_of(prompts: list[tuple[int, ...]], samples: int = 1) -> list[RolloutRequest]:
    return [RolloutRequest(prompt, tuple(1000 * i + j for j in range(samples))) for i, prompt in enumerate(prompts)]


def greedy(engine: RolloutEngine) -> list[Completion]:
    return [group[0] for group in engine.generate(requests_of(PROMPTS), GREEDY)]


@pytest.mark.parametrize("name", ["TransformersEngine", "VLLMEngine"])
def test_a_yaml_file_can_name_the_engine(name: str) -> None:
    parser = ArgumentParser(exit_on_error=False)  # compares every method's signature with the protocol's
    parser.add_argument("--engine", type=RolloutEngine)
    found = parser.parse_args([f"--engine=qerl_pl.engines.{name}"])
    assert found.engine.class_path == f"qerl_pl.engines.{name}"


def test_memory_is_that_of_the_weights_the_adapter_and_the_cache(engine: RolloutEngine, reference: PeftModel) -> None:
    sizes, linears = {"weights": 0.0, "adapter": 0.0}, 0.0
    for name, parameter in reference.named_parameters():
        sizes["adapter" if "lora_" in name else "weights"] += parameter.nbytes / 2**30
        linears += parameter.nbytes / 2**30 if name.endswith("base_layer.weight") else 0.0
    if isinstance(engine, VLLMEngine):  # B of q, k, v and of gate, up in blocks, zeros between: 24576 for 16384 numbers
        sizes["adapter"] *= 1.5
    found = dict(engine.memory_gib())
    copies = linears if getattr(engine, "adapter", None) == "merged" else 0.0
    assert found.pop("merged", 0.0) == pytest.approx(copies)
    assert found.pop("kv_cache", 0.25) == pytest.approx(0.25, rel=0.05)
    assert found.pop("releasable", 0.0) == found.pop("released", 0.0) == 0.0  # on a CPU no engine sleeps
    expected = sum(sizes.values()) if "weights" in found else sizes["adapter"]  # vLLM's CPU build hides its weights
    assert expected <= sum(found.values()) < 1.2 * expected  # rotary tables and copies of the norms besides


@torch.no_grad()
def teacher_forced(model: nn.Module, prompt: tuple[int, ...], completion: Completion) -> Tensor:
    """Logits [tokens, V] that the model gives before each token of the completion."""
    ids = torch.tensor([prompt + completion.token_ids])
    return model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()


def logprob_gap(model: nn.Module, completions: list[Completion]) -> float:
    """Largest difference between the engine's log-probabilities and the model's, over all tokens."""
    gaps = []
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        expected = teacher_forced(model, prompt, completion).log_softmax(-1)
        expected = expected.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        gaps.append((expected - torch.tensor(completion.logprobs)).abs().max().item())
    return max(gaps)


def generate_with_transformers(model: nn.Module) -> list[tuple[int, ...]]:
    out = []
    for prompt in PROMPTS:
        ids = model.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=GREEDY.max_tokens,
            do_sample=False,
        )
        out.append(tuple(ids[0, len(prompt) :].tolist()))
    return out


def test_greedy_tokens_and_logprobs_follow_every_adapter_that_is_synced(
    engine: RolloutEngine, reference: PeftModel
) -> None:
    seen = []
    for seed in (1, 2):
        randomize(reference, seed)
        noise_std = engine.sync(weights_of(reference, version=seed))
        completions = greedy(engine)
        seen.append([completion.token_ids for completion in completions])
        assert seen[-1] == generate_with_transformers(reference)
        assert logprob_gap(reference, completions) < LOGPROB_BOUND
        assert noise_std == 0.0
    assert seen[0] != seen[1]
    engine.sync(replace(weights_of(reference), adapter=None))
    with reference.disable_adapter():
        completions = greedy(engine)
        assert [completion.token_ids for completion in completions] == generate_with_transformers(reference)
        assert logprob_gap(reference, completions) < LOGPROB_BOUND
    assert logprob_gap(reference, completions) > 0.1, "the adapter must matter, or this test shows nothing"


def test_the_engine_keeps_no_reference_to_the_trainers_tensors(engine: RolloutEngine, reference: PeftModel) -> None:
    randomize(reference, 1)
    engine.sync(weights_of(reference))
    before = greedy(engine)
    randomize(reference, 2)  # in place, as an optimizer does
    assert greedy(engine) == before


def test_noise_changes_the_sampler_never_adds_up_and_leaves_no_trace(
    engine: RolloutEngine, reference: PeftModel
) -> None:
    clean = weights_of(reference)
    noise = NormNoise(sigma=0.05, seed=3, version=1)
    noisy = replace(clean, noise=noise)
    engine.sync(clean)
    first = greedy(engine)
    engine.sync(noisy)
    perturbed = greedy(engine)
    noise_std = engine.sync(noisy)
    assert greedy(engine) == perturbed
    assert noise_std == pytest.approx(0.05, rel=0.1)  # 512 numbers
    assert perturbed != first
    layers = reference.get_submodule("base_model.model")
    norms = {name: m.weight.detach() for name, m in layers.named_modules() if name.endswith("layernorm")}
    assert len(norms) == 4
    with norms_of(reference, {name: scale + noise.draw(name, 128) for name, scale in norms.items()}):
        assert logprob_gap(reference, perturbed) < LOGPROB_BOUND
    engine.sync(clean)
    assert greedy(engine) == first


def test_noise_relative_to_the_trained_scales(engine: RolloutEngine, reference: PeftModel) -> None:
    names = [f"model.layers.{layer}.{norm}" for layer in (0, 1) for norm in NOISY]
    trained = {name: torch.linspace(0.2, 2.0 + index, 128) for index, name in enumerate(names)}
    plain, expected = NormNoise(sigma=0.05, seed=3, version=1), dict(trained)
    for name in names:
        rms = math.sqrt(sum(x * x for x in trained[name].tolist()) / 128)
        expected[name] = trained[name] + plain.draw(name, 128) * rms
    weights = replace(weights_of(reference), tensors={f"{name}.weight": scale for name, scale in trained.items()})
    noise_std = engine.sync(replace(weights, noise=replace(plain, relative=True)))
    differences = [expected[name] - trained[name] for name in names if not torch.equal(expected[name], trained[name])]
    assert noise_std == pytest.approx(torch.cat(differences).std(correction=0).item(), rel=1e-4)
    with norms_of(reference, expected):
        assert logprob_gap(reference, greedy(engine)) < LOGPROB_BOUND
    engine.sync(weights_of(reference))
    assert logprob_gap(reference, greedy(engine)) < LOGPROB_BOUND


@pytest.fixture(scope="module", params=QUICK)
def half_engine(request: pytest.FixtureRequest, base: Path) -> Iterator[RolloutEngine]:
    made = make_engine(request.param)
    made.launch(spec_of(base, torch.bfloat16))
    yield made
    made.close()


def test_small_noise_is_really_there_in_a_bfloat16_model(half_engine: RolloutEngine, reference: PeftModel) -> None:
    clean = weights_of(reference)
    half_engine.sync(clean)
    first = greedy(half_engine)
    for stage in range(10):
        sigma = 1e-2 * 10 ** (-2 * stage / 9)
        draws = [NormNoise(sigma, 0, stage).draw(f"model.layers.{i}.{n}", 128) for i in (0, 1) for n in NOISY]
        noise_std = half_engine.sync(replace(clean, noise=NormNoise(sigma, seed=0, version=stage)))
        assert noise_std == pytest.approx(torch.cat(draws).std().item(), rel=0.01)
        assert noise_std == pytest.approx(sigma, rel=0.1)  # 512 numbers
        changed = greedy(half_engine)
        assert any(a.logprobs != b.logprobs for a, b in zip(first, changed, strict=True)), sigma
    half_engine.sync(clean)
    assert greedy(half_engine) == first


NOISY = ("input_layernorm", "post_attention_layernorm")


def test_trained_norms_reach_the_sampler_and_carry_the_noise(engine: RolloutEngine, reference: PeftModel) -> None:
    """The final norm is trained too, though it is never noisy."""
    trained = {
        name.removeprefix("base_model.model."): module.weight.detach() * 1.25
        for name, module in reference.named_modules()
        if name.endswith(("layernorm", "model.norm"))
    }
    noise = NormNoise(sigma=0.02, seed=5, version=1)
    weights = replace(weights_of(reference), tensors={f"{name}.weight": scale for name, scale in trained.items()})
    engine.sync(weights)
    with norms_of(reference, trained):
        assert logprob_gap(reference, greedy(engine)) < LOGPROB_BOUND
    noise_std = engine.sync(replace(weights, noise=noise))
    noisy = {name: scale + noise.draw(name, 128) for name, scale in trained.items() if name.endswith("layernorm")}
    with norms_of(reference, trained | noisy):
        assert logprob_gap(reference, greedy(engine)) < LOGPROB_BOUND
    assert noise_std == pytest.approx(0.02, rel=0.1)
    engine.sync(weights_of(reference))
    assert logprob_gap(reference, greedy(engine)) < LOGPROB_BOUND


@contextmanager
def norms_of(peft: PeftModel, norms: dict[str, Tensor]) -> Iterator[None]:
    """Inside the block these norms have other scales."""
    weights = {name: peft.get_submodule(f"base_model.model.{name}").weight.data for name in norms}
    kept = {name: weight.clone() for name, weight in weights.items()}
    for name, scale in norms.items():
        weights[name].copy_(scale)
    try:
        yield
    finally:
        for name, weight in weights.items():
            weight.copy_(kept[name])


def test_seeds_repeat_whatever_else_is_in_the_batch(engine: RolloutEngine, reference: PeftModel) -> None:
    engine.sync(weights_of(reference))
    sampling = SamplingConfig(max_tokens=12)
    together = engine.generate(requests_of(PROMPTS, samples=6), sampling)
    assert [len(group) for group in together] == [6] * 5
    assert [[c.token_ids for c in group] for group in engine.generate(requests_of(PROMPTS, samples=6), sampling)] == [
        [c.token_ids for c in group] for group in together
    ]
    assert len({completion.token_ids for completion in together[0]}) > 3, "different seeds must differ"
    alone = engine.generate([RolloutRequest(PROMPTS[1], (1004, 1001))], sampling)[0]
    for found, expected in zip(alone, (together[1][4], together[1][1]), strict=True):
        assert found.token_ids == expected.token_ids
        assert found.logprobs == pytest.approx(expected.logprobs, abs=LOGPROB_BOUND)


def test_a_batch_larger_than_the_engine_takes_at_once_gives_the_same_samples(
    engine: RolloutEngine, reference: PeftModel
) -> None:
    engine.sync(weights_of(reference))
    sampling = SamplingConfig(max_tokens=4)
    requests = [RolloutRequest(tuple(range(2 + i, 50 + 2 * i % 37)), (i, 100 + i)) for i in range(20)]
    together = engine.generate(requests, sampling)
    alone = [engine.generate([request], sampling)[0] for request in requests]
    assert [[c.token_ids for c in group] for group in together] == [[c.token_ids for c in group] for group in alone]


FILTERS = [
    SamplingConfig(max_tokens=6, temperature=0.7),
    SamplingConfig(max_tokens=6, temperature=1.3, top_k=5),
    SamplingConfig(max_tokens=6, top_p=0.6),
    SamplingConfig(max_tokens=6, min_p=0.2),
    SamplingConfig(max_tokens=6, temperature=0.8, top_p=0.8, top_k=7, min_p=0.05),
]


@pytest.mark.parametrize("sampling", FILTERS)
def test_logprobs_are_of_the_filtered_distribution(
    engine: RolloutEngine, reference: PeftModel, sampling: SamplingConfig
) -> None:
    engine.sync(weights_of(reference))
    groups = engine.generate(requests_of(PROMPTS, samples=4), sampling)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            for logits, token, logprob in zip(
                teacher_forced(reference, prompt, completion), completion.token_ids, completion.logprobs, strict=True
            ):
                expected = filtered_by_hand(logits.tolist(), sampling)
                assert token in expected
                assert logprob == pytest.approx(math.log(expected[token]), abs=1e-4)


def filtered_by_hand(logits: list[float], sampling: SamplingConfig) -> dict[int, float]:
    """Token -> probability by plain loops, in the order temperature, min-p, top-k, top-p."""
    top = max(logits)
    odds = {token: math.exp((logit - top) / sampling.temperature) for token, logit in enumerate(logits)}
    odds = {token: value for token, value in odds.items() if value >= sampling.min_p}
    ranked = sorted(odds, key=lambda token: -odds[token])[: sampling.top_k or None]
    total = sum(odds[token] for token in ranked)
    kept, mass = [], 0.0
    for token in ranked:
        if mass < sampling.top_p:
            kept.append(token)
        mass += odds[token] / total
    total = sum(odds[token] for token in kept)
    return {token: odds[token] / total for token in kept}


def test_tokens_come_as_often_as_their_probability(engine: RolloutEngine, reference: PeftModel) -> None:
    """The first token, and the second after each first one: a stream that repeated itself would tie them together."""
    engine.sync(weights_of(reference))
    sampling = SamplingConfig(max_tokens=2, top_k=3)
    completions = engine.generate([RolloutRequest(PROMPTS[0], tuple(range(900)))], sampling)[0]
    by_first: dict[int, list[Completion]] = {}
    for completion in completions:
        by_first.setdefault(completion.token_ids[0], []).append(completion)
    assert len(by_first) == 3
    check_frequencies([(c.token_ids[0], c.logprobs[0]) for c in completions])
    for group in by_first.values():
        check_frequencies([(c.token_ids[1], c.logprobs[1]) for c in group])


def check_frequencies(draws: list[tuple[int, float]]) -> None:
    """Tokens drawn from one distribution, with the log-probability each was reported to have."""
    expected = {token: math.exp(logprob) for token, logprob in draws}
    for token, probability in expected.items():
        count = sum(drawn == token for drawn, _ in draws)
        assert abs(count / len(draws) - probability) < 4 * math.sqrt(probability * (1 - probability) / len(draws))


def test_random_numbers_at_the_ends_pick_tokens_of_positive_probability() -> None:
    log_probs = torch.tensor([[-math.inf, 0.0, 0.0, -math.inf]])  # two halves, exact whatever rounds logarithms
    for uniform, token in ((0.0, 1), (0.4999, 1), (0.5, 2), (1 - 2**-53, 2)):
        assert pick_tokens(log_probs, torch.tensor([uniform], dtype=torch.float64)).tolist() == [token]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.1}])
def test_logits_that_are_not_finite_are_told_by_the_log_probability(
    value: float, everywhere: bool, settings: dict[str, Any]
) -> None:
    logits = torch.tensor([[0.5, -1.0, 2.0, 0.0]] * 3)
    logits[1, slice(None) if everywhere else 2] = value
    log_probs = sampling_log_probs(logits, SamplingConfig(**settings))
    uniform = None if "temperature" in settings else torch.tensor([0.3, 0.9999, 0.3], dtype=torch.float64)
    tokens = pick_tokens(log_probs, uniform)
    found = log_probs.gather(1, tokens[:, None])[:, 0]
    impossible = value == -math.inf and not everywhere  # a token alone that is never sampled
    assert found.isfinite().tolist() == [True, impossible, True] and tokens[0] == tokens[2]


def test_completions_end_at_the_end_token_a_stop_string_or_the_limit(
    engine: RolloutEngine, reference: PeftModel
) -> None:
    engine.sync(weights_of(reference))
    sampling = SamplingConfig(max_tokens=40, temperature=2.0)
    group = engine.generate([RolloutRequest(PROMPTS[0], tuple(range(150)))], sampling)[0]
    stopped = [completion for completion in group if not completion.truncated]
    assert stopped and len(stopped) < len(group)
    for completion in group:
        assert EOS not in completion.token_ids[:-1]
        assert (completion.token_ids[-1] == EOS) == (completion.finish_reason == "stop")
        assert len(completion.token_ids) == len(completion.logprobs) <= 40
        assert completion.truncated == (len(completion.token_ids) == 40 and completion.token_ids[-1] != EOS)
        # Also for those that go on after others have ended:
        expected = (teacher_forced(reference, PROMPTS[0], completion) / 2).log_softmax(-1)
        expected = expected.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert completion.logprobs == pytest.approx(expected.tolist(), abs=LOGPROB_BOUND)
    free = greedy(engine)[1].token_ids
    word = next(i for i in range(3, len(free)) if free[i] not in free[:i])
    asked = replace(GREEDY, stop=("no such", f"w{free[word]}"))
    completion = engine.generate([RolloutRequest(PROMPTS[1], (0,))], asked)[0][0]
    assert completion.token_ids == free[: word + 1]
    assert completion.finish_reason == "stop"


def test_a_stop_string_may_be_a_special_token(engine: RolloutEngine, reference: PeftModel) -> None:
    engine.sync(weights_of(reference))
    free = greedy(engine)[1].token_ids
    assert {token % 2 for token in free[:10]} == {0, 1}  # every second word is special
    for word in free[:10]:
        asked = replace(GREEDY, stop=(f"w{word}",))
        (completion,) = engine.generate([RolloutRequest(PROMPTS[1], (0,))], asked)[0]
        end = next(index for index, token in enumerate(free) if f"w{token}".startswith(asked.stop[0]))
        assert (completion.token_ids, completion.finish_reason) == (free[: end + 1], "stop")


def test_prompts_that_cannot_be_continued_are_refused(engine: RolloutEngine, reference: PeftModel) -> None:
    engine.sync(weights_of(reference))
    with pytest.raises(UserError, match="prompt 1 of the batch has none"):
        engine.generate(requests_of([(5,), ()]), GREEDY)
    with pytest.raises(UserError, match="may have 192 tokens; prompt 0 of the batch has 169"):
        engine.generate(requests_of([(5,) * 169]), GREEDY)
    longest = engine.generate(requests_of([(5,) * 168]), GREEDY)[0][0]
    assert len(longest.token_ids) == 24 or longest.token_ids[-1] == EOS


def test_stop_strings_are_refused_without_a_tokenizer(base: Path) -> None:
    asked = replace(GREEDY, stop=("w7",))
    check_requests(requests_of(PROMPTS), asked, spec_of(base), has_tokenizer=True)
    check_requests(requests_of(PROMPTS), GREEDY, spec_of(base), has_tokenizer=False)
    with pytest.raises(UserError, match=f"stop strings need a tokenizer; {base} has none"):
        check_requests(requests_of(PROMPTS), asked, spec_of(base), has_tokenizer=False)


def test_sleep_and_wake_change_nothing(engine: RolloutEngine, reference: PeftModel) -> None:
    randomize(reference, 1)
    engine.sync(weights_of(reference))
    before = greedy(engine)
    for _ in range(2):
        engine.sleep()
        engine.wake()
        engine.wake()
    engine.sync(weights_of(reference))
    assert greedy(engine) == before


def test_an_adapter_that_does_not_fit_is_refused(engine: RolloutEngine, reference: PeftModel) -> None:
    weights = weights_of(reference)
    name = "model.layers.0.self_attn.q_proj"
    assert weights.adapter is not None
    with pytest.raises(UserError, match="it also has model.layers.7.mlp"):
        engine.sync(replace(weights, adapter=dict(weights.adapter) | {"model.layers.7.mlp": weights.adapter[name]}))
    wide = (torch.zeros(2 * RANK, 128), torch.zeros(128, 2 * RANK))
    with pytest.raises(UserError, match="the same rank"):
        engine.sync(replace(weights, adapter=dict(weights.adapter) | {name: wide}))


@pytest.mark.parametrize("kind", ENGINES)
def test_targets_are_ends_of_names(kind: str, base: Path) -> None:
    """As the trainer's and PEFT's: qualified by the block or the layer, too."""
    targets = ("self_attn.v_proj", "layers.1.mlp.down_proj")
    model = Qwen2ForCausalLM.from_pretrained(base, dtype=torch.float32)
    peft = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(targets))).eval()
    randomize(peft, seed=1)
    engine = make_engine(kind)
    engine.launch(replace(spec_of(base), lora_targets=targets))
    engine.sync(weights_of(peft))
    completions = greedy(engine)
    assert logprob_gap(peft, completions) < LOGPROB_BOUND
    with peft.disable_adapter():
        assert logprob_gap(peft, completions) > 0.1
    engine.close()


@pytest.mark.parametrize("kind", ENGINES)
def test_targets_that_match_nothing_are_refused(kind: str, base: Path) -> None:
    there = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj$"
    with pytest.raises(UserError, match=f"c_attn match none: choose model.policy.lora.targets among {there}"):
        make_engine(kind).launch(replace(spec_of(base), lora_targets=("c_attn",)))


def test_settings_that_cannot_hold_one_sequence_are_refused(base: Path) -> None:
    """One token takes 2 * 2 layers * 1 head * 64 * 4 bytes = 1024 bytes, so 192 tokens and 32 to spare take 224 KiB."""
    with pytest.raises(UserError, match=r"one sequence of 192 tokens, at least 0\.0002136 GiB"):
        VLLMEngine(kv_cache_gib=223 / 2**20).launch(spec_of(base))
    with pytest.raises(UserError, match="prompt and completion, 192 tokens; got 191"):
        VLLMEngine(max_model_len=191).launch(spec_of(base))
    with pytest.raises(UserError, match="both are set"):
        VLLMEngine(kv_cache_gib=1, gpu_memory_utilization=0.5)


def test_weights_that_marlins_tiles_do_not_cover_are_refused() -> None:
    tiles = {"a.q_proj": (128, 128), "a.k_proj": (32, 128), "a.v_proj": (32, 128), "a.o_proj": (128, 64)}
    check_marlin_shapes(tiles)
    with pytest.raises(UserError, match=r"q_proj\+k_proj\+v_proj of a is 224 x 128"):
        check_marlin_shapes(tiles | {"a.k_proj": (64, 128)})
    with pytest.raises(UserError, match="o_proj of a is 128 x 32"):
        check_marlin_shapes(tiles | {"a.o_proj": (128, 32)})


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("quantized", "backend", "message"),
    [
        (True, "marlin", r"Marlin takes weights that divide .*; q_proj\+k_proj\+v_proj of .* is 64 x 32"),
        (True, "auto", "this is a CPU build, the run asks for cuda"),  # padded: vLLM is asked
        (False, "marlin", "this is a CPU build, the run asks for cuda"),  # not Marlin's
    ],
)
def test_marlins_tiles_bind_only_what_marlin_would_multiply(
    base: Path, tmp_path: Path, quantized: bool, backend: Literal["marlin", "auto"], message: str
) -> None:
    config = json.loads((base / "config.json").read_text())
    config |= {"hidden_size": 32, "num_attention_heads": 2, "head_dim": 16}
    if quantized:
        config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        VLLMEngine(linear_backend=backend).launch(replace(spec_of(tmp_path), device=torch.device("cuda")))


def test_without_vllm_the_engine_says_how_to_get_it(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    for device in ("cpu", "mps"):
        with pytest.raises(UserError, match="needs vLLM; it is not installed"):
            VLLMEngine().launch(replace(spec_of(base), device=torch.device(device)))


@pytest.mark.vllm
def test_what_vllm_cannot_run_is_refused_in_one_line(base: Path) -> None:
    with pytest.raises(UserError, match="this is a CPU build, the run asks for cuda"):
        VLLMEngine().launch(replace(spec_of(base), device=torch.device("cuda")))
    with pytest.raises(UserError, match="refuses the engine's settings: .*max_position_embeddings"):
        VLLMEngine().launch(replace(spec_of(base), max_tokens=300))
    with pytest.raises(UserError, match="lm_head is none: take it out"):
        VLLMEngine().launch(replace(spec_of(base), lora_targets=("q_proj", "lm_head")))
    with pytest.raises(UserError, match=r"refuses the sampling settings: temperature must be in \[0, 2\]"):
        request_params(SimpleNamespace(**vars(SamplingConfig()) | {"temperature": 3.0}), seed=0, ends=())  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"must fit on the GPU; .* \(tried to allocate 9 GiB\): lower kv_cache_gib"):
        with vllm_errors_as_user_errors():
            raise torch.OutOfMemoryError("tried to allocate\n9 GiB")


@pytest.mark.vllm
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vllm_starts_on_the_kernels_that_it_will_sample_with_whatever_the_base(
    dtype: torch.dtype, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm

    found = []

    def start(**settings: Any) -> None:
        found.append(selected_backend())
        raise ValueError("no GPU")

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(vllm, "LLM", start)
    monkeypatch.setattr(vllm_worker, "worker_class", lambda *_: "worker")  # as in a build for GPUs
    select_backend("torch")
    try:
        with pytest.raises(UserError, match="no GPU"):
            VLLMEngine().launch(replace(spec_of(base), device=torch.device("cuda"), dtype=dtype))
    finally:
        select_backend("torch")
    assert found == ["triton"]


@pytest.mark.vllm
def test_vllm_inspects_the_models_class_in_this_process(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm
    from vllm.model_executor.models import registry

    inspected: list[bool] = []

    def start(**settings: Any) -> None:
        inspected.append(registry.ModelRegistry.models["Qwen2ForCausalLM"].inspect_model_cls().is_text_generation_model)
        raise ValueError("inspected")

    monkeypatch.setattr(vllm, "LLM", start)
    monkeypatch.delattr(registry, "_run_in_subprocess")
    monkeypatch.setattr(registry._LazyRegisteredModel, "_load_modelinfo_from_cache", lambda *_: None)
    with pytest.raises(UserError, match="inspected"):
        VLLMEngine().launch(spec_of(base))
    assert inspected == [True]


@pytest.mark.vllm
def test_vllm_starts_where_standard_output_has_no_file_descriptor(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm
    from vllm.utils.system_utils import suppress_stdout

    def start(**settings: Any) -> None:
        with suppress_stdout():  # as its process groups do
            raise ValueError("suppressed")

    monkeypatch.setattr(vllm, "LLM", start)
    with redirect_stdout(io.StringIO()) as notebook:
        with pytest.raises(UserError, match="suppressed"):
            VLLMEngine().launch(spec_of(base))
        assert sys.stdout is notebook


@pytest.fixture(scope="module")
def quantized(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base with NVFP4 linears, in two files, one of which lacks the scales of the other's weights."""
    folder = tmp_path_factory.mktemp("engines") / "nvfp4"
    write_dense_checkpoint(base, folder, torch.float32)
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shards: list[dict[str, Tensor]] = [{}, {}]
    for name, weight in state.items():
        if not name.endswith("_proj.weight"):
            shards[0][name] = weight
            continue
        stem = name.removesuffix(".weight")
        packed = quantize_nvfp4(weight, nvfp4_global_scale(weight))
        shards[0][f"{stem}.weight_packed"] = packed.packed
        shards[1][f"{stem}.weight_scale"] = packed.scale
        shards[1][f"{stem}.weight_global_scale"] = packed.global_scale
    files = [f"model-0000{index}-of-00002.safetensors" for index in (1, 2)]
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, folder / file)
    index = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_an_nvfp4_base_becomes_the_same_dense_model_in_memory_and_on_disk(quantized: Path, base: Path) -> None:
    folder = quantized.parent / "dense"
    assert write_dense_checkpoint(quantized, folder, torch.bfloat16) == folder
    assert sorted(path.name for path in quantized.parent.iterdir()) == ["dense", "nvfp4"], "no temporary folder is left"
    written = Qwen2ForCausalLM.from_pretrained(folder)
    assert written.dtype == torch.bfloat16
    state, original = dict(iterate_dense(quantized, torch.bfloat16)), dict(iterate_dense(base, torch.float32))
    assert set(state) == set(original)
    for name, tensor in state.items():
        assert torch.equal(tensor, written.state_dict()[name]), name
        error = (tensor.float() - original[name]).norm() / original[name].norm()
        assert (0.03 < error < 0.15) if name.endswith("_proj.weight") else error < 3e-3, name


@pytest.mark.parametrize("kind", QUICK)
def test_an_nvfp4_base_is_sampled_with_its_dequantized_weights_and_loaded_without_bars(
    kind: str, quantized: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_PRINT_AUTOTUNING", raising=False)
    folder = write_dense_checkpoint(quantized, quantized.parent / "dense32", torch.float32)
    engine = make_engine(kind)
    engine.launch(spec_of(quantized))
    assert "shards:" not in capfd.readouterr().err  # vLLM's bar; it also has Triton print what it tunes
    assert kind == "transformers" or os.environ["TRITON_PRINT_AUTOTUNING"] == "0"
    engine.sync(PolicyWeights(version=0, adapter=None, scaling=1.0))
    assert logprob_gap(Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32), greedy(engine)) < LOGPROB_BOUND
    engine.close()


def test_a_base_that_is_missing_or_quantized_otherwise_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"folder with a config\.json"):
        TransformersEngine().launch(spec_of(tmp_path))
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"nvfp4, mxfp4, nf4, and 16-bit activations; .* has gptq"):
        TransformersEngine().launch(spec_of(tmp_path))
