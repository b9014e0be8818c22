"""OpenAI's client for Python: chats and completions, streamed and not."""

import asyncio

import jinja2
import json
import openai
import pytest
from tokenizers import Tokenizer

from conftest import connect
from servers import TINY

CLIENT = "openai Python"
FOLDER = TINY / "llama-tied"
MODEL = "llama-tied"
ASK = {"model": MODEL, "messages": [{"role": "user", "content": "run of run"}], "max_tokens": 12, "temperature": 0}
GO_ON = {"model": MODEL, "prompt": "run of run", "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def tokenizer():
    """Hugging Face's own."""
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def joined(chunks):
    """The texts, roles and ends of streamed answers, by index."""
    texts, roles, ends = {}, {}, {}
    for chunk in chunks:
        for choice in chunk.choices:
            delta = choice.delta
            roles.setdefault(choice.index, delta.role)
            texts[choice.index] = texts.get(choice.index, "") + (delta.content or "")
            if choice.finish_reason:
                assert choice.index not in ends, "it ends once"
                ends[choice.index] = choice.finish_reason
    return texts, roles, ends


def counts(usage):
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


def test_chat(client):
    """chat"""
    answer = client.chat.completions.create(**ASK)
    (choice,) = answer.choices
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    assert (choice.index, choice.message.role, choice.finish_reason) == (0, "assistant", "length")
    assert choice.message.content and choice.message.refusal is None and choice.logprobs is None
    assert answer.usage.completion_tokens == 12
    assert counts(answer.usage)[2] == sum(counts(answer.usage)[:2])
    assert answer.id != client.chat.completions.create(**ASK).id


def test_chat_streamed(client):
    """chat, streamed"""
    whole = client.chat.completions.create(**ASK)
    chunks = list(client.chat.completions.create(**ASK, stream=True))
    texts, roles, ends = joined(chunks)
    assert texts == {0: whole.choices[0].message.content}
    assert (roles, ends) == ({0: "assistant"}, {0: "length"})
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks) and len(chunks) > 3


def test_chat_stream_helper(client):
    """chat, by the client's `stream` helper"""
    text = client.chat.completions.create(**ASK).choices[0].message.content
    # What ends at max_tokens is an error to this helper.
    ask = {**ASK, "stop": text[8:10]}
    whole = client.chat.completions.create(**ask)
    with client.chat.completions.stream(**ask) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert "".join(event.delta for event in events if event.type == "content.delta") == whole.choices[0].message.content
    assert [event.content for event in events if event.type == "content.done"] == [whole.choices[0].message.content]


def test_usage_in_stream(client):
    """`stream_options.include_usage`"""
    whole = client.chat.completions.create(**ASK)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.chat.completions.create(**ASK, **options)
    assert last.choices == [] and counts(last.usage) == counts(whole.usage)
    assert all(chunk.usage is None for chunk in chunks)
    *chunks, last = client.completions.create(**GO_ON, **options)
    assert last.choices == [] and last.usage.completion_tokens == 12
    assert all(chunk.usage is None for chunk in chunks)


def test_completion(client):
    """completion"""
    answer = client.completions.create(**GO_ON)
    assert (answer.object, answer.choices[0].finish_reason) == ("text_completion", "length")
    # Without max_tokens it is 16, as in OpenAI's API.
    short = client.completions.create(model=MODEL, prompt="run of run", temperature=0)
    assert short.usage.completion_tokens == 16 and short.choices[0].text.startswith(answer.choices[0].text)


