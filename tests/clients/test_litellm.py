"""litellm, as a client of an OpenAI-compatible server."""

import asyncio

import litellm
import pytest

from servers import LONG, until

CLIENT = "litellm"
MESSAGES = [{"role": "user", "content": "run of run"}]
ASK = {"model": "openai/llama-tied", "messages": MESSAGES, "max_tokens": 12, "temperature": 0, "num_retries": 0}


@pytest.fixture
def at(toy):
    return {"api_base": toy.v1, "api_key": "none"}


def content(answer):
    return answer.choices[0].message.content


def test_chat(at, client):
    """chat"""
    answer = litellm.completion(**ASK, **at)
    direct = client.chat.completions.create(model="llama-tied", messages=MESSAGES, max_tokens=12, temperature=0)
    assert content(answer) == content(direct)
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 12)


def test_streamed(at):
    """chat, streamed"""
    chunks = list(litellm.completion(**ASK, **at, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == content(litellm.completion(**ASK, **at))
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]


def test_usage(at):
    """`stream_options.include_usage`"""
    *_, last = litellm.completion(**ASK, **at, stream=True, stream_options={"include_usage": True})
    assert last.usage.completion_tokens == 12 and last.usage.prompt_tokens > 0


def test_parallel(at):
    """16 requests at once, each as alone"""
    asks = [{**ASK, "messages": [{"role": "user", "content": f"run {i}"}]} for i in range(16)]
    alone = [content(litellm.completion(**ask, **at)) for ask in asks]

    async def all_at_once():
        return await asyncio.gather(*(litellm.acompletion(**ask, **at) for ask in asks))

    assert [content(answer) for answer in asyncio.run(all_at_once())] == alone


def test_options(at):
    """`n`, `stop`, `seed`, `logprobs` and `logit_bias`"""
    answer = litellm.completion(**{**ASK, "temperature": 1.2}, **at, n=2, seed=3, logprobs=True, top_logprobs=2)
    assert len(answer.choices) == 2 and len(answer.choices[0].logprobs.content) == 12
    assert content(litellm.completion(**{**ASK, "temperature": 1.2}, **at, n=2, seed=3)) == content(answer)
    text = content(litellm.completion(**ASK, **at))
    stopped = litellm.completion(**ASK, **at, stop=[text[3:5]])
    assert (content(stopped), stopped.choices[0].finish_reason) == (text[: text.index(text[3:5])], "stop")
    assert content(litellm.completion(**ASK, **at, logit_bias={"40": 100})) != text


def test_text_completion(at, client):
    """completion"""
    ask = {"prompt": "run of run", "max_tokens": 12, "temperature": 0}
    answer = litellm.text_completion(model="text-completion-openai/llama-tied", **ask, **at)
    direct = client.completions.create(model="llama-tied", **ask)
    assert answer.choices[0].text == direct.choices[0].text
    chunks = litellm.text_completion(model="text-completion-openai/llama-tied", **ask, **at, stream=True)
    assert "".join(chunk.choices[0].text or "" for chunk in chunks) == direct.choices[0].text


def test_errors(at, keyed):
    """errors are mapped: bad request, authentication, not found, context"""
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**{**ASK, "temperature": -1}, **at)
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**ASK, api_base=keyed.v1, api_key="wrong")
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**ASK, "model": "openai/gpt-0"}, **at)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**{**ASK, "messages": [{"role": "user", "content": "run of " * 800}]}, **at)


def test_full(small, slow):
    """a full queue is a `RateLimitError`"""
    with slow.chat.completions.create(**LONG, stream=True):
        until("one runs", lambda: small.requests()["running"] == 1)
        with slow.chat.completions.create(**LONG, stream=True):
            until("one waits", lambda: small.requests()["waiting"] == 1)
            with pytest.raises(litellm.RateLimitError):
                litellm.completion(**{**ASK, "model": "openai/llama-33"}, api_base=small.v1, api_key="none", max_retries=0)
