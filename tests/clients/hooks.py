"""What schemathesis cannot know from /openapi.json: rules between fields, and those of the model that is served.

A request that is right by the document may be refused only for such a rule, by the name of a field that breaks it. And
every operation must have been answered, not only refused: `$PP_ANSWERED` counts.
"""

import atexit
import collections
import json
import os
import re

import schemathesis
from schemathesis.openapi.checks import RejectedPositiveData

VOCAB = 384  # Of the toy model, at most.
CONTEXT = 2048
AT_ONCE = 16  # Answers of one request.


def prompts(body):
    """Every prompt of a body: its texts and ids."""
    if "messages" in body:
        return [body["messages"]]
    prompt = body["prompt"]
    return prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], (list, str)) else [prompt]


def is_long(prompt):
    """Whether it may be more than the context holds: a token is a byte at least, and a template adds some."""
    return len(json.dumps(prompt, ensure_ascii=False).encode("utf-8", "surrogatepass")) > CONTEXT // 3


def has_unknown_ids(body):
    """Whether it has ids that the model has not."""
    lists = (prompt for prompt in prompts(body) if isinstance(prompt, list))
    return any(isinstance(id, (int, float)) and id >= VOCAB for prompt in lists for id in prompt)


def says(message):
    """The text of a message."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def is_object(text):
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def has_wrong_message(body):
    """Whether a message says nothing at all, or calls and results of tools do not belong together."""
    messages, ids = body["messages"], set()
    for message in messages:
        calls, id, role = message.get("tool_calls") or [], message.get("tool_call_id"), message["role"]
        if message.get("content") is None and not calls:
            return True
        if (calls and role != "assistant") or (role == "tool") != (id is not None) or (id is not None and id not in ids):
            return True
        if not all(is_object(call["function"]["arguments"]) for call in calls):
            return True
        ids.update(call["id"] for call in calls)
    return not any(map(says, messages))


def has_wrong_tools(body):
    """Whether two have one name, or parameters are no schema of an object."""
    functions = [tool["function"] for tool in body["tools"]]
    schemas = [function.get("parameters") for function in functions]
    return len({function["name"] for function in functions}) < len(functions) or any(
        schema is not None and not (isinstance(schema, dict) and schema.get("type") == "object") for schema in schemas
    )


def has_wrong_choice(body):
    """Whether a tool is wanted that there is not."""
    choice = body["tool_choice"]
    names = {tool["function"]["name"] for tool in body.get("tools") or []}
    return not names or (isinstance(choice, dict) and choice["function"]["name"] not in names)


# By the field that an error names and by its code: whether the body breaks a rule that is not in the document.
RULES = {
    ("top_logprobs", "invalid_value"): lambda body: body.get("logprobs") is not True,
    ("stream_options", "invalid_value"): lambda body: body.get("stream") is not True,
    ("best_of", "unsupported_parameter"): lambda body: body["best_of"] != (body.get("n") or 1),
    ("n", "invalid_value"): lambda body: body["n"] * len(prompts(body)) > AT_ONCE,
    ("logit_bias", "invalid_value"): lambda body: any(id.isdigit() and int(id) >= VOCAB for id in body["logit_bias"]),
    ("messages", "invalid_value"): has_wrong_message,
    ("messages", "context_length_exceeded"): lambda body: any(map(is_long, prompts(body))) or bool(body.get("tools")),
    ("prompt", "context_length_exceeded"): lambda body: any(map(is_long, prompts(body))),
    ("prompt", "invalid_value"): has_unknown_ids,
    ("tools", "invalid_value"): has_wrong_tools,
    ("tool_choice", "invalid_value"): has_wrong_choice,
    # Schemas, expressions and grammars are languages of their own.
    ("response_format", "invalid_value"): lambda body: body["response_format"]["type"] not in ("text", "json_object"),
}


def breaks_a_rule(case, error):
    """Whether an error is right by a rule, and names the field that breaks it."""
    if case.path == "/v1/embeddings":
        return error["code"] == "unsupported_parameter"
    if case.path == "/v1/requests/{id}":
        # Only the request knows whether it was streamed, and what its events are called.
        return error["param"] in ("wait", "after")
    if case.method.upper() != "POST" or not isinstance(case.body, dict):
        return False
    rule = RULES.get((re.split(r"[.\[]", error["param"] or "")[0], error["code"]))
    return rule is not None and bool(rule(case.body))


@schemathesis.hook
def filter_failure(context, failure, case, response):
    """Leaves out refusals that a rule explains."""
    if not isinstance(failure, RejectedPositiveData) or response.status_code != 400:
        return True
    return not breaks_a_rule(case, response.json()["error"])


@schemathesis.hook
def map_case(context, case):
    """Made-up requests mostly break a rule: of those that are right by the document, every other is made to keep them."""
    if case.path == "/v1/requests/{id}" and KEPT:
        # Of one that was answered, mostly.
        case.path_parameters = {"id": KEPT[-1]}
        if case.method.upper() == "DELETE":
            KEPT.pop()
    is_positive = case.meta is not None and case.meta.generation.mode.is_positive
    if is_positive and isinstance(case.body, dict) and len(json.dumps(case.body, default=str)) % 2:
        case.body = kept(case.body)
    return case


def kept(body):
    """A body without what breaks rules."""
    alone = {"top_logprobs", "stream_options", "best_of", "n", "tools", "tool_choice", "response_format", "logit_bias"}
    kept = {field: value for field, value in body.items() if field not in alone}
    if body.get("top_logprobs") is not None:
        kept |= {"logprobs": True, "top_logprobs": body["top_logprobs"]}
    if body.get("stream_options") is not None:
        kept |= {"stream": True, "stream_options": body["stream_options"]}
    if "messages" in body:
        kept["messages"] = [{"role": "user", "content": message.get("content") or "a"} for message in body["messages"]]
    return kept


ANSWERED = collections.Counter()
# Names of requests that were answered, whose answers are kept.
KEPT = collections.deque(maxlen=100)


@schemathesis.hook
def after_call(context, case, response):
    """Counts."""
    if case.method.upper() == "POST" and response.status_code == 200:
        KEPT.extend(response.headers["x-request-id"])
    ANSWERED[f"{case.operation.label} {response.status_code}"] += 1


@atexit.register
def tell():
    """For the table."""
    if path := os.environ.get("PP_ANSWERED"):
        with open(path, "w", encoding="utf-8") as file:
            json.dump(ANSWERED, file, indent=1, sort_keys=True)