def test_completion_streamed(client):
    """completion, streamed"""
    whole = client.completions.create(**GO_ON)
    chunks = list(client.completions.create(**GO_ON, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]


def test_completion_prompts(client, tokenizer):
    """completion of several prompts, as texts and as token ids"""
    texts = ["run of run", "def f", "a"]
    lists = [tokenizer.encode(text).ids for text in texts]
    alone = [client.completions.create(**{**GO_ON, "prompt": text}).choices[0].text for text in texts]
    for prompt in (texts, lists):
        answer = client.completions.create(**{**GO_ON, "prompt": prompt})
        assert [choice.text for choice in answer.choices] == alone
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert client.completions.create(**{**GO_ON, "prompt": lists[0]}).choices[0].text == alone[0]


def test_n(client):
    """`n`, streamed and not"""
    ask = {**ASK, "n": 3, "temperature": 1.2, "seed": 5}
    whole = client.chat.completions.create(**ask)
    texts = {choice.index: choice.message.content for choice in whole.choices}
    assert sorted(texts) == [0, 1, 2] and len(set(texts.values())) > 1
    assert whole.usage.completion_tokens == 36
    assert whole.usage.prompt_tokens == client.chat.completions.create(**ASK).usage.prompt_tokens
    streamed, roles, ends = joined(client.chat.completions.create(**ask, stream=True))
    assert streamed == texts and set(roles.values()) == {"assistant"} and len(ends) == 3
    choices = client.completions.create(**{**GO_ON, "prompt": ["run", "of"], "n": 2}).choices
    assert [choice.index for choice in choices] == [0, 1, 2, 3]
    assert choices[0].text == choices[1].text and choices[2].text == choices[3].text


def test_stop(client):
    """`stop`, as a text and as several, streamed and not"""
    text = client.completions.create(**{**GO_ON, "max_tokens": 32}).choices[0].text
    stop = text[4:7]
    before = text[: text.index(stop)]
    for value in (stop, ["not to be found", stop]):
        ask = {**GO_ON, "max_tokens": 32, "stop": value}
        (choice,) = client.completions.create(**ask).choices
        assert (choice.text, choice.finish_reason) == (before, "stop")
        chunks = list(client.completions.create(**ask, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == before


def test_seed(client):
    """`seed`: the same gives the same answer, another another"""
    ask = {**ASK, "temperature": 1.5, "max_tokens": 24}
    one, again, other = (
        client.chat.completions.create(**ask, seed=seed).choices[0].message.content for seed in (7, 7, 8)
    )
    assert one == again != other
    first, second = (client.chat.completions.create(**ask).choices[0].message.content for _ in range(2))
    assert first != second, "without a seed, answers differ"


def test_logprobs_of_chat(client):
    """`logprobs` and `top_logprobs` of a chat, streamed and not"""
    ask = {**ASK, "logprobs": True, "top_logprobs": 3}
    (choice,) = client.chat.completions.create(**ask).choices
    tokens = choice.logprobs.content
    assert len(tokens) == 12
    spelt = b"".join(bytes(token.bytes) for token in tokens)
    assert spelt.decode("utf-8", errors="replace") == choice.message.content
    for token in tokens:
        assert token.logprob <= 0 and len(token.top_logprobs) == 3
        assert (token.token, token.logprob) == (token.top_logprobs[0].token, token.top_logprobs[0].logprob)
        assert sorted((top.logprob for top in token.top_logprobs), reverse=True) == [
            top.logprob for top in token.top_logprobs
        ]
    chunks = client.chat.completions.create(**ask, stream=True)
    logprobs = [chunk.choices[0].logprobs for chunk in chunks]
    assert [token for some in logprobs if some for token in some.content] == tokens
    plain = client.chat.completions.create(**ASK, logprobs=True).choices[0].logprobs.content
    assert [token.logprob for token in plain] == [token.logprob for token in tokens]
    assert all(token.top_logprobs == [] for token in plain)


def test_logprobs_of_completion(client):
    """`logprobs` of a completion"""
    (choice,) = client.completions.create(**GO_ON, logprobs=2).choices
    logprobs = choice.logprobs
    lengths = {len(logprobs.tokens), len(logprobs.token_logprobs), len(logprobs.top_logprobs), len(logprobs.text_offset)}
    assert lengths == {12} and logprobs.text_offset[0] == 0
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert top[token] == logprob == max(top.values())


def test_logit_bias(client, tokenizer):
    """`logit_bias`"""
    wanted = tokenizer.token_to_id("run") or tokenizer.encode("a").ids[-1]
    answer = client.completions.create(**GO_ON, logit_bias={str(wanted): 100})
    assert answer.choices[0].text == tokenizer.decode([wanted] * 12)
    first = client.completions.create(**{**GO_ON, "max_tokens": 1}, logprobs=1).choices[0].text
    banned = {str(id): -100 for id in range(tokenizer.get_vocab_size()) if tokenizer.decode([id]) == first}
    assert banned and client.completions.create(**{**GO_ON, "max_tokens": 1}, logit_bias=banned).choices[0].text != first


def test_max_tokens(client):
    """`max_tokens` and `max_completion_tokens`"""
    ask = {key: value for key, value in ASK.items() if key != "max_tokens"}
    for name in ("max_tokens", "max_completion_tokens"):
        answer = client.chat.completions.create(**ask, **{name: 5})
        assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (5, "length")


def test_penalties(client):
    """`presence_penalty` and `frequency_penalty`"""
    ask = {**GO_ON, "max_tokens": 40}
    plain = client.completions.create(**ask).choices[0].text
    for name in ("presence_penalty", "frequency_penalty"):
        assert client.completions.create(**ask, **{name: 2}).choices[0].text != plain


def test_prompt_tokens(client, tokenizer):
    """token counts are the tokenizer's"""
    config = json.loads((FOLDER / "tokenizer_config.json").read_text())
    messages = [
        {"role": "system", "content": "Be brief — überall."},
        {"role": "user", "content": "How many tokens are 12345 tokens? 🦀"},
    ]
    text = jinja2.Environment().from_string(config["chat_template"]).render(messages=messages, add_generation_prompt=True)
    answer = client.chat.completions.create(**{**ASK, "messages": messages})
    assert answer.usage.prompt_tokens == len(tokenizer.encode(text, add_special_tokens=False).ids)
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
    again = client.chat.completions.create(**{**ASK, "messages": parts})
    assert again.choices[0].message.content == answer.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens > 0, "it was asked a moment ago"
    answer = client.completions.create(**{**GO_ON, "prompt": "3 + 4 = 🦀"})
    assert answer.usage.prompt_tokens == len(tokenizer.encode("3 + 4 = 🦀").ids)


def test_template_kwargs(keyed):
    """`chat_template_kwargs` in `extra_body`"""
    # The template puts nothing but this behind the texts: so the answer is that to the texts.
    with connect(keyed) as client:
        for kwargs, prompt in (({}, "run of run"), ({"suffix": " of def"}, "run of run of def")):
            chat = client.chat.completions.create(**ASK, extra_body={"chat_template_kwargs": kwargs})
            text = client.completions.create(**{**GO_ON, "prompt": prompt})
            assert chat.choices[0].message.content == text.choices[0].text
            assert chat.usage.prompt_tokens == text.usage.prompt_tokens


def test_own_sampling(client):
    """`top_k`, `min_p` and `repetition_penalty` in `extra_body`"""
    greedy = client.completions.create(**GO_ON).choices[0].text
    for own in ({"top_k": 1}, {"min_p": 1.0}):
        hot = {**GO_ON, "temperature": 1.5}
        assert client.completions.create(**hot, extra_body=own).choices[0].text == greedy
    ask = {**GO_ON, "max_tokens": 40}
    plain = client.completions.create(**ask).choices[0].text
    assert client.completions.create(**ask, extra_body={"repetition_penalty": 2}).choices[0].text != plain


def test_taken_and_not_used(client):
    """`user`, `metadata`, `store` and the like are taken"""
    more = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "s"}
    more |= {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "response_format": {"type": "text"}}
    answer = client.chat.completions.create(**ASK, **more, modalities=["text"])
    assert answer.choices[0].message.content == client.chat.completions.create(**ASK).choices[0].message.content


def test_models(client):
    """models"""
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "pp-run")
    assert client.models.retrieve(MODEL) == model


def test_raw_response(client):
    """raw responses, and `x-request-id`"""
    raw = client.chat.completions.with_raw_response.create(**ASK)
    assert raw.headers["content-type"] == "application/json"
    parsed = raw.parse()
    assert parsed._request_id == raw.headers["x-request-id"] != ""
    named = client.chat.completions.create(**ASK, extra_headers={"x-request-id": "mine-1"})
    assert named._request_id == "mine-1"
    with client.chat.completions.with_streaming_response.create(**ASK) as response:
        assert response.headers["x-request-id"]
        assert json.loads(response.read())["choices"][0]["message"] == json.loads(raw.content)["choices"][0]["message"]


def test_real_answer(real_client):
    """a real model's answer"""
    ask = {"model": real_client.models.list().data[0].id, "temperature": 0, "max_tokens": 16}
    answer = real_client.chat.completions.create(
        **ask, messages=[{"role": "user", "content": "Name the capital of France."}]
    )
    assert "Paris" in answer.choices[0].message.content


def test_parallel(toy):
    """16 requests at once, each as alone"""
    asks = [
        {**ASK, "messages": [{"role": "user", "content": f"run {i} of {i * i}"}], "max_tokens": 8 + i, "seed": i}
        | ({"temperature": 1.1} if i % 2 else {})
        for i in range(16)
    ]
    with connect(toy) as client:
        alone = [client.chat.completions.create(**ask).choices[0].message.content for ask in asks]

    async def one(client, index, ask):
        if index % 3:
            return (await client.chat.completions.create(**ask)).choices[0].message.content
        stream = await client.chat.completions.create(**ask, stream=True)
        return joined([chunk async for chunk in stream])[0][0]

    async def all_at_once():
        async with openai.AsyncOpenAI(base_url=toy.v1, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, index, ask) for index, ask in enumerate(asks)))

    assert asyncio.run(all_at_once()) == alone
