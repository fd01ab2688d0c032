"""The pictures of reading-a-run.md: four runs of the toy policy on a CPU, from what they logged to TensorBoard.

About two minutes a run: python docs/make_run_pictures.py FOLDER. Runs that FOLDER has are only drawn.
"""

import subprocess
import sys
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

DOCS = Path(__file__).parent

REWARDS = '''
def bare(completions, answer, **columns):
    """A usual mistake: the prompt asks for tags, and this compares the complete text."""
    return [float(text.strip() == right) for text, right in zip(completions, answer)]


def thorough(completion_ids, **columns):
    """Meant to reward reasoning: 1 for 64 tokens."""
    return [len(tokens) / 64 for tokens in completion_ids]
'''

RUNS = {
    "healthy": [],
    "collapsing": ["--model.optimizer.lr", "0.05", "--model.objective.beta", "0", "--model.max_grad_norm", "100"],
    "flat": ["--rollout.rewards", "{accuracy: rewards.py:bare}"],
    "length-hacking": ["--model.optimizer.lr", "0.01", "--model.objective.beta", "0", "--rollout.rewards",
                       "{accuracy: {class_path: GSM8KAnswer, init_args: {weight: 0.2}}, thorough: {class_path: "
                       "RewardFunction, init_args: {function: 'rewards.py:thorough', weight: 3.0}}}"],
}  # fmt: skip
"""What each run changes of the quickstart."""
SHORT = ["--data.val_size", "128", "--trainer.val_check_interval", "8", "--noise", "null"]

PANELS = {
    "reward": {"reward/mean": "training reward", "val/accuracy": "held-out accuracy"},
    "entropy (nats per token)": {"policy/entropy": ""},
    "completions": {
        "completions/groups_without_signal_frac": "groups without signal",
        "completions/truncated_frac": "truncated",
    },
    "length (tokens)": {"completions/length_mean": ""},
}
"""Tags of a panel and their names."""


def train(folder: Path) -> None:
    """Run what the folder does not have."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rewards.py").write_text(REWARDS)
    for name, options in RUNS.items():
        if not (folder / name / "summary.json").is_file():
            command = [sys.executable, "-m", "qerl_pl", "fit", "-c", "quickstart", "--trainer.default_root_dir", name]
            subprocess.run([*command, "--resume", "auto", *SHORT, *options], cwd=folder, check=True)


def draw(run: Path, picture: Path) -> None:
    """Four panels of a run."""
    events = EventAccumulator(str(run)).Reload()
    figure = Figure(figsize=(6.5, 4.2), layout="constrained")  # two by two: read on a phone, too
    for axis, (title, tags) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
        assert isinstance(axis, Axes)
        for tag, label in tags.items():
            points = [(event.step, event.value) for event in events.Scalars(tag)]
            axis.plot(*zip(*points, strict=True), "o-" if tag.startswith("val/") else "-", label=label)
        if len(tags) > 1:
            axis.legend(fontsize="small")
        if title == "completions":
            axis.set_ylim(-0.05, 1.05)
        else:
            axis.set_ylim(bottom=0)
        axis.set(title=title, xlabel="rollout")
        axis.grid(alpha=0.3)
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    train(Path(sys.argv[1]))
    for name in RUNS:
        draw(Path(sys.argv[1]) / name, DOCS / f"run-{name}.png")
