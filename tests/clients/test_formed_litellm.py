"""litellm: answers of a given form, and calls of tools."""

import json

import jsonschema
import litellm

from test_formed import FORMAT, MESSAGES, PARAMETERS, SCHEMA, TOOLS

CLIENT = "litellm"


def ask(server, **more):
    fields = {"model": f"openai/{server.model}", "messages": MESSAGES, "temperature": 0, "max_tokens": 120, **more}
    return litellm.completion(**fields, api_base=server.v1, api_key="none", num_retries=0)


def test_schema(real):
    """`response_format` json_schema, streamed and not"""
    content = ask(real, response_format=FORMAT).choices[0].message.content
    jsonschema.validate(json.loads(content), SCHEMA)
    chunks = ask(real, response_format=FORMAT, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == content


def test_tools(real):
    """`tool_choice` required"""
    (choice,) = ask(real, tools=TOOLS, tool_choice="required").choices
    assert choice.finish_reason == "tool_calls"
    for call in choice.message.tool_calls:
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS[call.function.name])


def test_tools_streamed(real):
    """tools, streamed"""
    chunks = list(ask(real, tools=TOOLS, tool_choice="required", stream=True))
    whole = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    for call in whole.choices[0].message.tool_calls:
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS[call.function.name])


def test_tool_results(real):
    """the second turn, with the tools' results"""
    said = ask(real, tools=TOOLS, tool_choice="required").choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": '{"sky": "clear"}'} for call in said.tool_calls]
    answer = ask(real, messages=[*MESSAGES, said, *results], tools=TOOLS, tool_choice="none", max_tokens=24)
    assert answer.choices[0].message.content
