"""The toy tasks, their tokenizer, and a small build of the policy."""

import hashlib
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from dialogue_helpers import LocalPool, Talking
from test_dialogue_rollouts import PATTERN, Game
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Tokenizer

from qerl_pl.chat.template import SYSTEM_PROMPT, render_prompt
from qerl_pl.datamodules import GuessingDataModule
from qerl_pl.errors import UserError
from qerl_pl.rollout.dialogue import EnvironmentConfig
from qerl_pl.rollout.dialogue_sampler import DialogueJob, DialogueSampler
from qerl_pl.toy.game import GuessingGame, GuessNumber
from qerl_pl.toy.policy import ToyConfig, build_toy_policy, demonstration_batch, game_demonstrator
from qerl_pl.toy.task import ArithmeticTask, Problem, careful_demonstration, careless_demonstration
from qerl_pl.toy.tokenizer import TOOLS_TEMPLATE, build_tokenizer
from qerl_pl.types import Prompt, RolloutRequest, SamplingConfig

TASKS = [ArithmeticTask(), ArithmeticTask(digits=1, operands=3, seed=4), ArithmeticTask(digits=6, operands=6, seed=9)]
SMALL = ToyConfig(layers=1, intermediate=128, steps=60, batch_size=8)


@pytest.fixture(scope="module")
def tokenizer() -> Qwen2Tokenizer:
    return build_tokenizer()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def small_policy(cache: Path) -> Path:
    return build_toy_policy(SMALL, cache)


def sha256(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize("task", TASKS)
def test_problems_ask_for_the_sum_of_the_numbers_they_name(task: ArithmeticTask) -> None:
    for index in range(100):
        problem = task.problem(index, "train")
        numbers = [int(number) for number in re.findall(r"\d+", problem.question)]
        assert len(numbers) == task.operands and all(len(str(number)) == task.digits for number in numbers)
        assert problem.operands == tuple(numbers) and problem.answer == sum(numbers)


def test_problems_depend_on_seed_split_and_index_only() -> None:
    first = [ArithmeticTask(seed=3).problem(index, "train") for index in range(50)]
    assert first == [ArithmeticTask(seed=3).problem(index, "train") for index in reversed(range(50))][::-1]
    assert len({problem.question for problem in first}) > 45
    assert first != [ArithmeticTask(seed=4).problem(index, "train") for index in range(50)]
    question = "There are 59 books in one box and 49 in another. How many books are there?"
    assert first[0] == Problem(question, (59, 49), 108)  # the same on every machine


def test_splits_share_no_sum_in_any_order_or_under_any_seed() -> None:
    train = {tuple(sorted(ArithmeticTask(seed=0).problem(index, "train").operands)) for index in range(3000)}
    held_out = {tuple(sorted(ArithmeticTask(seed=1).problem(index, "validation").operands)) for index in range(3000)}
    assert not train & held_out
    assert len(held_out) > 500  # of the 4095 pairs, about a fifth


def test_careful_demonstration_by_hand() -> None:
    assert careful_demonstration(Problem("", (47, 38), 85)) == (
        "<think>ones: 7+8=15. tens: 4+3+1=8.</think><answer>85</answer>"
    )
    assert careful_demonstration(Problem("", (199, 299, 805), 1303)) == (
        "<think>ones: 9+9+5=23. tens: 9+9+0+2=20. hundreds: 1+2+8+2=13.</think><answer>1303</answer>"
    )


def test_careless_demonstrations_are_near_and_seldom_right() -> None:
    rng, right = random.Random(0), 0
    for index in range(500):
        problem = ArithmeticTask().problem(index, "train")
        text = careless_demonstration(problem, rng)
        found = re.fullmatch(r"<think>Roughly (\d+)\.</think><answer>(\d+)</answer>", text)
        assert found and abs(int(found[1]) - int(found[2])) <= 5 and abs(int(found[2]) - problem.answer) <= 12
        right += int(found[2]) == problem.answer
    assert 5 <= right <= 40  # 20 expected


def test_tokenizer_knows_digits_tags_and_the_words_of_the_task(tokenizer: Qwen2Tokenizer) -> None:
    assert len(tokenizer) == 512
    assert tokenizer.tokenize("1203") == ["1", "2", "0", "3"]
    tags = "<think></think><answer></answer>"
    assert tokenizer.tokenize(tags) == ["<think>", "</think>", "<answer>", "</answer>"]
    assert tokenizer.decode(tokenizer(tags)["input_ids"], skip_special_tokens=True) == tags
    for index in range(200):
        problem = ArithmeticTask().problem(index, "train")
        assert len(render_prompt(tokenizer, problem.question)) <= 48
        assert len(tokenizer(careful_demonstration(problem))["input_ids"]) <= 32


def test_chat_template_and_prompt(tokenizer: Qwen2Tokenizer) -> None:
    prompt = "<|bos|><|system|>" + SYSTEM_PROMPT + "<|user|>How many?<|assistant|>"
    assert tokenizer.decode(render_prompt(tokenizer, "How many?")) == prompt
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=False)
    assert rendered == "<|bos|><|user|>a<|assistant|>b<|eos|><|user|>c"
    assert tokenizer.decode(render_prompt(tokenizer, "a", None)) == "<|bos|><|user|>a<|assistant|>"


