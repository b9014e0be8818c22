"""OpenAI's client for Python: answers of a given form, and calls of tools, as OpenAI's documentation has them."""

import json
from enum import Enum
from typing import Literal

import jsonschema
import openai
import pydantic
import pytest
from tokenizers import Tokenizer

from conftest import connect
from servers import TINY

CLIENT = "openai Python"


class Colour(str, Enum):
    RED = "red"
    GREEN = "green"


class Part(pydantic.BaseModel):
    colour: Colour
    size: Literal[1, 2, 3]


class Shape(pydantic.BaseModel):
    kind: Literal["circle", "square"]
    is_filled: bool
    part: Part
    label: Literal["ä", "🦀"] | None


class Weather(pydantic.BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]
    unit: Literal["celsius", "fahrenheit"]


SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 9}, "minItems": 2, "maxItems": 3},
        "note": {"anyOf": [{"const": "none"}, {"type": "null"}]},
    },
    "required": ["city", "days", "note"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "visit", "strict": True, "schema": SCHEMA}}
WEATHER = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
NOTE = {"type": "object", "properties": {"text": {"enum": ["a", "b"]}}, "required": ["text"], "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "The weather of a city", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "take_note", "description": "Writes a note", "parameters": NOTE}},
]
PARAMETERS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
MESSAGES = [{"role": "user", "content": "How is the weather in Paris? Answer in JSON."}]


def spaces():
    """Tokens of nothing but white space, kept out: JSON may have any amount of it, and random weights like it."""
    tokenizer = Tokenizer.from_file(str(TINY / "llama-tied" / "tokenizer.json"))
    texts = ((id, tokenizer.decode([id])) for id in range(3, tokenizer.get_vocab_size()))
    return {str(id): -100 for id, text in texts if not text.strip()}


def asking(request, name):
    server = request.getfixturevalue(name)
    more = {"logit_bias": spaces()} if name == "toy" else {}
    with connect(server) as client:
        yield client, {"model": server.model, "messages": MESSAGES, "temperature": 0, "max_tokens": 120, **more}


@pytest.fixture
def at(request):
    """A client, and what is asked of random weights: they want nothing, so the form is all of the server's making."""
    yield from asking(request, "toy")


@pytest.fixture(params=["toy", "real"])
def each(request):
    """The same, and of a real model."""
    yield from asking(request, request.param)


def check_calls(calls, names=PARAMETERS):
    """Calls are of tools that there are, with arguments as the tools want them, and each has a name of its own."""
    assert calls and len({call.id for call in calls}) == len(calls)
    for call in calls:
        assert call.id and call.type == "function" and call.function.name in names
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS[call.function.name])


def test_schema(each):
    """`response_format` json_schema, streamed and not"""
    client, ask = each
    (choice,) = client.chat.completions.create(**ask, response_format=FORMAT).choices
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    chunks = client.chat.completions.create(**ask, response_format=FORMAT, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content


def test_schema_at_any_temperature(at):
    """`response_format` json_schema, whatever the seed"""
    client, ask = at
    ask = {**ask, "temperature": 1.5, "n": 4, "seed": 11, "response_format": FORMAT}
    for choice in client.chat.completions.create(**ask).choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)


def test_parse(each):
    """`parse` with a pydantic model"""
    client, ask = each
    (choice,) = client.chat.completions.parse(**ask, response_format=Shape).choices
    assert isinstance(choice.message.parsed, Shape) and choice.message.refusal is None
    assert json.loads(choice.message.content) == choice.message.parsed.model_dump(mode="json")
    with client.chat.completions.stream(**ask, response_format=Shape) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == choice.message.parsed


def test_parse_cut(at):
    """an answer of a given form that is cut off is `length`"""
    client, ask = at
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**{**ask, "max_tokens": 3}, response_format=Shape)


def test_json_object(real):
    """`response_format` json_object"""
    messages = [{"role": "user", "content": 'Answer in JSON with nothing but a city, like {"city": "Rome"}. What is the capital of France?'}]
    with connect(real) as client:
        ask = {"model": real.model, "messages": messages, "temperature": 0, "max_tokens": 200}
        (choice,) = client.chat.completions.create(**ask, response_format={"type": "json_object"}).choices
    assert choice.finish_reason == "stop"
    assert isinstance(json.loads(choice.message.content), dict)


def test_bad_format(client):
    """a `response_format` that cannot be is refused by name"""
    broken = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    nameless = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    for value in (broken, nameless, {"type": "yaml"}, {"type": "json_schema"}, {}):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="llama-tied", messages=MESSAGES, max_tokens=4, response_format=value)
        assert (caught.value.param or "").startswith("response_format"), f"{value}: {caught.value.body}"


