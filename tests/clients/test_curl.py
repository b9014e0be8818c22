"""curl: the bytes on the wire, as documented."""

import gzip
import json
import re
import subprocess

import pytest

from servers import LONG, PATIENCE, until

CLIENT = "curl"
CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "run of run"}], "max_tokens": 8, "temperature": 0}
JSON = ("-H", "Content-Type: application/json")


def command(*arguments):
    return ["curl", "--silent", "--show-error", "--no-buffer", "--max-time", str(PATIENCE), *arguments]


def curl(*arguments, body=None):
    """What it prints, as bytes; a body is read from stdin."""
    data = () if body is None else ("--data-binary", "@-")
    return subprocess.run(command(*arguments, *data), input=body, capture_output=True, check=True).stdout


def exchange(*arguments, body=None):
    """Status lines, headers of the last response, and its body."""
    head, _, rest = curl("--include", *arguments, body=body).partition(b"\r\n\r\n")
    statuses = [head.split(b"\r\n")[0]]
    while re.match(rb"HTTP/1\.1 \d", rest):
        head, _, rest = rest.partition(b"\r\n\r\n")
        statuses.append(head.split(b"\r\n")[0])
    lines = [line.partition(b": ") for line in head.split(b"\r\n")[1:]]
    headers = {name.decode().lower(): value.decode() for name, _, value in lines}
    return [int(status.split()[1]) for status in statuses], headers, rest


def ask(**more):
    return json.dumps({**ASK, **more}).encode()


def refused(answer, status, code):
    """The error of an answer, in OpenAI's shape."""
    statuses, headers, body = answer
    error = json.loads(body)["error"]
    assert (statuses[-1], error["code"]) == (status, code), error
    assert set(error) == {"message", "type", "param", "code"} and headers["content-type"] == "application/json"
    return error["message"]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_frames(toy, path):
    """server-sent events byte by byte: `data: {...}\\n\\n`, at last `data: [DONE]\\n\\n`"""
    body = ask(stream=True, n=2, logprobs=True) if path == CHAT else b'{"prompt": "run", "stream": true, "logprobs": 1}'
    statuses, headers, stream = exchange(*JSON, toy.url + path, body=body)
    assert (statuses, headers["content-type"]) == ([200], "text/event-stream")
    assert headers["cache-control"] == "no-cache"
    *frames, rest = stream.split(b"\n\n")
    assert rest == b"" and frames.pop() == b"data: [DONE]"
    assert all(frame.startswith(b"data: {") and b"\n" not in frame and b"\r" not in frame for frame in frames)
    chunks = [json.loads(frame.removeprefix(b"data: ")) for frame in frames]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk" if path == CHAT else "text_completion"}


def test_streams_as_it_comes(small):
    """with `-N`, an answer is seen while it is made; a curl that is killed cancels it"""
    until("nobody uses it", small.is_idle)
    line = command("-N", *JSON, "-d", json.dumps({**LONG, "stream": True}), small.url + CHAT)
    with subprocess.Popen(line, stdout=subprocess.PIPE) as process:
        first = process.stdout.readline()
        assert json.loads(first.removeprefix(b"data: "))["choices"][0]["delta"]["role"] == "assistant"
        until("it is not over", lambda: small.requests()["open"] == 1)
        process.kill()
    until("it is forgotten", small.is_idle)


def test_keep_alive(toy):
    """two requests on one connection, also after a stream"""
    quiet = ("--output", "/dev/null", "--write-out", "%{http_code} %{num_connects} %{http_version}\n")
    post = (*JSON, "-d", ask().decode(), toy.url + CHAT)
    stream = (*JSON, "-d", ask(stream=True).decode(), toy.url + CHAT)
    wrong = (*JSON, "-d", "{", toy.url + CHAT)
    requests = [post, stream, wrong, (toy.url + "/v1/nothing",), (toy.url + "/v1/models",)]
    arguments = [argument for request in requests for argument in ("--next", "--silent", *quiet, *request)][1:]
    lines = curl(*arguments).decode().splitlines()
    assert lines == ["200 1 1.1", "200 0 1.1", "400 0 1.1", "404 0 1.1", "200 0 1.1"]


def test_http_1_0(toy):
    """HTTP/1.0: no chunks, and the connection's end is the stream's"""
    output = curl("--include", "--http1.0", *JSON, "-d", ask(stream=True).decode(), toy.url + CHAT)
    head, _, stream = output.partition(b"\r\n\r\n")
    assert b" 200 OK" in head.split(b"\r\n")[0] and b"transfer-encoding" not in head.lower()
    assert stream.endswith(b"data: [DONE]\n\n")


def test_expect(toy):
    """`Expect: 100-continue` with a large body"""
    statuses, _, body = exchange(*JSON, "-H", "Expect: 100-continue", toy.url + CHAT, body=ask(user="x" * 3_000_000))
    assert statuses == [100, 200] and json.loads(body)["usage"]["completion_tokens"] == 8


def test_expect_too_large(toy):
    """`Expect: 100-continue` with a body that is too large: refused before it is sent"""
    answer = exchange(*JSON, "-H", "Expect: 100-continue", toy.url + CHAT, body=ask(user="x" * 9_000_000))
    assert "8388608" in refused(answer, 413, "request_too_large")
    assert answer[0] == [413], "not asked to go on"


