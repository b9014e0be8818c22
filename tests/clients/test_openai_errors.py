"""OpenAI's client for Python: what is refused, and how clients see it."""

import asyncio
import contextlib
import signal
import threading
import time
import warnings

import openai
import pytest

from conftest import connect
from servers import LONG, TINY, started, until

CLIENT = "openai Python"
MODEL = "llama-tied"
MESSAGES = [{"role": "user", "content": "run"}]
ASK = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4}


def refused(kind, call, status, code, param=None):
    """The error of a call, in OpenAI's shape."""
    with pytest.raises(openai.APIStatusError) as caught:
        call()
    error = caught.value
    found = (type(error), error.status_code, error.code, error.param)
    assert found == (kind, status, code, param), f"{found}: {error}"
    assert set(error.body) >= {"message", "type", "param", "code"} and error.body["message"] and error.type
    assert error.request_id, "it has a name"
    return error


BAD = [
    ({"temperature": -1}, "temperature", "invalid_value"),
    ({"temperature": "hot"}, "temperature", "invalid_value"),
    ({"top_p": 0}, "top_p", "invalid_value"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 10_000}, "n", "invalid_value"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"stop": [""]}, "stop", "invalid_value"),
    ({"seed": 0.5}, "seed", "invalid_value"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"100000": 1}}, "logit_bias", "invalid_value"),
    ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_value"),
    ({"messages": [{"role": "user", "content": "run of " * 800}]}, "messages", "context_length_exceeded"),
    ({"extra_body": {"temprature": 1}}, "temprature", "unknown_parameter"),
    ({"audio": {"voice": "alloy", "format": "wav"}}, "audio", "unsupported_parameter"),
    ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
    ({"prediction": {"type": "content", "content": "a"}}, "prediction", "unsupported_parameter"),
    ({"web_search_options": {}}, "web_search_options", "unsupported_parameter"),
    ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
]


@pytest.mark.parametrize(("fields", "param", "code"), BAD, ids=[f"{param}-{code}" for _, param, code in BAD])
def test_bad_request(client, fields, param, code):
    """`BadRequestError` with `param`"""
    refused(openai.BadRequestError, lambda: client.chat.completions.create(**{**ASK, **fields}), 400, code, param)


def test_bad_request_of_stream(client):
    """`BadRequestError` with `param` before a stream begins"""
    ask = {**ASK, "top_p": 7, "stream": True}
    refused(openai.BadRequestError, lambda: client.chat.completions.create(**ask), 400, "invalid_value", "top_p")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [["user", "run"]]}, "messages[0]"),
        ({"stream": True, "stream_options": [True, None]}, "stream_options"),
        ({"logit_bias": [1]}, "logit_bias"),
    ],
)
def test_array_for_object(client, fields, param):
    """arrays in the place of objects are refused by name"""
    call = lambda: client.chat.completions.create(**{**ASK, **fields})  # noqa: E731
    refused(openai.BadRequestError, call, 400, "invalid_value", param)


def test_array_for_body(client):
    """an array in the place of the body is refused"""
    for path, fields in (("/completions", [None, "run", 2]), ("/chat/completions", [None, [["user", "run"]]])):
        for length in range(len(fields), 48):
            body = fields + [None] * (length - len(fields))
            call = lambda: client.post(path, body=body, cast_to=object)  # noqa: B023, E731
            refused(openai.BadRequestError, call, 400, "invalid_value", "body")


def test_image(client):
    """images are refused by name"""
    content = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]
    ask = {**ASK, "messages": [{"role": "user", "content": content}]}
    error = refused(
        openai.BadRequestError, lambda: client.chat.completions.create(**ask), 400, "invalid_value", "messages[0].content[1].type"
    )
    assert "image_url" in error.message


def test_completion_refused(client):
    """`echo`, `suffix` and `best_of` of completions are refused by name"""
    ask = {"model": MODEL, "prompt": "run", "max_tokens": 2}
    for fields, param in (({"echo": True}, "echo"), ({"suffix": "x"}, "suffix"), ({"best_of": 3}, "best_of")):
        call = lambda fields=fields: client.completions.create(**ask, **fields)  # noqa: E731
        refused(openai.BadRequestError, call, 400, "unsupported_parameter", param)


def test_embeddings(client):
    """embeddings are refused"""
    call = lambda: client.embeddings.create(model=MODEL, input="run")  # noqa: E731
    assert "embeddings" in refused(openai.BadRequestError, call, 400, "unsupported_parameter", "model").message


def test_authentication(keyed):
    """`AuthenticationError` without the key"""
    for key in ("wrong", keyed.key[:-1], keyed.key + "x"):
        with connect(keyed, api_key=key) as client:
            refused(openai.AuthenticationError, lambda: client.chat.completions.create(**ASK), 401, "invalid_api_key")
            refused(openai.AuthenticationError, client.models.list, 401, "invalid_api_key")
    with connect(keyed) as client:
        none = {"Authorization": openai.Omit()}
        call = lambda: client.chat.completions.create(**ASK, extra_headers=none)  # noqa: E731
        refused(openai.AuthenticationError, call, 401, "invalid_api_key")
        assert client.chat.completions.create(**ASK).choices


@pytest.mark.parametrize("path", ["/chat/completions", "/nothing", "/embeddings", "/models"])
def test_refused_before_body(keyed, path):
    """a request that is refused before its body has come spoils no connection"""

    def late():
        time.sleep(0.3)
        yield b'{"model": "llama-tied"}'

    def port(response):
        return response.extensions["network_stream"].get_extra_info("client_addr")

    with connect(keyed, api_key="wrong") as client:
        response = client._client.post(path, content=late(), headers={"content-type": "application/json"})
        assert response.status_code in (401, 404, 405) and response.json()["error"]["message"]
        after = client._client.get("/models")
        # Either it says that the connection ends, or the next request takes the same.
        assert response.headers.get("connection") == "close" or port(after) == port(response)