def test_tool_choice_required(each):
    """`tool_choice` required"""
    client, ask = each
    (choice,) = client.chat.completions.create(**ask, tools=TOOLS, tool_choice="required").choices
    assert choice.finish_reason == "tool_calls" and not choice.message.content
    check_calls(choice.message.tool_calls)


def test_tool_choice_named(at):
    """`tool_choice` of one function"""
    client, ask = at
    for name in PARAMETERS:
        named = {"type": "function", "function": {"name": name}}
        (choice,) = client.chat.completions.create(**ask, tools=TOOLS, tool_choice=named).choices
        # OpenAI's documentation says `stop` for a function that was named, and others `tool_calls`.
        assert choice.finish_reason in ("stop", "tool_calls")
        assert len(choice.message.tool_calls) == 1
        check_calls(choice.message.tool_calls, [name])


def test_tool_choice_auto(at):
    """`tool_choice` auto: an answer or calls"""
    client, ask = at
    for choice in client.chat.completions.create(**{**ask, "temperature": 1, "n": 4, "seed": 2}, tools=TOOLS).choices:
        if choice.message.tool_calls:
            check_calls(choice.message.tool_calls)
            assert choice.finish_reason == "tool_calls"
        else:
            assert choice.message.content is not None and choice.finish_reason in ("stop", "length")


def test_tool_choice_none(at):
    """`tool_choice` none: text"""
    client, ask = at
    (choice,) = client.chat.completions.create(**ask, tools=TOOLS, tool_choice="none").choices
    assert not choice.message.tool_calls and choice.message.content


def test_parallel_tool_calls(at):
    """`parallel_tool_calls` false: one call"""
    client, ask = at
    more = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    for choice in client.chat.completions.create(**{**ask, "temperature": 1.2, "n": 3, "seed": 5}, **more).choices:
        assert len(choice.message.tool_calls) == 1
        check_calls(choice.message.tool_calls)


def test_tools_streamed(at):
    """tools, streamed"""
    client, ask = at
    ask = {**ask, "tools": TOOLS, "tool_choice": "required"}
    whole = client.chat.completions.create(**ask).choices[0].message.tool_calls
    calls = {}
    ends = []
    for chunk in client.chat.completions.create(**ask, stream=True):
        (choice,) = chunk.choices
        ends += [choice.finish_reason] if choice.finish_reason else []
        assert not choice.delta.content
        for delta in choice.delta.tool_calls or []:
            if delta.index not in calls:
                assert delta.id and delta.type == "function" and delta.function.name, "the first piece names it"
                calls[delta.index] = [delta.function.name, ""]
            else:
                assert delta.id is None and delta.function.name is None
            calls[delta.index][1] += delta.function.arguments or ""
    assert ends == ["tool_calls"] and sorted(calls) == list(range(len(calls)))
    assert [calls[index] for index in sorted(calls)] == [[call.function.name, call.function.arguments] for call in whole]
    with client.chat.completions.stream(**ask) as stream:
        check_calls(stream.get_final_completion().choices[0].message.tool_calls)


def test_tools_parsed(at):
    """tools by `pydantic_function_tool`, parsed"""
    client, ask = at
    tool = openai.pydantic_function_tool(Weather)
    (choice,) = client.chat.completions.parse(**ask, tools=[tool], tool_choice="required").choices
    for call in choice.message.tool_calls:
        assert isinstance(call.function.parsed_arguments, Weather)


def test_tool_results(each):
    """the second turn, with the tools' results"""
    client, ask = each
    first = client.chat.completions.create(**ask, tools=TOOLS, tool_choice="required").choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": '{"sky": "clear"}'} for call in first.tool_calls]
    answers = [
        client.chat.completions.create(
            **{**ask, "max_tokens": 24, "messages": [*MESSAGES, said, *results]}, tools=TOOLS, tool_choice="none"
        )
        for said in (first, first.model_dump(), first.model_dump(exclude_none=True))
    ]
    assert len({answer.choices[0].message.content for answer in answers}) == 1
    assert answers[0].choices[0].message.content
    alone = client.chat.completions.create(**{**ask, "max_tokens": 1}, tools=TOOLS, tool_choice="none")
    assert answers[0].usage.prompt_tokens > alone.usage.prompt_tokens + 5, "the model reads calls and results"


BAD_TOOLS = [
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "other", "function": {"name": "a"}}]}, "tools[0].type"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "nothing"}}}]}, "tools[0].function.parameters"),
    ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"messages": [*MESSAGES, {"role": "tool", "content": "5"}]}, "messages[1]"),
    ({"messages": [*MESSAGES, {"role": "tool", "tool_call_id": "never", "content": "5"}]}, "messages[1]"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_TOOLS)
def test_bad_tools(client, fields, param):
    """tools that cannot be are refused by name"""
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": "llama-tied", "messages": MESSAGES, "max_tokens": 4, **fields})
    assert (caught.value.param or "").startswith(param), caught.value.body