def test_only_completions_are_taught(tokenizer: Qwen2Tokenizer) -> None:
    config = ToyConfig(batch_size=20)
    input_ids, labels = demonstration_batch(config, tokenizer, random.Random(0), step=3)
    careful = 0
    for row, (ids, taught) in enumerate(zip(input_ids, labels, strict=True)):
        problem = config.task.problem(60 + row, "train")
        prompt = render_prompt(tokenizer, problem.question)
        completion = taught[taught != -100].tolist()
        unpadded = ids[: len(prompt) + len(completion)].tolist()
        assert unpadded == prompt + completion
        assert (taught[: len(prompt)] == -100).all() and (taught[len(unpadded) :] == -100).all()
        assert (ids[len(unpadded) :] == tokenizer.pad_token_id).all()
        careful += tokenizer.decode(completion) == careful_demonstration(problem) + "<|eos|>"
    assert 2 <= careful <= 18  # 9 expected


def test_built_policy_loads_and_has_learned_the_format(small_policy: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(small_policy)
    tokenizer = AutoTokenizer.from_pretrained(small_policy)
    assert model.config.model_type == "qwen2" and model.dtype == torch.float32
    linears = [m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "layers" in name]
    assert len(linears) == 7 and all(m.in_features % 128 == 0 == m.out_features % 128 for m in linears)
    assert model.config.vocab_size == len(tokenizer) == 512
    text = "Tom pays $12.50, and <think>a  b</think>\nÜ <answer>7</answer>"
    assert tokenizer(text)["input_ids"] == build_tokenizer()(text)["input_ids"]
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    prompt = render_prompt(tokenizer, ArithmeticTask().problem(0, "validation").question)
    with torch.no_grad():
        probabilities = model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    assert probabilities[tokenizer.convert_tokens_to_ids("<think>")] > 0.9


def test_second_build_is_found_in_the_cache(
    small_policy: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert build_toy_policy(SMALL, cache) == small_policy
    monkeypatch.setenv("QERL_CACHE", str(cache))
    assert build_toy_policy(SMALL) == small_policy
    assert "Teaching" not in capfd.readouterr().err
    assert list(cache.iterdir()) == [small_policy]


def test_seed_decides_the_weights_and_global_random_state_stays(tmp_path: Path) -> None:
    few = {"layers": 1, "intermediate": 128, "steps": 3, "batch_size": 32}
    torch.manual_seed(1)
    before = torch.get_rng_state(), random.getstate()
    threads = torch.get_num_threads()
    first = build_toy_policy(ToyConfig(**few), tmp_path / "first")
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert torch.get_num_threads() == threads
    torch.manual_seed(2)
    torch.set_num_threads(3)
    torch.set_default_dtype(torch.bfloat16)
    try:
        again = build_toy_policy(ToyConfig(**few), tmp_path / "again")
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(torch.float32)
    other = build_toy_policy(ToyConfig(**few, seed=1), tmp_path / "first")
    assert first.name == again.name and sha256(first) == sha256(again)
    assert other != first and sha256(other) != sha256(first)


def test_cache_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("QERL_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="file cannot be locked .*; choose another folder, for models by QERL_CACHE"):
        build_toy_policy(SMALL)


def test_whichever_rank_comes_first_writes_the_whole_policy(tmp_path: Path) -> None:
    distributed.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        folder = build_toy_policy(ToyConfig(layers=1, intermediate=128, steps=1, batch_size=8), tmp_path)
    finally:
        distributed.destroy_process_group()
    assert AutoModelForCausalLM.from_pretrained(folder).config.architectures == ["Qwen2ForCausalLM"]


@pytest.mark.parametrize("module", ["toy.game", "environments.calculator", "environments.search"])
def test_a_worker_imports_an_environment_without_pytorch(module: str) -> None:
    script = f"import sys, qerl_pl.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_the_game_by_hand() -> None:
    game = GuessNumber()
    game.reset("5", id="row")
    assert [game.guess(4), game.guess(6), game.get_reward()] == ["higher", "lower", 0.0] and not game.dialogue_done
    assert game.guess(5) == "found" and game.get_reward() == 1.0 and game.dialogue_done
    game.reset("5")
    assert game.get_reward() == 0.0 and not game.dialogue_done


def test_careful_play_halves_and_careless_play_counts() -> None:
    game = GuessingGame(highest=31, turns=5)
    assert game.play(9, careless=False) == [
        ("guess 16", "lower"),
        ("guess 8", "higher"),
        ("guess 12", "lower"),
        ("guess 10", "lower"),
        ("guess 9", "found"),
    ]
    assert game.play(2, careless=True) == [("guess 1", "higher"), ("guess 2", "found")]
    for number in range(1, 32):
        assert game.play(number, careless=False)[-1] == (f"guess {number}", "found")
        assert (game.play(number, careless=True)[-1][1] == "found") == (number <= 5)


def test_splits_differ_by_names_and_numbers_cover_the_range() -> None:
    game = GuessingGame(highest=7)
    train, held_out = ([game.problem(index, split) for index in range(200)] for split in ("train", "validation"))
    assert not {game.question for game in train} & {game.question for game in held_out}
    assert {game.answer for game in train} == {game.answer for game in held_out} == set(range(1, 8))
    rows = GuessingDataModule(game, train_size=3, batch_size=1).train_rows()
    assert [(row.question, row.reference) for row in rows] == [(game.question, str(game.answer)) for game in train[:3]]


@pytest.mark.parametrize("careless", [False, True])
def test_demonstrations_are_the_tokens_of_a_dialogue(careless: bool) -> None:
    tokenizer, game = build_tokenizer(TOOLS_TEMPLATE), GuessingGame(highest=15, turns=4)
    end, demonstrate = int(tokenizer.eos_token_id), game_demonstrator(game, tokenizer)
    for index in range(20):
        problem = game.problem(index, "train")
        plays = iter(game.play(problem.answer, careless))

        def says(request: RolloutRequest, plays: Any = plays) -> tuple[list[int], bool]:
            return [*tokenizer(next(plays)[0])["input_ids"], end], True

        config = EnvironmentConfig(PATTERN, max_turns=4)
        sampler = DialogueSampler(config, LocalPool(Game), tokenizer, [end], 200)
        job = DialogueJob(Prompt("p", (), problem.question, str(problem.answer)), 0)
        (found,) = sampler.sample(Talking(says), [job], SamplingConfig(max_tokens=200), 0)  # type: ignore[arg-type]
        ids, labels = demonstrate(index, careless)
        assert found.prompt_ids is not None and found.sampled is not None
        assert ids == [*found.prompt_ids, *found.token_ids]
        sampled = [False] * len(found.prompt_ids) + [*found.sampled]
        assert labels == [token if own else -100 for token, own in zip(ids, sampled, strict=True)]


@pytest.mark.parametrize(
    ("kind", "name", "value", "said"),
    [
        *((ArithmeticTask, name, value, "must be .* got") for name in ("digits", "operands") for value in (0, 7)),
        (ArithmeticTask, "operands", 1, "must be .* got 1"),
        (ToyConfig, "width", 192, ""),
        (ToyConfig, "intermediate", 100, ""),
        (ToyConfig, "heads", 3, ""),
        (ToyConfig, "heads", 128, ""),
        (ToyConfig, "layers", 0, ""),
        (ToyConfig, "batch_size", 0, ""),
        (ToyConfig, "careless_fraction", 1.5, ""),
        (GuessingGame, "highest", 1, "must be at least"),
        (GuessingGame, "turns", 0, "must be at least"),
    ],
)
def test_what_is_out_of_range_is_refused(kind: type, name: str, value: float, said: str) -> None:
    with pytest.raises(UserError, match=f"{name}.*{said}"):
        kind(**{name: value})