def test_no_such_model(client):
    """`NotFoundError` for another model"""
    for call in (
        lambda: client.chat.completions.create(**{**ASK, "model": "gpt-5"}),
        lambda: client.completions.create(model="gpt-5", prompt="a"),
        lambda: client.models.retrieve("gpt-5"),
    ):
        assert "gpt-5" in refused(openai.NotFoundError, call, 404, "model_not_found", "model").message


def test_no_such_path(client):
    """`NotFoundError` for other APIs: responses, assistants, files, images"""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for call in (
            lambda: client.responses.create(model=MODEL, input="run"),
            lambda: client.beta.assistants.list(),
            lambda: client.files.list(),
            lambda: client.images.generate(prompt="run"),
        ):
            refused(openai.NotFoundError, call, 404, "unknown_url")


def test_forbidden(client):
    """`PermissionDeniedError` for another site's name"""
    call = lambda: client.models.list(extra_headers={"Host": "evil.example"})  # noqa: E731
    refused(openai.PermissionDeniedError, call, 403, "forbidden")


def test_too_large(slow):
    """`APIStatusError` 413 for a body that is too large"""
    error = refused(openai.APIStatusError, lambda: slow.chat.completions.create(**LONG, user="x" * 5000), 413, "request_too_large")
    assert "4096" in error.message


@contextlib.contextmanager
def full(server, client):
    """One answer runs and one waits; gives what ends both."""
    with contextlib.ExitStack() as streams:
        streams.enter_context(client.chat.completions.create(**LONG, stream=True))
        until("one runs", lambda: server.requests()["running"] == 1)
        # It opens once it is taken, before there is a place for it.
        streams.enter_context(client.chat.completions.create(**LONG, stream=True))
        until("one waits", lambda: server.requests()["waiting"] == 1)
        yield streams.close


def test_rate_limit(small, slow):
    """`RateLimitError` with Retry-After when the queue is full"""
    with full(small, slow):
        error = refused(openai.RateLimitError, lambda: slow.chat.completions.create(**LONG), 429, "queue_full")
    assert 1 <= int(error.response.headers["retry-after"]) <= 3600


def test_retries(small, slow, monkeypatch):
    """a full queue is retried after Retry-After"""
    slept = []
    answers = []
    with full(small, slow) as empty, connect(small, max_retries=3) as patient:
        patient._client.event_hooks["response"] = [lambda response: answers.append(response)]

        def sleep(seconds):
            slept.append(seconds)
            empty()
            until("there is a place", small.is_idle)

        monkeypatch.setattr("openai._base_client.time.sleep", sleep)
        answer = patient.chat.completions.create(**{**LONG, "max_tokens": 1})
    assert [response.status_code for response in answers] == [429, 200]
    assert slept == [float(answers[0].headers["retry-after"])]
    assert answers[1].request.headers["x-stainless-retry-count"] == "1"
    assert answer.usage.completion_tokens == 1


def test_stopping():
    """`InternalServerError` 503 when the server stops; what has begun ends"""
    with started("-m", str(TINY / "llama-33"), "--device", "reference") as (server, process), connect(server) as client:
        stream = client.chat.completions.create(**{**LONG, "max_tokens": 60}, stream=True)
        until("it runs", lambda: server.requests()["running"] == 1)
        process.send_signal(signal.SIGTERM)
        until("it stops", lambda: server.get("/ready").status_code == 503)
        refused(openai.InternalServerError, lambda: client.chat.completions.create(**LONG), 503, "server_stopping")
        ends = [chunk.choices[0].finish_reason for chunk in stream]
        assert ends[-1] in ("stop", "length") and ends[:-1] == [None] * (len(ends) - 1)
        client.close()
        assert process.wait(30) == 0


def cancelled(server):
    return server.metric('answers_total{outcome="Cancelled"}')


def test_cancel(small, slow):
    """a stream that is closed is cancelled"""
    before = cancelled(small)
    with slow.chat.completions.create(**LONG, stream=True) as stream:
        next(iter(stream))
        until("it is open", lambda: small.requests()["open"] == 1)
    until("nothing is open", small.is_idle)
    assert cancelled(small) == before + 1


def test_cancel_task(small, slow):
    """a task that is cancelled cancels its request"""
    before = cancelled(small)

    async def give_up():
        async with openai.AsyncOpenAI(base_url=small.v1, api_key="none", max_retries=0) as client:
            task = asyncio.create_task(client.chat.completions.create(**LONG))
            while small.requests()["open"] == 0:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(give_up())
    until("nothing is open", small.is_idle)
    assert cancelled(small) == before + 1


def test_timeout(small, slow):
    """a client that waits no longer is forgotten"""
    before = cancelled(small)
    with pytest.raises(openai.APITimeoutError):
        slow.with_options(timeout=0.2).chat.completions.create(**LONG)
    until("nothing is open", small.is_idle)
    assert cancelled(small) == before + 1


def test_many_cancelled(small, slow):
    """streams that are closed at any time leave nothing behind"""
    def one(delay):
        with connect(small, max_retries=20) as client, client.chat.completions.create(**LONG, stream=True) as stream:
            for _, _ in zip(range(delay), stream):
                pass

    threads = [threading.Thread(target=one, args=(delay,)) for delay in (0, 1, 2, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until("nothing is open", small.is_idle)
