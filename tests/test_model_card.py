"""The model card of `qerl export`: what it says is what the run's files say, and nothing of this machine."""

import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pages
import pytest
import yaml
from fit_helpers import configuration, with_keys
from huggingface_hub import ModelCard, constants
from transformers import AutoTokenizer

from qerl_pl.cli.main import main
from qerl_pl.cli.model_card import _serving_of_the_card, gguf_line, serving_line
from qerl_pl.modules import LoraConfig, PolicyConfig

BASE = "somebody/tiny-policy"


pytestmark = pytest.mark.usefixtures("process_state")


@pytest.fixture(scope="module", autouse=True)
def hub(tiny_policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of the model hub in which the tiny policy has been downloaded as `BASE`."""
    cache = tmp_path_factory.mktemp("hub")
    model = cache / f"models--{BASE.replace('/', '--')}"
    shutil.copytree(tiny_policy_dir, model / "snapshots" / "0123abc")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("0123abc")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two rollouts from a base of the hub and a table of this machine, and the report of `qerl test`."""
    folder = tmp_path_factory.mktemp("card")
    table = folder / "sums.jsonl"
    table.write_text(
        "".join(json.dumps({"question": f"{n} + 1 =", "answer": f"#### {n + 1}"}) + "\n" for n in range(12))
    )
    settings = with_keys(configuration(Path(BASE), folder / "run"))
    settings["trainer"] |= {"max_epochs": 1, "limit_train_batches": 2}
    settings["checkpoint"] = {"every_n_rollouts": 1, "keep": 3}
    settings["data"]["class_path"] = "GSM8KDataModule"
    settings["data"]["init_args"] = {"path": str(table), "batch_size": 2, "val_size": 3}
    (folder / "fit.yaml").write_text(yaml.safe_dump(settings))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sys, "argv", ["qerl"])
        monkeypatch.setattr(sys, "path", list(sys.path))
        assert main(["fit", "-c", str(folder / "fit.yaml")]) == 0
        sets = json.dumps({"sums": {"path": str(table)}})
        again = ["-c", str(folder / "run" / "config.yaml"), "--resume", "auto", "--report", "{}", "--data.sets", sets]
        assert main(["test", *again, "--rollout.evaluation.samples", "2"]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    """The run's adapter."""
    assert main(["export", str(run), str(run.parent / "adapter")]) == 0
    return run.parent / "adapter"


def rows(text: str) -> dict[str, list[str]]:
    """Cells of all tables by the first of each row."""
    return {first: rest for first, *rest in pages.rows(text)}


def test_the_metadata_is_the_hubs(exported: Path) -> None:
    data = ModelCard.load(exported / "README.md").data.to_dict()
    assert data == {
        "base_model": BASE,
        "base_model_relation": "adapter",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["qerl_pl", "reinforcement-learning", "lora", "nvfp4", "grpo"],
    }


def test_the_card_says_what_was_trained_and_how(exported: Path) -> None:
    text = ModelCard.load(exported / "README.md").text
    assert "# tiny-policy trained by GRPO\n" in text and "The adapter after 2 rollouts" in text
    found = {name: cells[0] for name, cells in rows(text).items()}
    assert found["base"] == f"[{BASE}](https://huggingface.co/{BASE}), in NVFP4, other tensors in float32"
    assert found["trained"].startswith("LoRA of rank 4, alpha 8, on q_proj, ") and "RMSNorm" in found["trained"]
    assert re.search(r"qerl-pl 0.1.0, torch \d", found["versions"]) and "peft" in found["versions"]


def test_the_numbers_are_those_of_the_runs_files(run: Path, exported: Path) -> None:
    text = (exported / "README.md").read_text()
    summary = json.loads((run / "summary.json").read_text())
    expected = [f"{summary['reward_first']:.4g}", f"{summary['reward_last']:.4g}"]
    assert rows(text)["reward (mean of the first and the last rollouts)"] == expected and expected[0] != "0"
    report = json.loads((run / "evaluation.json").read_text())["sets"]["sums"]
    assert rows(text)["prompts"] == ["12"] and rows(text)["samples"] == ["2"]
    for name, label in {"accuracy": "greedy accuracy", "pass@2": "pass@2", "truncated_frac": "truncated"}.items():
        metric = report["metrics"][name]
        assert rows(text)[label] == [f"{metric['value']:.3f} [{metric['low']:.3f}, {metric['high']:.3f}]"]
    assert "![Reward, accuracy, entropy and length of the run](run.png)" in text
    assert (exported / "run.png").read_bytes() == (run / "run.png").read_bytes()


def test_the_curves_have_first_and_last_values_of_each_set(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    summary = json.loads((copy / "summary.json").read_text())
    accuracies = {"accuracy_before": {"a": None, "b": 0.125}, "accuracy_after": {"a": 0.5, "b": 0.75}}
    (copy / "summary.json").write_text(json.dumps(summary | accuracies | {"reward_first": 0.25, "reward_last": 1.5}))
    assert main(["export", str(copy), str(tmp_path / "adapter")]) == 0
    found = rows((tmp_path / "adapter" / "README.md").read_text())
    assert found["reward (mean of the first and the last rollouts)"] == ["0.25", "1.5"]
    assert found["accuracy on a (sampled pass@1)"] == ["-", "0.5"]
    assert found["accuracy on b (sampled pass@1)"] == ["0.125", "0.75"]


def test_nothing_of_this_machine_is_written(run: Path, exported: Path) -> None:
    texts = [path for path in exported.iterdir() if path.suffix not in (".png", ".safetensors")]
    assert len(texts) == 6
    for path in texts:
        assert "/tmp" not in path.read_text() and str(run.parents[1]) not in path.read_text(), path
    assert json.loads((exported / "adapter_config.json").read_text())["base_model_name_or_path"] == BASE


def test_merged_weights_are_a_model_of_transformers(run: Path, tmp_path: Path) -> None:
    assert main(["export", str(run), str(tmp_path / "model"), "--merge", "true"]) == 0
    card = ModelCard.load(tmp_path / "model" / "README.md")
    assert (card.data.library_name, card.data.base_model) == ("transformers", BASE)
    assert card.data.to_dict()["base_model_relation"] == "finetune"
    assert "The model, with the adapter merged in, after 2 rollouts" in card.text and "## Evaluation" in card.text
    assert "vllm serve model\n" in card.text
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template


def changed(run: Path, folder: Path, **data: Any) -> Path:
    """A copy of the run, with another data module in its configuration."""
    shutil.copytree(run, folder)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["data"] = {"class_path": "my_data.Mine", "init_args": data}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def test_data_sets_of_the_hub_that_were_trained_on_are_named(run: Path, tmp_path: Path) -> None:
    sets = {"sets": {"MATH": {"path": "somebody/held-out"}}}
    tables = {"tables": [{"path": "other/b.c"}, {"path": "mine/rows.jsonl"}, {"path": "./x/y"}], "path": "openai/gsm8k"}
    copy = changed(run, tmp_path / "run", **sets, **tables)
    assert main(["export", str(copy), str(tmp_path / "adapter")]) == 0
    assert ModelCard.load(tmp_path / "adapter" / "README.md").data.datasets == ["openai/gsm8k", "other/b.c"]


def test_what_the_run_has_not_written_is_left_out(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    headings = ["## Curves", "## Evaluation", "## Serve"]
    for name in ("evaluation.json", "summary.json", "run.png", "config.yaml"):
        (copy / name).unlink()
        assert main(["export", str(copy), str(tmp_path / name)]) == 0
        text = ModelCard.load(tmp_path / name / "README.md").text
        headings = [one for one in headings if (one, name) not in GONE]
        assert re.findall("^## .*", text, re.MULTILINE) == headings
        assert (
            (tmp_path / name / "run.png").is_file() == ("run.png" in text) == (name not in ("run.png", "config.yaml"))
        )
    assert rows(text).keys() == {"", "base", "trained", "versions"}


GONE = {("## Evaluation", "evaluation.json"), ("## Curves", "run.png")}


def test_the_evaluation_of_other_weights_is_left_out(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    earlier = run / "checkpoints" / "step=1.ckpt"
    assert main(["export", str(run), str(tmp_path / "adapter"), "--checkpoint", str(earlier)]) == 0
    text = (tmp_path / "adapter" / "README.md").read_text()
    assert "The adapter after 1 rollouts" in text and "Of the complete run of 2 rollouts." in text
    assert "## Evaluation" not in text and "evaluation.json is of other weights" in caplog.text


ADAPTER = "--enable-lora --lora-modules mine=out/mine --max-lora-rank"


@pytest.mark.parametrize(
    ("settings", "merged", "line"),
    [
        ({"lora": LoraConfig(rank=32)}, False, f"vllm serve BASE {ADAPTER} 32"),
        ({"lora": LoraConfig(rank=4)}, False, f"vllm serve BASE {ADAPTER} 8"),
        ({"lora": LoraConfig(rank=33), "quantization": "none"}, False, f"vllm serve BASE {ADAPTER} 64"),
        ({"lora": LoraConfig(rank=257)}, False, f"vllm serve BASE {ADAPTER} 320"),
        ({"lora": LoraConfig(rank=32)}, True, "vllm serve out/mine"),
        ({"finetune": "full", "quantization": "none"}, False, "vllm serve out/mine"),
        ({"train_norms": True}, False, "qerl export RUN DST --merge && vllm serve DST((?!--enable-lora).)*"),
        ({"quantization": "nf4"}, False, "qerl export RUN DST --merge && .*vLLM does not read a base in nf4"),
        ({"lora": LoraConfig(rank=640)}, False, "qerl export RUN DST --merge && .*LoRA has ranks up to 512"),
    ],
)
def test_the_line_that_serves_it(settings: dict[str, Any], merged: bool, line: str) -> None:
    assert re.fullmatch(line, serving_line(PolicyConfig(**settings), merged, "BASE", "out/mine"))


def test_paths_are_words_of_the_shell() -> None:
    line = serving_line(PolicyConfig(lora=LoraConfig(rank=8)), False, "/my bases/one", "out/my run")
    assert shlex.split(line)[2] == "/my bases/one" and shlex.split(line)[5] == "my run=out/my run"
    assert shlex.split(serving_line(PolicyConfig(), True, "", "~/my run"))[2] == str(Path.home() / "my run")
    assert shlex.split(gguf_line("out/my run"))[5:8] == ["out/my run", "--outfile", "out/my run.gguf"]


@pytest.mark.parametrize("as_stored", [True, False])
def test_a_base_that_is_stored_in_four_bits_is_served_as_it_is(as_stored: bool) -> None:
    policy = PolicyConfig(path=BASE, quantization="mxfp4", lora=LoraConfig(rank=8))
    lines = _serving_of_the_card(policy, False, "mine", None, as_stored).splitlines()
    assert lines[-1].startswith(f"vllm serve {BASE if as_stored else 'tiny-policy-MXFP4'} --enable-lora")
    assert len(lines) == (1 if as_stored else 3)


MERGED_FIRST = "qerl export RUN DST --merge && vllm serve DST  # vLLM's own LoRA does not .*keys"
KEYS_AS_VALUES, TEXT = {"model_type": "gemma4_text", "attention_k_eq_v": True}, {"model_type": "qwen3_5_text"}


@pytest.mark.parametrize(
    ("config", "merged", "multimodal", "line"),
    [
        *((KEYS_AS_VALUES, False, multimodal, MERGED_FIRST) for multimodal in (False, True)),
        (KEYS_AS_VALUES, True, False, "vllm serve out/mine"),
        (KEYS_AS_VALUES | {"attention_k_eq_v": False}, False, False, f"vllm serve BASE {ADAPTER} 16"),
        (TEXT, False, False, f"vllm serve BASE {ADAPTER} 16  # vLLM 0.30 or later"),
        (TEXT, True, False, "vllm serve out/mine  # vLLM 0.30 or later"),
        (TEXT, False, True, f"vllm serve BASE {ADAPTER} 16"),
        ({"model_type": "qwen3_5_moe_text"}, False, False, f"vllm serve BASE {ADAPTER} 16  # vLLM 0.30 or later"),
        ({"model_type": "gemma3_text"}, False, False, f"vllm serve BASE {ADAPTER} 16"),
    ],
)
def test_the_line_of_a_text_model_taken_out_of_a_multimodal_one(
    tmp_path: Path, config: dict[str, Any], merged: bool, multimodal: bool, line: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    policy = PolicyConfig(path=str(tmp_path), lora=LoraConfig(rank=16))
    assert re.fullmatch(line, serving_line(policy, merged, "BASE", "out/mine", multimodal))


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("{a: [", "config.yaml must be YAML; .*config.yaml is not"),
        ("name: tests\non: [push]\n", None),
        ("[1, 2]", None),
    ],
)
def test_another_configuration_in_the_folder_leaves_the_card_without_its_objective(
    run: Path, tmp_path: Path, written: str, message: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    (copy / "config.yaml").write_text(written)
    assert main(["export", str(copy), str(tmp_path / "adapter")]) == (2 if message else 0)
    if message:
        assert re.search(message, capsys.readouterr().err)
        return
    data = ModelCard.load(tmp_path / "adapter" / "README.md").data
    assert data.base_model == BASE and "grpo" not in data.tags
