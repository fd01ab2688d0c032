"""Word problems of several steps, and the warm-up that teaches a policy to solve some of them."""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from qerl_pl.chat.template import render_prompts
from studies.train_on_4_bits.warm_up import demonstration, examples, padded
from studies.train_on_4_bits.warm_up import main as warm_up
from studies.train_on_4_bits.word_problems import WordProblem, easy_rows, word_problem


def test_word_problems_are_solved_step_by_step() -> None:
    problem = WordProblem(47, (("add", 38), ("take", 12), ("times", 2)), "")
    assert problem.lines == ["47 + 38 = 85.", "85 - 12 = 73.", "73 * 2 = 146."] and problem.answer == 146
    train, test = ([word_problem(0, index, split) for index in range(200)] for split in ("train", "test"))
    assert (
        train
        == [word_problem(0, index, "train") for index in range(200)]
        != [word_problem(1, i, "train") for i in range(200)]
    )
    numbers = [{(one.first, one.steps) for one in problems} for problems in (train, test)]
    assert not numbers[0] & numbers[1] and len(numbers[0]) > 190
    for one in train + test:
        assert len(one.steps) in (2, 3) and one.answer > 0 and [kind for kind, _ in one.steps].count("times") < 2
        assert [str(one.first), *(str(other) for _, other in one.steps)] == re.findall(r"\d+", one.question)


def test_easy_rows_of_gsm8k_have_few_calculations(tmp_path: Path) -> None:
    rows = [
        {"question": "One?", "answer": "He has 2+3=<<2+3=5>>5.\n#### 5"},
        {"question": "Two?", "answer": "2+3=<<2+3=5>>5, 5*2=<<5*2=10>>10\n#### 10"},
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert list(easy_rows(tmp_path, "train", 1)) == [{"question": "One?", "answer": "He has 2+3=5.\n#### 5"}]
    assert len(list(easy_rows(tmp_path, "train", 2))) == 2


def test_demonstrations_teach_completions_alone(tiny_policy_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_policy_dir)
    answer = "1000 + 234 = 1,234.\nDone.\n#### 1,234"
    text, number = demonstration(answer)
    assert (text, number) == ("<think>1000 + 234 = 1,234. Done.</think><answer>1234</answer>", "1234")
    rows = [{"question": "What?", "answer": answer}, {"question": "What is it?" * 9, "answer": answer}]
    shown = examples(tokenizer, rows, 1000)
    prompt = render_prompts(tokenizer, ["What?"])[0]
    taught = [label for label in shown[0]["labels"] if label != -100]
    assert shown[0]["labels"][: len(prompt)] == [-100] * len(prompt) and shown[0]["input_ids"][: len(prompt)] == prompt
    assert taught == shown[0]["input_ids"][len(prompt) :] and taught[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(taught[:-1]) == text
    batch = padded(shown)
    lengths = [len(one["input_ids"]) for one in shown]
    assert batch["attention_mask"].sum(dim=1).tolist() == lengths and batch["labels"][0, lengths[0] :].eq(-100).all()
    assert len(examples(tokenizer, rows, lengths[0])) == 1


def test_a_warm_up_writes_a_policy_that_has_learned(tiny_policy_dir: Path, tmp_path: Path) -> None:
    rows = [{"question": f"{n} and 1?", "answer": f"{n} + 1 = {n + 1}.\n#### {n + 1}"} for n in range(10, 42)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [str(tiny_policy_dir), str(tmp_path / "out"), "--data", str(tmp_path), "--problems", "4", "--tokens", "4"]
    words += ["--steps", "4", "--every", "2", "--batch-size", "8", "--lr", "0.01"]
    warm_up([*words, "--until", "1"])
    told = json.loads((tmp_path / "out" / "warm_up.json").read_text())
    assert [step for step, _ in told["solved"]] == [0, 2, 4] and told["demonstrations"] == 28
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    batch = padded(examples(tokenizer, rows[4:], 400))
    losses = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(**batch).loss.item()
        for folder in (tiny_policy_dir, tmp_path / "out")
    ]
    assert losses[1] < 0.9 * losses[0]
    warm_up([*words[:1], str(tmp_path / "enough"), *words[2:], "--until", "0"])  # nothing to do
    before, after = (load_file(folder / "model.safetensors") for folder in (tiny_policy_dir, tmp_path / "enough"))
    assert all(torch.equal(after[name], before[name].bfloat16()) for name in before)
    warm_up([*words[:1], str(tmp_path / "again"), *words[2:], "--until", "1"])
    again, enough = (json.loads((tmp_path / name / "warm_up.json").read_text()) for name in ("again", "enough"))
    assert again["digest"] == told["digest"] != enough["digest"] and again["solved"] == told["solved"]
