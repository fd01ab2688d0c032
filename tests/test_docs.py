"""The pages: links resolve, commands parse, code runs, names exist."""

import importlib
import inspect
import json
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pages
import pytest
import torch
import yaml
from cli_helpers import built
from fit_helpers import configuration, with_keys
from pages import DOCS, GUIDE, PAGES, ROOT
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import qerl_pl.algorithm
import qerl_pl.callbacks
import qerl_pl.datamodules
import qerl_pl.engines
import qerl_pl.environments
import qerl_pl.rewards
from qerl_pl.callbacks import RolloutCallback
from qerl_pl.cli.commands import COMMAND_HELP
from qerl_pl.cli.main import CALLBACKS, COMMANDS, QeRLCLI, main
from qerl_pl.datamodules import PromptDataModule
from qerl_pl.rewards import RewardSample, score

README = ROOT / "README.md"
NAMED = {
    name: getattr(module, name)
    for module in (
        *(qerl_pl.algorithm, qerl_pl.callbacks, qerl_pl.datamodules),
        *(qerl_pl.engines, qerl_pl.environments, qerl_pl.rewards),
    )
    for name in module.__all__
}
KEYS: dict[str, type] = {"rollout": RolloutCallback, **{key: kind for key, (kind, *_) in CALLBACKS.items()}}
"""Top-level keys of a configuration that are callbacks."""
LINES = [line for path in GUIDE for line in pages.commands(path)]
TOGETHER = pages.together(LINES)
ALONE = [pytest.param(line, marks=pytest.mark.nightly) for line in LINES if line not in TOGETHER]


@pytest.fixture(autouse=True)
def pages_modules(process_state: None) -> Iterator[None]:
    """The pages' own modules are imported anew by each test."""
    yield
    for module in [name for name in sys.modules if name.startswith(("my_", "qerl_reward_"))]:
        sys.modules.pop(module)


@pytest.fixture(scope="module")
def workdir(tiny_policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run like the quickstart's, of a tiny policy, and the files that the pages tell users to write."""
    workdir = tmp_path_factory.mktemp("workdir")
    for path in GUIDE:
        for block in pages.fences(path, "python"):
            if title := re.match(r"# (\w+\.py)\n", block):
                (workdir / title[1]).write_text(block)
    settings = configuration(tiny_policy_dir, workdir / "runs" / "quickstart")
    settings["trainer"] |= {"max_epochs": 1, "limit_train_batches": 2}
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sys, "argv", ["qerl"])
        QeRLCLI({"subcommand": "fit", "fit": settings})
        monkeypatch.chdir(workdir)
        runpy.run_path("my_questions.py")
    (workdir / "configs").symlink_to(ROOT / "configs")
    return workdir


# Pages ----------------------------------------------------------------------------------------------------------------


def anchors(path: Path) -> set[str]:
    """Headings as GitHub names them in a link."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=pages.name)
def test_links_lead_somewhere(path: Path) -> None:
    for link in pages.links(path):
        if link.startswith("http"):
            continue
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def words(text: str) -> int:
    """Words of a page outside of code blocks; marks of tables are none."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return sum(1 for word in prose.split() if re.search(r"\w", word))


def test_the_readme_takes_three_minutes_and_the_documentation_an_hour() -> None:
    assert words(README.read_text()) <= 450
    assert sum(words(path.read_text()) for path in DOCS) <= 20_000


