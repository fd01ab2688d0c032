"""Answers graded as mathematics: what counts as right, and that an answer can neither hang nor run."""

import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from qerl_pl.errors import UserError
from qerl_pl.rewards import MathAnswer, RewardSample


def sample(completion: str) -> RewardSample:
    return RewardSample("How many?", completion, reference="18", truncated=False, num_tokens=5)


def answered(answer: str, reference: str = "18") -> RewardSample:
    completion = f"<think>so</think><answer>{answer}</answer>"
    return RewardSample("How many?", completion, reference, truncated=False, num_tokens=5)


@pytest.fixture(scope="module")
def math_answer() -> MathAnswer:
    return MathAnswer(time_limit_s=5.0)


RIGHT = [
    ("52_{8}", "52_8"),
    ("1/2", "\\frac{1}{2}"),
    ("$0.5$", "\\frac12"),
    ("x = 5", "5"),
    ("The answer is $18$.", "18"),
    ("\\boxed{18}", "18"),
    ("18.", "18"),
    ("\\$18", "18"),
    ("1,234", "1234"),
    ("1 + x", "x+1"),
    ("(1, 2)", "\\left(1, 2\\right)"),
    ("\\sqrt{9}", "3"),
    ("50\\%", "\\frac{1}{2}"),
    ("{no way to read this", "{no way to read this"),
]
WRONG = [
    ("52_7", "52_8"),
    ("19", "18"),
    ("17 or 18", "18"),
    ("x^2 + 1", "1"),
    ("(2, 1)", "(1, 2)"),
    ("-18", "18"),
    ("", "18"),
    ("0.33", "\\frac13"),
    ("\\frac{1}{0}", "18"),
    ("\ud800", "18"),
    ("{no way to read this", "18"),
]


def test_math_answer(math_answer: MathAnswer) -> None:
    values = math_answer([answered(*pair) for pair in RIGHT + WRONG])
    expected = [1.0] * len(RIGHT) + [0.0] * len(WRONG)
    wrongly = [pair for pair, value, one in zip(RIGHT + WRONG, values, expected, strict=True) if value != one]
    assert not wrongly


def test_equal_texts_need_no_grading() -> None:
    reward = MathAnswer()
    assert reward([answered("\\pi", "\\pi"), answered(" 18 ", "18 ")]) == [1.0, 1.0]
    assert reward._grader._process is None


def test_math_answer_reads_only_the_tag_unless_told(math_answer: MathAnswer) -> None:
    free = MathAnswer(tag=None)
    texts = [sample("So it is $\\frac{36}{2}$."), sample("First 18, but then 19.")]
    assert math_answer(texts) == [0.0, 0.0]
    assert free(texts) == [1.0, 0.0]


def test_math_answer_time_limit(caplog: pytest.LogCaptureFixture) -> None:
    """The power is computed inside one call of C, where no Python signal handler runs."""
    reward = MathAnswer(time_limit_s=0.5)
    endless = answered("9^{9^{9^9}}")
    assert reward([endless, answered("36/2"), endless, answered("36/2")]) == [0.0, 1.0, 0.0, 1.0]
    assert caplog.text.count("cannot be graded within the limits: '9^{9^{9^9}}'") == 2


def pid(reward: MathAnswer) -> int:
    assert reward._grader._process is not None
    return reward._grader._process.pid


def test_a_request_to_end_the_job_leaves_the_grading_process_at_work() -> None:
    reward = MathAnswer()
    assert reward([answered("36/2")]) == [1.0]
    first = pid(reward)
    os.kill(first, signal.SIGTERM)
    assert reward([answered("36/2"), answered("36/3")]) == [1.0, 0.0] and pid(reward) == first


@pytest.mark.parametrize("while_idle", [True, False])
def test_a_killed_grading_process_is_replaced_and_asked_again(while_idle: bool) -> None:
    reward = MathAnswer()
    assert reward([answered("36/2")]) == [1.0]
    first = pid(reward)
    os.kill(first, signal.SIGSTOP)  # it takes the question and never answers
    killing = threading.Timer(0.0 if while_idle else 0.3, os.kill, (first, signal.SIGKILL))
    killing.start()
    if while_idle:
        killing.join()
    assert reward([answered("36/2"), answered("36/3")]) == [1.0, 0.0] and pid(reward) != first


WORKER = Path(__file__).parent.parent / "qerl_pl" / "rewards" / "math_worker.py"


def test_the_grading_process_is_ended_by_its_processor_time() -> None:
    command = [sys.executable, "-P", str(WORKER), "0.3", "4096"]
    done = subprocess.run(command, input='["1", "9^{9^{9^9}}"]\n', stdout=subprocess.PIPE, text=True, check=False)
    assert done.stdout == "ready\n" and done.returncode == -signal.SIGPROF


@pytest.mark.parametrize(
    "attack",
    [
        "__import__('os').system('touch {file}')",
        "$__import__('os').system('touch {file}')$",
        "1 + open('{file}', 'w').write('1')",
        "\\text{{__import__('pathlib').Path('{file}').touch()}}",
        "\\operatorname{{open}}('{file}', 'w')",
        "(lambda: open('{file}', 'w'))()",
    ],
)
def test_answers_are_not_run(math_answer: MathAnswer, tmp_path: Path, attack: str) -> None:
    file = tmp_path / "written"
    assert math_answer([answered(attack.format(file=file))]) == [0.0]
    assert not file.exists()


@pytest.mark.parametrize(
    ("action", "denied"),
    [
        ("open({file!r}, 'w')", True),
        ("os.open({file!r}, os.O_RDWR | os.O_CREAT)", True),
        ("os.system('true')", True),
        ("__import__('subprocess').run(['true'])", True),
        ("os.fork()", True),
        ("__import__('socket').socket()", True),
        ("os.remove({file!r})", True),
        ("open(os.devnull).close()", False),
        ("__import__('sympy.physics.units')", False),
    ],
)
def test_what_the_grading_process_may_do(tmp_path: Path, action: str, denied: bool) -> None:
    """Were some parser to run an answer, this is all it could do."""
    code = (
        f"import os, sys, runpy; worker = runpy.run_path({str(WORKER)!r}); sys.addaudithook(worker['_deny'])\n"
        f"try:\n    {action.format(file=str(tmp_path / 'written'))}\n"
        "except PermissionError as error:\n    sys.exit(7 if 'grading may not do this' in str(error) else 1)\n"
    )
    result = subprocess.run([sys.executable, "-B", "-c", code], check=False)
    assert result.returncode == (7 if denied else 0)


def test_math_answer_ends_its_process() -> None:
    code = (
        "from qerl_pl.rewards import MathAnswer, RewardSample\n"
        "reward = MathAnswer()\n"
        "reward([RewardSample('', '<answer>1/2</answer>', '0.5', False, 1)])\n"
        "print(reward._grader._process.pid)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=WORKER.parents[2]
    )
    assert not Path(f"/proc/{int(done.stdout)}").exists()


@pytest.mark.parametrize("seconds", [0.0, math.inf, math.nan])
def test_math_answer_needs_a_limit(seconds: float) -> None:
    with pytest.raises(UserError, match="positive time_limit_s"):
        MathAnswer(time_limit_s=seconds)