def test_chunked_body(toy):
    """bodies of unknown length, too large ones among them"""
    chunked = ("-H", "Transfer-Encoding: chunked", "-H", "Expect:")
    statuses, _, body = exchange(*JSON, *chunked, toy.url + CHAT, body=ask())
    assert statuses == [200] and json.loads(body)["usage"]["completion_tokens"] == 8
    refused(exchange(*JSON, *chunked, toy.url + CHAT, body=ask(user="x" * 9_000_000)), 413, "request_too_large")


def test_content_type(toy):
    """another content type than JSON is refused with 415"""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/jsonx"):
        answer = exchange("-H", f"Content-Type: {kind}", toy.url + CHAT, body=ask())
        assert kind.split(";")[0] in refused(answer, 415, "unsupported_media_type")
    for kind in ("application/json; charset=utf-8", "Application/JSON"):
        assert exchange("-H", f"Content-Type: {kind}", toy.url + CHAT, body=ask())[0] == [200]


def test_compressed_body(toy):
    """a compressed body is refused with 415"""
    answer = exchange(*JSON, "-H", "Content-Encoding: gzip", toy.url + CHAT, body=gzip.compress(ask()))
    assert "gzip" in refused(answer, 415, "unsupported_media_type")
    assert answer[1]["accept-encoding"] == "identity"
    assert exchange(*JSON, "-H", "Content-Encoding: identity", toy.url + CHAT, body=ask())[0] == [200]


def test_not_json(toy):
    """a body that is no JSON"""
    for body in (b"", b"{", b'{"messages": "\xff"}', b"\0", ask() + b"{}", gzip.compress(ask())):
        refused(exchange(*JSON, toy.url + CHAT, body=body), 400, "invalid_json")
    assert exchange(*JSON, toy.url + CHAT, body=b" \n" + ask() + b"\n ")[0] == [200]


@pytest.mark.parametrize("path", ["/", "/health", "/ready", "/openapi.json", "/v1/models"])
def test_head(toy, path):
    """HEAD: the headers of GET, and no body"""
    statuses, of_get, body = exchange(toy.url + path)
    head = exchange("--head", toy.url + path)
    assert statuses == head[0] == [200] and body and not head[2]
    assert head[1]["content-type"] == of_get["content-type"]


def test_options(toy):
    """OPTIONS: 405 with Allow, and no CORS"""
    for path, allowed in ((CHAT, {"POST"}), ("/v1/models", {"GET", "HEAD"})):
        answer = exchange("-X", "OPTIONS", toy.url + path)
        refused(answer, 405, "method_not_allowed")
        assert set(answer[1]["allow"].split(",")) == allowed
    preflight = ("-H", "Origin: http://evil.example", "-H", "Access-Control-Request-Method: POST")
    answer = exchange("-X", "OPTIONS", *preflight, toy.url + CHAT)
    refused(answer, 403, "forbidden")
    assert not any(name.startswith("access-control") for name in answer[1])


def test_header_too_large(toy):
    """headers that are too large: 431, and the server goes on"""
    large = [argument for name in "abc" for argument in ("-H", f"X-{name}: {'x' * 100_000}")]
    many = [argument for index in range(200) for argument in ("-H", f"X-{index}: x")]
    for headers in (large, many):
        assert exchange(*headers, toy.url + "/v1/models")[0] == [431]
    assert exchange(toy.url + "/v1/models")[0] == [200]


def test_key(keyed):
    """the key: 401 with WWW-Authenticate; `/health`, `/ready`, `/` and the document need none"""
    answer = exchange(keyed.url + "/v1/models")
    refused(answer, 401, "invalid_api_key")
    assert answer[1]["www-authenticate"].startswith("Bearer")
    assert exchange("--oauth2-bearer", keyed.key, keyed.url + "/v1/models")[0] == [200]
    for path in ("/", "/health", "/ready", "/openapi.json"):
        assert exchange(keyed.url + path)[0] == [200]
    assert exchange(keyed.url + "/metrics")[0] == [401]


def test_pipeline_events(toy):
    """`/v1/pipeline/events`, as they come"""
    with subprocess.Popen(command("-N", toy.url + "/v1/pipeline/events"), stdout=subprocess.PIPE) as process:
        kinds = []
        while len(kinds) < 4:
            line = process.stdout.readline()
            assert line.startswith(b"data: {") and process.stdout.readline() == b"\n"
            kinds.append(json.loads(line.removeprefix(b"data: "))["type"])
        process.kill()
    assert kinds[0] == "pipeline" and "tick" in kinds


def test_metrics(toy):
    """`/metrics`, as Prometheus reads them"""
    exchange(*JSON, toy.url + CHAT, body=ask())
    statuses, headers, body = exchange(toy.url + "/metrics")
    assert statuses == [200] and headers["content-type"].startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")
    assert re.search(rb'^pp_run_responses_total\{path="/v1/chat/completions",status="200"\} [1-9]', body, re.MULTILINE)
