"""A judge's grades from a real server of this process, which counts what it is asked."""

import asyncio
import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fit_helpers import free_port
from test_killed import in_a_fork

from qerl_pl.errors import UserError
from qerl_pl.rewards import GSM8KAnswer, JudgeReward, RewardSample, score
from qerl_pl.rewards.judge import PARSER, _Endpoint, _Replies

KEY = "sk-secret-5b1d"

Answer = Callable[[int, str], "str | tuple[int, str]"]
"""(number of the request, prompt) -> the reply's text, or status and body."""


class Server(ThreadingHTTPServer):
    """An OpenAI-compatible endpoint on a port of its own."""

    daemon_threads = True

    def __init__(self, answer: Answer, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.answer = answer
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.now = self.most = 0
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of requests that the reward cancels."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.asked.append(body)
            server.keys.append(self.headers["Authorization"])
            number = len(server.asked)
            server.now += 1
            server.most = max(server.most, server.now)
        answer = server.answer(number, body["messages"][0]["content"])
        with server.lock:
            server.now -= 1
        status, text = answer if isinstance(answer, tuple) else (200, said(answer))
        if self.path != "/v1/chat/completions":
            status, text = 404, "no such page"
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


def said(text: str | None, **choice: str | None) -> str:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}, **choice}]})


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def started(answer: Answer = lambda number, prompt: "Fine.\nScore: 7", port: int = 0) -> Server:
        servers.append(Server(answer, port))
        return servers[-1]

    yield started
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QERL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr("qerl_pl.runtime.backoff.FIRST_PAUSE_S", 0.01)


def samples(*completions: str, **columns: Any) -> list[RewardSample]:
    return [
        RewardSample("2 + 2?", text, "4", False, 3, prompt_id=f"row-{index}", columns=columns)
        for index, text in enumerate(completions)
    ]


def grades(reward: JudgeReward, asked: list[RewardSample]) -> list[float | None]:
    return asyncio.run(reward(asked))


def test_the_rubric_is_rendered_and_the_number_is_scaled(serve: Callable[..., Server]) -> None:
    server = serve()
    template = "Q {question} A {completion} R {reference} L {level} {completion} {not a name} {} {{level}}"
    reward = JudgeReward(server.url + "/", "grader", template, scale=0.5, max_tokens=9, temperature=0.25)
    assert grades(reward, samples("{level} is 4", level=3)) == [3.5]
    prompt = "Q 2 + 2? A {level} is 4 R 4 L 3 {level} is 4 {not a name} {} {3}"
    message = {"role": "user", "content": prompt}
    assert server.asked == [{"model": "grader", "messages": [message], "temperature": 0.25, "max_tokens": 9}]
    assert server.keys == [None]
    bare = JudgeReward(server.url, "grader", "{completion}", temperature=None, max_tokens=None)
    assert grades(bare, samples("four")) == [pytest.approx(0.7)]
    assert server.asked[1] == {"model": "grader", "messages": [{"role": "user", "content": "four"}]}


def test_the_default_rubric_shows_everything_and_has_zero_temperature(serve: Callable[..., Server]) -> None:
    server = serve()
    assert grades(JudgeReward(server.url, "grader"), samples("it is four")) == [pytest.approx(0.7)]
    (request,) = server.asked
    prompt = request["messages"][0]["content"]
    assert [prompt.count(f"<{tag}>\n{text}\n</{tag}>") for tag, text in
            (("question", "2 + 2?"), ("reference", "4"), ("answer", "it is four"))] == [1, 1, 1]  # fmt: skip
    assert (request["temperature"], request["max_tokens"]) == (0.0, 512)


