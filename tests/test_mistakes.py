"""A user's mistakes: one line that says what is wrong, exit status 2, no traceback."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from qerl_pl.callbacks import RolloutCallback
from qerl_pl.cli.main import main

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"


@pytest.fixture(autouse=True)
def process_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """`main` sets these; give them back."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))


def complaint(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one line that a mistake prints, after whatever was logged before it was found."""
    assert main(list(args)) == 2
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if line.startswith("qerl: ")]
    assert len(lines) == 1 and error.endswith(lines[0] + "\n") and "Traceback" not in error
    assert len(lines[0]) < 300
    return lines[0]


PARSED = {
    "unknown key": (["--model.policy.lora.rnk", "4"], "model.policy.lora.rnk"),
    "abbreviated key": (["--model.lr", "1"], "unrecognized arguments: --model.lr 1"),
    "unknown class": (["--model.objective", "qerl_pl.algorithm.objectives.PPO"], "no attribute 'PPO'"),
    "unknown module": (["--data", "nowhere.Data"], "No module named 'nowhere'"),
    "wrong type": (["--model.warmup_ratio", "much"], "model.warmup_ratio.*float.*much"),
    "wrong choice": (["--model.policy.quantization", "int8"], "nvfp4.*none.*int8"),
    "no such item": (["--trainer.callbacks.Nothing.x", "1"], "no Nothing"),
    "unknown key of an item": (["--trainer.callbacks.RolloutCallback.grup_size", "4"], "RolloutCallback.*'grup_size'"),
    "no YAML for an item": (["--trainer.callbacks.RolloutCallback.group_size", "[4"], r"value is YAML; .*\[4"),
    "small group": (["--trainer.callbacks.RolloutCallback.group_size", "1"], "at least 2 completions; found"),
    "rising noise": (["--trainer.callbacks.AdaptiveQuantizationNoise.sigma_end", "1"], "Noise must not grow"),
    "no clipping": (["--model.max_grad_norm", "0"], "max_grad_norm must be above 0"),
    "long warm-up": (["--model.warmup_ratio", "2"], r"warmup_ratio must be in \[0, 1\]"),
    "no check": (["--trainer.callbacks.RolloutCallback.check_every", "0"], "check_every must be at least 1"),
    "no evaluation": (["--trainer.callbacks.RolloutCallback.eval_samples", "0"], "eval_samples must be at least 1"),
    "greedy": (["--trainer.callbacks.RolloutCallback.sampling.temperature", "0"], "temperature must be above 0"),
    "cold": (
        ["--trainer.callbacks.RolloutCallback.sampling.temperature", "-1"],
        "temperature must be 0 or a number of at",
    ),
    "no tokens": (["--trainer.callbacks.RolloutCallback.sampling.max_tokens", "0"], "max_tokens must be at least 1"),
    "empty stop": (["--trainer.callbacks.RolloutCallback.sampling.stop", "['']"], "sampling.stop must be a list"),
    "nothing likely": (["--trainer.callbacks.RolloutCallback.sampling.top_p", "0"], "top_p must be above 0"),
    "nearly greedy": (
        ["--trainer.callbacks.RolloutCallback.sampling.temperature", "0.005"],
        "0 or a number of at least 0",
    ),
    "small batch": (["--data.batch_size", "0"], "batch_size must be at least 1"),
}


@pytest.mark.parametrize("case", PARSED)
def test_a_mistake_on_the_command_line_is_one_line(capsys: pytest.CaptureFixture[str], case: str) -> None:
    args, message = PARSED[case]
    assert re.search(message, complaint(capsys, "fit", "-c", str(QUICKSTART), *args))


def test_a_mistake_in_a_file_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    settings = yaml.safe_load(QUICKSTART.read_text())
    settings["trainer"]["callbacks"][0]["init_args"]["rewards"][0] = {"class_path": "qerl_pl.rewards.Nothing"}
    path = tmp_path / "mistaken.yaml"
    path.write_text(yaml.safe_dump(settings))
    line = complaint(capsys, "fit", "-c", str(path))
    assert "trainer.callbacks" in line and "no attribute 'Nothing'" in line and "see qerl fit --help" in line
    assert "does not exist" in complaint(capsys, "fit", "-c", str(tmp_path / "none.yaml"))


def test_what_is_no_mistake_of_the_user_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, *args: Any, **kwargs: Any) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(RolloutCallback, "__init__", broken)
    with pytest.raises(ValueError, match="a bug"):
        main(["fit", "-c", str(QUICKSTART)])


FROM_LIGHTNING = {
    "no GPU": (["--trainer.accelerator", "gpu"], "gpu"),
    "accumulation": (["--trainer.accumulate_grad_batches", "2"], "accumulate_grad_batches"),
    "two devices": (["--trainer.devices", "2"], "one device so far; found 2; set trainer.devices to 1"),
    "no place": (["--trainer.default_root_dir", "/proc/nowhere"], "default_root_dir /proc/nowhere cannot be made"),
}


@pytest.mark.parametrize("case", FROM_LIGHTNING)
def test_what_lightning_refuses_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, case: str) -> None:
    args, message = FROM_LIGHTNING[case]
    where = ("--trainer.default_root_dir", str(tmp_path / "run"))
    assert re.search(message, complaint(capsys, "fit", "-c", str(QUICKSTART), *where, *args))


GSM8K = [f'{{"question": "What is {n} plus 1?", "answer": "#### {n + 1}"}}' for n in range(8)]
FOUND_LATER: dict[str, tuple[list[str] | None, list[str], str]] = {
    "no data": (None, [], "no such file: .*rows.jsonl"),
    "malformed line": ([*GSM8K, "{question"], [], "rows.jsonl, line 9"),
    "missing column": (['{"problem": "1 + 1", "answer": "#### 2"}'], [], "has no question, found problem, answer"),
    "nothing short enough": (GSM8K, ["--data.max_prompt_tokens", "5"], "none of 8 is"),
    "batch above the set": (GSM8K, ["--data.batch_size", "9"], "batch_size must not exceed"),
    "odd minibatches": (GSM8K, ["--model.minibatches", "3"], "minibatches must divide .* found 3 and"),
    "rare validation": (GSM8K, ["--trainer.val_check_interval", "4"], "an epoch's 3 batches; found 4"),
    "adapter on the vocabulary": (GSM8K, ["--model.policy.lora.targets", "[lm_head]"], "'lm_head' matches none"),
    "a folder to resume from": (GSM8K, ["--resume", "."], "no such file; name another with --resume"),
    "no such LoRA target": (GSM8K, ["--model.policy.lora.targets", "[nothing]"], "LoRA targets? must name"),
}


@pytest.mark.parametrize("case", FOUND_LATER)
def test_a_mistake_found_while_starting_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_policy_dir: Path, case: str
) -> None:
    rows, extra, message = FOUND_LATER[case]
    path = tmp_path / "rows.jsonl"
    if rows is not None:
        path.write_text("\n".join(rows))
    line = complaint(
        capsys,
        *("fit", "-c", str(ROOT / "configs" / "gsm8k_cpu.yaml"), "--trainer.default_root_dir", str(tmp_path / "run")),
        *("--model.policy.path", str(tiny_policy_dir), "--model.policy.quantization", "none"),
        *("--data.path", str(path), "--data.batch_size", "2", "--data.val_size", "2"),
        *("--trainer.val_check_interval", "3", *extra),
    )
    assert re.search(message, line)


def test_commands_of_our_own_report_alike(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "config.json" in complaint(capsys, "quantize", str(tmp_path / "a"), str(tmp_path / "b"))
    assert "see qerl export --help" in complaint(capsys, "export", str(tmp_path))
    assert "invalid choice: 'train'" in complaint(capsys, "train")
