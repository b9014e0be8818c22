"""The table of README.md, from what the tests showed: it must say just that. `PP_WRITE=1` writes it anew.

A row is a feature, a tick a client whose tests of it all passed: a row that no test shows, and a test that has no row, fail.
"""

import collections
import json
import os
import re
import sys
import xml.etree.ElementTree
from pathlib import Path

README = Path(__file__).with_name("README.md")
CLIENTS = ["openai Python", "openai Node", "litellm", "curl"]
SERVERS = {"open": "without a key", "keyed": "with a key"}
BEGIN, END = "<!-- made by table.py -->", "<!-- end -->"


def python(work):
    """Features of the tests in Python: client, feature, whether it passed."""
    return [tuple(row) for row in json.loads((work / "python.results").read_text())]


def node(work):
    """Those of the tests in Node, from its TAP."""
    for line in (work / "node.results").read_text().splitlines():
        match = re.match(r"\s*(not )?ok \d+ - (.*)$", line)
        if match and not match[2].endswith(".mjs"):
            yield "openai Node", match[2].replace("\\", ""), match[1] is None


def operations(work, name):
    """Operations that schemathesis found as documented, and that were answered as well as refused."""
    answered = json.loads((work / f"{name}.answered").read_text())
    suite = xml.etree.ElementTree.parse(work / f"{name}.results")
    for case in suite.iter("testcase"):
        operation = case.get("name")
        if re.match(r"[A-Z]+ /", operation):
            faults = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
            was = sum(answered.get(f"{operation} {status}", 0) for status in (200, 204))
            is_answered = was > 0 or operation == "POST /v1/embeddings"
            yield f"`{operation}`", not faults and is_answered


def table(head, rows, columns):
    """Rows of ticks as Markdown, and what is not ticked."""
    lines = [f"| {head} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    ticks = {True: "✓", False: "✗", None: ""}
    return lines + [f"| {name} | {' | '.join(ticks[row.get(column)] for column in columns)} |" for name, row in rows.items()]


def main(work):
    features, conform = collections.defaultdict(dict), collections.defaultdict(dict)
    for client, feature, passed in [*python(work), *node(work)]:
        features[feature][client] = passed
    for name, column in SERVERS.items():
        for operation, passed in operations(work, name):
            conform[operation][column] = conform[operation].get(column, True) and passed
    order = sorted(features.items(), key=lambda item: (-len(item[1]), item[0].strip("`").lower()))
    made = table("Feature", dict(order), CLIENTS) + [""] + table("schemathesis", dict(sorted(conform.items())), SERVERS.values())
    assert features and conform, "there are no results"
    before, _, rest = README.read_text().partition(BEGIN)
    written, _, after = rest.partition(END)
    found = "\n".join(made)
    if os.environ.get("PP_WRITE"):
        README.write_text(f"{before}{BEGIN}\n\n{found}\n\n{END}{after}")
    elif written.strip() != found:
        wanted, shown = written.strip().splitlines(), found.splitlines()
        print("tests/clients/README.md does not say what the tests showed (PP_WRITE=1 writes it):", file=sys.stderr)
        for line in wanted:
            if line not in shown:
                print(f"  not so: {line}", file=sys.stderr)
        for line in shown:
            if line not in wanted:
                print(f"  shown:  {line}", file=sys.stderr)
        sys.exit(1)
    if "✗" in found:
        sys.exit("tests failed: their features are crossed")


main(Path(sys.argv[1]))
