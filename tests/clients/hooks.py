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
    """Whether it may be more than the context holds: a token is a byte at least."""
    return len(json.dumps(prompt, ensure_ascii=False).encode("utf-8", "surrogatepass")) > CONTEXT // 3


def is_unknown(prompt):
    """Whether it has ids that the model has not."""
    return isinstance(prompt, list) and any(isinstance(id, int) and id >= VOCAB for id in prompt)


# By the field that an error names and by its code: whether the body breaks a rule that is not in the document.
RULES = {
    ("top_logprobs", "invalid_value"): lambda body: body.get("logprobs") is not True,
    ("stream_options", "invalid_value"): lambda body: body.get("stream") is not True,
    ("best_of", "unsupported_parameter"): lambda body: body["best_of"] != (body.get("n") or 1),
    ("n", "invalid_value"): lambda body: body["n"] * len(prompts(body)) > AT_ONCE,
    ("logit_bias", "invalid_value"): lambda body: any(id.isdigit() and int(id) >= VOCAB for id in body["logit_bias"]),
    ("messages", "invalid_value"): lambda body: all(message.get("content") in ("", []) for message in body["messages"]),
    ("messages", "context_length_exceeded"): lambda body: any(map(is_long, prompts(body))),
    ("prompt", "context_length_exceeded"): lambda body: any(map(is_long, prompts(body))),
    ("prompt", "invalid_value"): lambda body: any(map(is_unknown, prompts(body))) or any(not p for p in prompts(body)),
}


def breaks_a_rule(case, error):
    """Whether an error is right by a rule, and names the field that breaks it."""
    if case.path == "/v1/embeddings":
        return error["code"] == "unsupported_parameter"
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
def map_body(context, body):
    """Made-up requests mostly break one of the rules: half of them are made to keep those between fields."""
    if not isinstance(body, dict) or len(json.dumps(body, default=str)) % 2:
        return body
    kept = dict(body)
    if isinstance(kept.get("top_logprobs"), int) and kept.get("logprobs") in (None, False):
        kept["logprobs"] = True
    if isinstance(kept.get("stream_options"), dict) and kept.get("stream") in (None, False):
        kept["stream"] = True
    if isinstance(kept.get("best_of"), int):
        kept["best_of"] = kept.get("n") or 1
    return kept


ANSWERED = collections.Counter()


@schemathesis.hook
def after_call(context, case, response):
    """Counts."""
    ANSWERED[f"{case.operation.label} {response.status_code}"] += 1


@atexit.register
def tell():
    """For the table."""
    if path := os.environ.get("PP_ANSWERED"):
        with open(path, "w", encoding="utf-8") as file:
            json.dump(ANSWERED, file, indent=1, sort_keys=True)