def test_the_site_has_six_tabs_and_every_page() -> None:
    (nav,) = re.findall(r"^nav:\n((?: .*\n)+)", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    tabs = {tab: places for each in yaml.safe_load(nav) for tab, places in each.items()}
    assert list(tabs) == ["Start", "Guide", "Methods", "Evidence", "Reference", "Contribute"]
    named = [path for places in tabs.values() for each in places if isinstance(each, dict) for path in each.values()]
    assert {f"docs/{path.name}" for path in DOCS} <= set(named) and len(named) == len(set(named)) <= 27
    assert all((ROOT / path).is_file() for path in named)


PATH = ROOT / "docs" / "path-of-the-data.md"
RESUMING = ROOT / "docs" / "resuming.md"


def test_the_tree_shows_every_folder() -> None:
    tree = pages.fences(PATH, "")[1]
    folders = {path.parent for path in ROOT.glob("qerl_pl/*/*.py")}
    shown = {line.split()[0] for line in tree.splitlines() if line.startswith("  ") and line.split()[0].endswith("/")}
    assert shown == {f"{folder.name}/" for folder in folders}
    top = [line.split()[0] for line in tree.splitlines() if not line.startswith(" ")]
    assert len(top) > 4 and all((ROOT / folder).is_dir() for folder in top)


def files(path: Path) -> set[str]:
    """Names of files in a page's prose."""
    return {text for text in pages.code(path) if re.fullmatch(r"[\w./]+\.(py|yaml|md|toml)", text)}


@pytest.mark.parametrize("path", [*GUIDE, ROOT / "CONTRIBUTING.md"], ids=pages.name)
def test_files_that_a_page_names_exist(path: Path, workdir: Path) -> None:
    names = ("benchmarks", "configs", "docs", "examples", "kernels", "qerl_pl", "studies", "tests", "tools")
    folders = [ROOT / folder for folder in names]
    existing = [f"/{file.relative_to(ROOT).as_posix()}" for folder in folders for file in folder.rglob("*")]
    existing += [f"/{file.name}" for file in (*ROOT.glob("*.*"), *(workdir / "runs" / "quickstart").iterdir())]
    existing += ["/evaluation.md"]  # that `qerl test` writes
    for name in files(path):
        assert any(file.endswith(f"/{name}") for file in existing), name


def test_the_path_of_the_data_names_at_most_25_files_by_their_paths() -> None:
    named = files(PATH)
    assert 15 < len(named) <= 25
    assert [name for name in named if not (ROOT / "qerl_pl" / name).is_file()] == []


def test_imports_point_the_way_that_contributing_says() -> None:
    text = " ".join((ROOT / "CONTRIBUTING.md").read_text().split())
    order = re.search(r"Imports point one way: (.*?)\. ", text)
    assert order is not None
    level = {package: i for i, step in enumerate(order[1].split("<-")) for package in re.findall(r"`(\w+)`", step)}
    upward = set()
    for path in ROOT.glob("qerl_pl/**/*.py"):
        package, *rest = path.relative_to(ROOT / "qerl_pl").with_suffix("").parts
        for imported in re.findall(r"^\s*from qerl_pl\.(\w+)", path.read_text(), re.MULTILINE):
            if package not in ("__main__", imported) and level[imported] >= level[package]:
                upward.add((f"{package}/{'/'.join(rest)}.py", imported))
    assert upward == set()


# Commands and code ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", [*TOGETHER, *ALONE], ids=str)
def test_a_command_is_understood(line: str, workdir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, command, *args = shlex.split(line)
    monkeypatch.syspath_prepend(str(workdir))
    monkeypatch.chdir(tmp_path if command == "configs" else workdir)
    assert program in ("make", "python", "qerl")
    if program == "make":
        assert re.search(rf"^{command}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif program == "python":
        assert Path(command).is_file()
    elif command == "compare":
        assert main([command, *args]) == 2 and len(args) == 2  # no such runs
    elif command in ("completions", "configs"):
        assert main([command, *args, *[str(tmp_path / "page.html")] * (command == "completions")]) == 0
    elif command in COMMANDS or any(arg.endswith("help") or arg.startswith("--print_config") for arg in args):
        with pytest.raises(SystemExit) as stop:
            main([command, *args, *["--print_config"] * (command in COMMANDS)])
        assert stop.value.code == 0
    else:
        settings = built(command, *(arg for arg in args if arg != "--dry-run"))
        for option, value in zip(args, args[1:], strict=False):
            if option == "--data" and isinstance(settings.data, PromptDataModule):
                assert f"qerl_pl.datamodules.datasets.{value}".endswith(
                    f"{type(settings.data).__module__}.{type(settings.data).__name__}"
                )
                assert len({row.id for row in settings.data.train_rows()}) > settings.data.batch_size


def test_commands_in_the_prose_are_there() -> None:
    commands = {*COMMAND_HELP, "--version"}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in [*GUIDE, ROOT / "CONTRIBUTING.md"]:
        for text in pages.code(path):
            program, _, rest = text.partition(" ")
            assert program != "qerl" or rest.split()[0] in commands, text
            assert program != "make" or rest.split()[0] in targets, text


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("qerl export")])
def test_exports_run(line: str, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workdir)
    args = shlex.split(line)[1:]
    assert main(args) == 0
    assert list(Path(args[2]).glob("*.safetensors"))


def test_the_adapter_loads_with_plain_transformers_and_peft(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workdir)
    (block,) = pages.fences(ROOT / "docs" / "evaluating.md", "python")
    names: dict[str, Any] = {}
    exec(block, names)
    loaded = {name.replace(".default", ""): tensor for name, tensor in names["model"].named_parameters()}
    trained = load_file("runs/quickstart/adapter/adapter_model.safetensors")
    factors = {name: tensor for name, tensor in trained.items() if "lora_B" in name}
    assert len(factors) == 14  # seven projections in each of two layers
    for name, tensor in factors.items():
        assert tensor.any() and torch.equal(loaded[name], tensor)


def test_the_rewards_of_the_page_are_accepted_and_score(
    workdir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(workdir))
    monkeypatch.chdir(workdir)
    config, rewards = tmp_path / "rewards.yaml", {}
    names = {"accuracy", "format"}  # those of the quickstart; merged by name
    for block, added in zip(
        pages.fences(ROOT / "docs" / "your-own-reward.md", "yaml"), ({"unit"}, {"brief"}, set(), {"judge"}), strict=True
    ):
        config.write_text(block)
        settings = built("fit", "-c", str(ROOT / "configs" / "quickstart.yaml"), "-c", str(config))
        found = {reward.name: reward for reward in settings.rollout.scorer.rewards}
        assert found.keys() == names | added
        assert (settings.model.objective.multi_objective_aggregation == "normalize_then_sum") == (
            "normalize_then_sum" in block
        )
        samples = [RewardSample("1 + 1?", text, "2", False, 5) for text in ("<answer>2</answer>", "x" * 61)]
        if "trl_rewards" in block:
            samples = [RewardSample("1 + 1?", text, "2", False, 5, columns={"unit": "m"}) for text in ("2", "3 m")]
            assert score([found["unit"]], samples).total.tolist() == pytest.approx([0.0, 0.2])
        assert list(found["accuracy"](samples)) == [1.0, 0.0]
        rewards |= found
    assert list(rewards["brief"](samples)) == [1.0, 0.0]
    assert (rewards["brief"].limit, rewards["brief"].weight) == (60, 0.2)
    judge = rewards["judge"]
    assert (judge.url, judge.model, judge.weight) == ("http://localhost:8000/v1", "Qwen/Qwen3-32B", 0.5)
    assert judge.template.count("{") == 3 and "Score: N" in judge.template


def test_the_module_and_the_rewards_of_the_page_of_the_command_line_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = ROOT / "docs" / "command-line.md"
    module, block = pages.fences(page, "yaml")
    monkeypatch.chdir(tmp_path)
    Path("my_modules.py").write_text(pages.fences(page, "python")[0])
    Path("module.yaml").write_text(module)
    mine = built("fit", "-c", "quickstart", "-c", "module.yaml").model
    assert (type(mine).__name__, mine.shown, mine.policy_config.path) == ("Mine", 0.25, "Qwen/Qwen2.5-1.5B-Instruct")
    (tmp_path / "rewards.yaml").write_text(block)
    settings = built("fit", "-c", str(ROOT / "configs" / "quickstart.yaml"), "-c", str(tmp_path / "rewards.yaml"))
    rewards = {reward.name: reward.weight for reward in settings.rollout.scorer.rewards}
    assert rewards == {"accuracy": 1.0, "format": 0.1}


def test_what_extends_the_package_trains(
    workdir: Path, tiny_policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objective, schedules, reward, callback and module of the page, and a data module, in one run of two rollouts."""
    monkeypatch.syspath_prepend(str(workdir))
    monkeypatch.chdir(workdir)
    monkeypatch.setattr(sys, "argv", ["qerl"])
    settings = with_keys(configuration(tiny_policy_dir, tmp_path))
    settings["model"] |= {
        "class_path": "my_module.Watched",
        "objective": {"class_path": "my_objectives.Reinforce"},
        "lr_scheduler": "my_schedules.py:wsd",
    }
    settings["rollout"]["rewards"] = ["my_short.py:short"]
    settings["data"] = {"class_path": "my_data.Doubles", "init_args": {"batch_size": 2, "val_size": 2}}
    settings["noise"] = {"decay": "my_schedules.py:steps", "stages": 2}
    settings["trainer"] |= {"max_epochs": 1, "limit_train_batches": 2, "callbacks": ["my_callback.Positive"]}
    cli = QeRLCLI({"subcommand": "fit", "fit": settings})
    made = [type(one).__name__ for one in (cli.model, cli.model.objective, cli.datamodule)]
    assert made == ["Watched", "Reinforce", "Doubles"]
    logged = set(EventAccumulator(str(tmp_path)).Reload().Tags()["scalars"])
    assert {"my/positive_frac", "reward/short"} <= logged


# Names ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def options() -> str:
    """Every option that --help shows."""
    found = []
    for command in ("fit", "quantize", "export"):
        with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(SystemExit):
            monkeypatch.setenv("COLUMNS", "2000")
            monkeypatch.setattr(sys, "argv", ["qerl"])
            monkeypatch.setattr(sys, "stdout", type("Lines", (), {"write": found.append, "flush": lambda self: None})())
            main([command, "--help"])
    return "".join(found)


def parameters(kind: type) -> set[str]:
    """Arguments of the constructor, also of bases that it passes `**settings` on to."""
    return set().union(*(inspect.signature(base).parameters for base in kind.__mro__[:-1]))


@pytest.mark.parametrize("path", GUIDE, ids=pages.name)
def test_names_on_a_page_exist(path: Path, options: str) -> None:
    of_data = set().union(*(parameters(NAMED[name]) for name in qerl_pl.datamodules.__all__))
    for text in pages.code(path):
        if re.fullmatch(r"qerl_pl(\.\w+)+", text):
            module, _, last = text.rpartition(".")
            assert getattr(importlib.import_module(module), last), text
        elif match := re.fullmatch(r"([A-Z]\w+)\.(\w+)", text):
            assert match[2] in parameters(NAMED[match[1]]), text
        elif match := re.fullmatch(r"data\.(\w+)", text):
            assert match[1] in of_data, text
        elif (match := re.fullmatch(r"(\w+)\.(?!json)(\w+)", text)) and match[1] in KEYS:
            assert match[2] in parameters(KEYS[match[1]]), text
        elif re.fullmatch(r"(model|trainer|rollout)(\.\w+)+", text):
            assert re.search(rf"^  --{re.escape(text)}\b", options, re.MULTILINE), text
        elif match := re.match(r"--[a-z_]+", text):
            assert re.search(rf"^  {match[0]}\b", options, re.MULTILINE), text


def test_the_keys_of_the_page_are_those_of_a_configuration() -> None:
    section = pages.sections(ROOT / "docs" / "command-line.md")["Configuration files"]
    assert tags(section) == {"seed_everything", "model", "data", "trainer", *KEYS}
    for name, text in pages.rows(section)[1:]:
        _, settings, _ = CALLBACKS.get(name.strip("`"), (None, {}, ""))
        assert (settings is None) == ("off unless set" in text), name


def test_every_class_that_a_configuration_can_name_is_on_a_page() -> None:
    told = {text.rpartition(".")[2] for path in GUIDE for text in pages.code(path)}
    classes = {name for name, kind in NAMED.items() if inspect.isclass(kind)}
    inner = {"AnswerReward", "EngineSpec", "NoiseSchedule", "NormNoise", "Objective", "Preempted", "Reward"}
    inner |= {"ReferenceReward", "RewardSample", "RolloutEngine", "Row", "ScoredBatch"}
    inner |= {"EnvironmentPool", "NormalizingReward", "Opening", "Session", "ToolAnswer"}
    assert classes - inner - told == set()


# A run ----------------------------------------------------------------------------------------------------------------


def test_the_tags_of_the_page_are_those_that_a_run_logs(workdir: Path) -> None:
    sections = pages.sections(ROOT / "docs" / "logged-metrics.md")
    of_a_gpu = tags(sections.pop("On a GPU only"))
    assert of_a_gpu == {"memory/activations_gib", "memory/driver_gib"}
    of_a_test = {"test/accuracy", "test/pass@1"}
    documented = set().union(*map(tags, sections.values()))
    assert of_a_test < documented
    logged = set(EventAccumulator(str(workdir / "runs" / "quickstart")).Reload().Tags()["scalars"])
    rewards = {f"{place}{name}" for place in ("reward/", "val/reward_") for name in ("accuracy", "vowels")}
    assert logged - rewards == documented - of_a_test - {"reward/<name>", "val/reward_<name>"}
    assert rewards < logged


def tags(text: str) -> set[str]:
    """Code in the first column of a section's tables."""
    return {tag for first, *_ in pages.rows(text) for tag in re.findall(r"`([^`]+)`", first)}


def test_what_a_run_leaves_is_on_the_page(workdir: Path) -> None:
    patterns = [re.sub(r"\bN\b", "*", one) for one in tags(pages.sections(RESUMING)["The run folder"])]
    run = workdir / "runs" / "quickstart"
    written = {path for path in run.rglob("*") if path.is_file() and path.suffix != ".sha256"}
    told = {path for pattern in patterns for found in run.glob(pattern) for path in (found, *found.rglob("*"))}
    assert len(written) > 8 and written - told == set()
    elsewhere = {"checkpoints/best-rollouts=*.ckpt", "checkpoints/abandoned", "model", "evaluation"}
    elsewhere |= {"evaluation.json", "evaluation.md", "validate"}  # of runs of another kind
    assert {pattern for pattern in patterns if not list(run.glob(pattern))} == elsewhere
    first, *_ = (run / "completions.jsonl").read_text().splitlines()
    assert json.loads(first).keys() <= set(pages.code(RESUMING))