def test_its_connections_are_closed_also_after_a_failure(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    clients: list[httpx2.AsyncClient] = []

    class Noted(httpx2.AsyncClient):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            clients.append(self)

    monkeypatch.setattr(httpx2, "AsyncClient", Noted)
    assert grades(JudgeReward(serve().url, "grader"), samples("four")) == [pytest.approx(0.7)]
    with pytest.raises(UserError, match="status 403"):
        grades(JudgeReward(serve(lambda number, prompt: (403, "no")).url, "grader"), samples("five"))
    assert [client.is_closed for client in clients] == [True, True]


def test_equal_questions_are_asked_once_and_values_come_in_order(serve: Callable[..., Server]) -> None:
    server = serve(lambda number, prompt: f"Score: {len(prompt)}")
    reward = JudgeReward(server.url, "grader", "{completion}", scale=1.0)
    assert grades(reward, samples("abc", "a", "abc", "ab", "a")) == [3, 1, 3, 2, 1]
    asked = Counter(request["messages"][0]["content"] for request in server.asked)
    assert asked == {"abc": 1, "a": 1, "ab": 1}


def test_no_more_than_so_many_requests_at_a_time(serve: Callable[..., Server]) -> None:
    together, hold = threading.Barrier(3), threading.Event()

    def answer(number: int, prompt: str) -> str:
        together.wait(timeout=30)  # three are here at once
        hold.wait(timeout=0.05)  # others would be, too, if they could
        return "Score: 1"

    server = serve(answer)
    reward = JudgeReward(server.url, "grader", concurrency=3)
    assert grades(reward, samples(*map(str, range(12)))) == [pytest.approx(0.1)] * 12
    assert (server.most, len(server.asked)) == (3, 12)


@pytest.mark.parametrize("status", [429, 503])
def test_what_may_pass_is_asked_again(
    serve: Callable[..., Server], status: int, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve(lambda number, prompt: (status, "busy\nnow") if number < 5 else "Score: 2")
    reward = JudgeReward(server.url, "grader", retries=0)  # patience is left
    assert grades(reward, samples("a")) == [pytest.approx(0.2)] and len(server.asked) == 5
    (record,) = (record for record in caplog.records if record.name == "qerl_pl.rewards.judge")
    assert f"fails (status {status}: busy now): asking again for 300 s" in record.getMessage()


@pytest.mark.parametrize("retries", [0, 3])
def test_without_patience_left_retries_are_used_up_and_the_run_stops(
    serve: Callable[..., Server], retries: int
) -> None:
    server = serve(lambda number, prompt: (500, "broken"))
    reward = JudgeReward(server.url, "grader", retries=retries, patience_s=0)
    with pytest.raises(UserError, match=rf"within patience_s=0 and {retries} retries; .* \(status 500: broken\)"):
        grades(reward, samples("a"))
    assert len(server.asked) == retries + 1


def test_a_request_has_a_time_limit(serve: Callable[..., Server]) -> None:
    done = threading.Event()

    def answer(number: int, prompt: str) -> str:
        if number == 1:
            done.wait(timeout=30)
        return "Score: 4"

    server = serve(answer)
    assert grades(JudgeReward(server.url, "grader", time_limit_s=5.0), samples("a")) == [pytest.approx(0.4)]
    assert len(server.asked) == 2
    done.set()


def test_an_endpoint_that_stays_away_stops_the_run_with_one_line() -> None:
    url = f"http://127.0.0.1:{free_port()}/v1"
    reward = JudgeReward(url, "grader", retries=1, patience_s=0.05)
    with pytest.raises(UserError) as raised:
        score([GSM8KAnswer(), reward], samples("a", "b"))
    line = str(raised.value)
    assert line.startswith(
        f"the judge must answer within patience_s=0.05 and 1 retries; {url}/chat/completions does not (ConnectError "
    )
    assert line.endswith("start it again, or raise the reward's patience_s") and "\n" not in line


@pytest.mark.parametrize(
    ("status", "key", "remedy"),
    [
        (401, KEY, "correct the key in OPENAI_API_KEY"),
        (401, None, "set the key in OPENAI_API_KEY, which is not set"),
        (403, KEY, "correct the key in OPENAI_API_KEY"),
        (404, KEY, "correct the reward's url, or its model 'grader'"),
        (400, KEY, "correct the reward's url, model or template"),
    ],
)
def test_a_refusal_stops_the_run_at_once_and_does_not_show_the_key(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, status: int, key: str | None, remedy: str
) -> None:
    if key is not None:
        monkeypatch.setenv("OPENAI_API_KEY", f"{key}\n")
    server = serve(lambda number, prompt: (status, f'{{"error":\n "refused: {KEY if key else ""}"}}'))
    with pytest.raises(UserError) as raised:
        score([JudgeReward(server.url, "grader", concurrency=1)], samples("a", "b", "c"))
    shown = '{"error": "refused: [key]"}' if key else '{"error": "refused: "}'
    assert str(raised.value) == (
        f"the judge's endpoint must accept requests; {server.url}/chat/completions gives status {status}: {shown}; "
        f"{remedy}"
    )
    asked = 4 if status == 400 else 1  # a refusal may be of one completion: all, and the template without its values
    assert server.keys == [key and f"Bearer {key}"] * asked


def test_the_key_is_sent_and_nowhere_else(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("MY_KEY", KEY)
    server = serve()
    reward = JudgeReward(server.url, "grader", api_key_env="MY_KEY")
    assert grades(reward, samples("a")) == [pytest.approx(0.7)]
    assert server.keys == [f"Bearer {KEY}"]
    assert KEY not in repr(vars(reward)) and KEY not in caplog.text
    assert all(KEY.encode() not in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    monkeypatch.setenv("MY_KEY", "sk-\nsecret")
    with pytest.raises(UserError, match="that in MY_KEY is not") as raised:
        grades(reward, samples("b"))
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("body", ["<html>hello</html>", "[]", '{"choices": []}', '{"choices": [{"text": "Score: 1"}]}'])
def test_another_kind_of_endpoint_stops_the_run(serve: Callable[..., Server], body: str) -> None:
    server = serve(lambda number, prompt: (200, body))
    with pytest.raises(UserError, match="must reply as OpenAI's chat completions do; .*correct the reward's url"):
        grades(JudgeReward(server.url, "grader"), samples("a"))
    assert len(server.asked) == 1


def test_a_reply_without_a_number_is_asked_for_once_more_and_then_none(
    serve: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    def answer(number: int, prompt: str) -> str | tuple[int, str]:
        first = sum(request["messages"][0]["content"] == prompt for request in server.asked) == 1
        replies = {"never": "I cannot say", "late": "Hm" if first else "Score: 6", "refused": (200, said(None))}
        return replies.get(prompt, "Score: 5")

    server = serve(answer)
    reward = JudgeReward(server.url, "grader", "{completion}")
    texts = "never", "late", "good", "never", "refused"
    expected = [None, pytest.approx(0.6), pytest.approx(0.5), None, None]
    assert grades(reward, samples(*texts)) == expected
    asked = Counter(request["messages"][0]["content"] for request in server.asked)
    assert asked == {"never": 2, "late": 2, "good": 1, "refused": 2}
    (record,) = caplog.records
    assert "reward judge: 2 of 4 replies of the judge have no number" in record.getMessage()
    assert "'I cannot say'" in record.getMessage()
    assert grades(reward, samples(*texts)) == expected and len(server.asked) == 7  # kept as well


@pytest.mark.parametrize(
    ("status", "body", "texts"),
    [
        (400, "maximum context length is 4096 tokens", "refuse a b"),
        (400, '{"error": {"code": "content_filter"}}', "a refuse b"),
        (413, "too large", "refuse"),
        (422, "input validation error", "refuse a refuse"),
    ],
)
def test_a_completion_that_the_endpoint_refuses_has_no_grade_and_the_run_goes_on(
    serve: Callable[..., Server], caplog: pytest.LogCaptureFixture, status: int, body: str, texts: str
) -> None:
    server = serve(lambda number, prompt: (status, body) if "refuse" in prompt else "Score: 5")
    expected = [None if text.startswith("refuse") else pytest.approx(0.5) for text in texts.split()]
    reward = JudgeReward(server.url, "grader", "Grade: {completion}")
    assert grades(reward, samples(*texts.split())) == expected
    refused, asked = len({text for text in texts.split() if "refuse" in text}), len(set(texts.split()))
    assert f"the judge refuses {refused} of {asked} requests (status {status}: {body})" in caplog.text
    count = len(server.asked)
    assert grades(reward, samples(*texts.split())) == expected and len(server.asked) == count  # nor at a resume


GRADE = r"<grade>(.*?)</grade>"


@pytest.mark.parametrize(
    ("reply", "value", "parser"),
    [
        ("The answer says Score: 10, which is wrong.\nScore: 0", 0.0, PARSER),
        ("**Score:** 8.5", 0.85, PARSER),
        ("score = 10/10.", 1.0, PARSER),
        *((reply, None, PARSER) for reply in ("Score: 85", "Score: 100", "Score: 10.5", "Score: -3", "7", "")),
        ("<grade>1</grade> <grade> 2e1 </grade>", 2.0, GRADE),
        *((f"<grade>{number}</grade>", None, GRADE) for number in ("two", "nan", "inf")),
        ("1 and -5", -0.5, r"(-?\d+)"),
        ("x", None, r"x(\d)?"),
        # Behind the reasoning.
        ("<think>Score: 9, or rather</think>Score: 2", 0.2, PARSER),
        ("<think>\nScore: 9</think>\nI cannot say", None, PARSER),
        ("<think>Let me see. Score: 9", None, PARSER),
        ("Maybe Score: 9\n</think>\n\nScore: 1", 0.1, PARSER),
        ("<think>a</think> Score: 3 <think>b Score: 8</think> Score: 4", 0.4, PARSER),
        ("<reasoning>Score: 10</reasoning> Score: 0", 0.0, PARSER),
        ("[THINK]Score: 10[/THINK]Score: 6", 0.6, PARSER),
        (
            "<|channel|>analysis<|message|>Score: 9<|end|><|start|>assistant<|channel|>final<|message|>Score: 5",
            0.5,
            PARSER,
        ),
        ("<|channel|>analysis<|message|>Score: 9", None, PARSER),
        ("It writes <think> twice. Score: 7", 0.7, PARSER),
    ],
)
def test_a_verdict_is_the_last_number_of_the_pattern_behind_the_reasoning(
    reply: str, value: float | None, parser: str
) -> None:
    found = JudgeReward("http://localhost", "grader", parser=parser)._grade(reply)
    assert found == (value if value is None else pytest.approx(value))


@pytest.mark.parametrize(
    ("reason", "value"),
    [("stop", 0.7), (None, 0.7), ("eos_token", 0.7)]
    + [(reason, None) for reason in ("length", "content_filter", "tool_calls", "abort", "max_tokens")],
)
def test_a_verdict_comes_from_a_complete_reply(
    serve: Callable[..., Server], caplog: pytest.LogCaptureFixture, reason: str | None, value: float | None
) -> None:
    server = serve(lambda number, prompt: (200, said("It earns\nScore: 7", finish_reason=reason)))
    expected = [None if value is None else pytest.approx(value)]
    assert grades(JudgeReward(server.url, "grader"), samples("a")) == expected
    assert len(server.asked) == 1 + (value is None)
    assert (f"cut off (finish_reason {reason}) and have no grade; raise max_tokens" in caplog.text) == (value is None)


# The cache -----------------------------------------------------------------------------------------------------------


def test_a_second_run_asks_nothing_that_its_reply_depends_on(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve(lambda number, prompt: f"Score: {number}")
    first = grades(JudgeReward(server.url, "grader", concurrency=1), samples("a", "b"))
    assert grades(JudgeReward(server.url, "grader"), samples("b", "a")) == first[::-1] and len(server.asked) == 2
    other = JudgeReward(server.url, "grader", parser=r"Sco(?=re: (\d))", scale=1.0, weight=3.0, name="x", patience_s=1)
    assert grades(other, samples("a")) == [1.0] and len(server.asked) == 2  # the reply is kept, not the value
    changed: list[dict[str, Any]] = [{"model": "y"}, {"temperature": 0.5}, {"max_tokens": 99}, {"url": server.url[:-3]}]
    changed += [{"template": "{completion}"}, {"cache": str(tmp_path / "elsewhere")}]
    for count, settings in enumerate(changed, start=3):
        given = {"url": server.url, "model": "grader"} | settings
        if "url" in settings:
            with pytest.raises(UserError, match="404"):
                grades(JudgeReward(**given), samples("a"))
        else:
            grades(JudgeReward(**given), samples("a"))
        assert len(server.asked) == count
    assert (tmp_path / "cache" / "judge" / "replies.sqlite").is_file()
    assert (tmp_path / "elsewhere" / "replies.sqlite").is_file()


def test_what_was_answered_before_the_endpoint_went_away_is_not_asked_again(serve: Callable[..., Server]) -> None:
    server = serve(lambda number, prompt: "Score: 9" if number < 4 or number > 6 else (500, "away"))
    reward = JudgeReward(server.url, "grader", concurrency=1, retries=2, patience_s=0)
    texts = samples("a", "b", "c", "d", "e")
    with pytest.raises(UserError, match="500: away"):
        grades(reward, texts)
    assert len(server.asked) == 6
    assert grades(reward, texts) == [pytest.approx(0.9)] * 5 and len(server.asked) == 8  # d and e


def test_several_processes_keep_replies_at_the_same_time(tmp_path: Path) -> None:
    def keep(name: str) -> None:
        replies = _Replies(tmp_path)
        for number in range(100):
            replies.put(f"key-{number}", name)
        os._exit(0)

    def both() -> None:
        child = os.fork()
        if child == 0:
            keep("child")
        status = in_a_fork(lambda: keep("other"))
        assert status == 0 and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    assert in_a_fork(both) == 0
    replies = _Replies(tmp_path)
    kept = [replies.get(f"key-{number}") for number in range(101)]
    assert set(kept[:100]) <= {"child", "other"} and kept[100] is None
    assert replies.put("key-0", "a third") == kept[0] == replies.get("key-0")  # the first one counts, for every rank
    replies.close()


def test_a_cache_that_takes_nothing_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "replies.sqlite").write_text("not a database, and long enough to be seen as none" * 99)
    for name, found in (("file", "File exists"), ("broken", "file is not a database")):
        reward = JudgeReward("http://127.0.0.1:1/v1", "grader", cache=str(tmp_path / name))
        with pytest.raises(UserError, match=f"^reward 'judge' raised .*{found}"):
            score([reward], samples("a"))


# Settings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "localhost:8000/v1"}, "url is a base URL; got 'localhost:8000/v1'; set http://localhost:8000/v1, say"),
        ({"template": "grade {question}"}, r"template must hold \{completion\}; got 'grade \{question\}'; put it in"),
        ({"parser": "Score"}, "one group, the number; got 'Score' with 0; correct it"),
        ({"parser": "(Score"}, r"got '\(Score' \(missing \), .*\); correct it"),
        ({"concurrency": 0}, "JudgeReward.concurrency must be at least 1; got 0"),
        ({"retries": -1}, "JudgeReward.retries must be at least 0; got -1"),
        ({"time_limit_s": 0.0}, "time_limit_s must be above 0 and patience_s at least 0; got 0.0 and 300"),
        ({"patience_s": float("nan")}, "got 60.0 and nan"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        JudgeReward(**{"url": "http://localhost", "model": "grader"} | settings)


def test_a_column_that_a_row_lacks_is_named() -> None:
    reward = JudgeReward("http://127.0.0.1:1/v1", "grader", "{completion} {rubric}")
    with pytest.raises(UserError, match=r"row row-0 has no 'rubric'; choose among \['completion', 'level', 'question'"):
        grades(reward, samples("a", level=3))


@pytest.mark.parametrize(
    ("url", "named", "variable"),
    [
        ("https://api.openai.com/v1", None, "OPENAI_API_KEY"),
        ("http://127.0.0.1:8000/v1", None, "OPENAI_API_KEY"),
        ("http://api.openai.com/v1", None, None),
        ("https://api.openai.com@judge.example/v1", None, None),
        ("https://api-openai.com/v1", None, None),
        ("https://openai.com.judge.example/v1", None, None),
        ("http://gpu-7:8000/v1", None, None),
        ("https://judge.example/v1", "MY_KEY", "MY_KEY"),
        ("http://gpu-7:8000/v1", "NOT_SET", "NOT_SET"),
    ],
)
def test_a_key_goes_to_its_own_host(
    monkeypatch: pytest.MonkeyPatch, url: str, named: str | None, variable: str | None
) -> None:
    for name in ("OPENAI_API_KEY", "MY_KEY"):
        monkeypatch.setenv(name, KEY)
    endpoint = _Endpoint(JudgeReward(url, "grader", api_key_env=named))
    sent = endpoint._client.headers.get("Authorization")
    assert endpoint._variable == variable and sent == (f"Bearer {KEY}" if variable not in (None, "NOT_SET") else None)


@pytest.mark.parametrize(
    ("url", "named", "message"),
    [
        ("http://judge.example/v1", "MY_KEY", "JudgeReward.url is http to judge.example, with the key in MY_KEY; use"),
        ("http://localhost@judge.example/v1", "MY_KEY", "is http to judge.example, with"),
        ("http://api.openai.com/v1", "OPENAI_API_KEY", "is http to api.openai.com, with the key in OPENAI_API_KEY"),
        ("https://judge.example/v1", "sk-1234", "api_key_env names a variable; got other text; set the variable"),
    ],
)
def test_a_key_is_not_sent_in_the_clear(monkeypatch: pytest.MonkeyPatch, url: str, named: str, message: str) -> None:
    for name in ("OPENAI_API_KEY", "MY_KEY"):
        monkeypatch.setenv(name, KEY)
    with pytest.raises(UserError, match=message) as raised:
        JudgeReward(url, "grader", api_key_env=named)
    assert KEY not in str(raised.value) and "1234" not in str(raised.value)


def test_a_password_of_the_url_is_in_no_message(serve: Callable[..., Server]) -> None:
    server = serve(lambda number, prompt: (404, "no"))
    with pytest.raises(UserError) as raised:
        score([JudgeReward(server.url.replace("//", "//me:hunter2@"), "grader")], samples("a"))
    assert "hunter2" not in str(raised.value) and f"; {server.url}/chat" in str(raised.value)
