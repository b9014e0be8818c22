"""What the tests share: the servers that `run` started, clients of them, and what is told to the table of README.md.

The first line of a test's description is the feature that it shows; the module's `CLIENT` is who shows it.
"""

import json
import os

import openai
import pytest

from servers import PATIENCE, Server, until

RESULTS = {}


def server(name):
    return Server(os.environ[f"PP_{name}"], os.environ.get(f"PP_{name}_KEY"))


@pytest.fixture(scope="session")
def toy():
    """A toy model, open to all."""
    return server("TOY")


@pytest.fixture(scope="session")
def keyed():
    """The same with a key, and with a chat template that puts nothing but `suffix` behind the texts."""
    return server("KEYED")


@pytest.fixture(scope="session")
def small():
    """A slow toy: one sequence runs, one waits, and bodies have at most 4096 bytes."""
    return server("SMALL")


@pytest.fixture(scope="session")
def real():
    """SmolLM2, which says something."""
    return server("REAL")


def connect(server, **more):
    options = {"base_url": server.v1, "api_key": server.key or "none", "max_retries": 0, "timeout": PATIENCE}
    return openai.OpenAI(**{**options, **more})


@pytest.fixture
def client(toy):
    with connect(toy) as client:
        yield client


@pytest.fixture
def slow(small):
    """A client of the small server, which nobody else uses and which is idle again afterwards."""
    until("nobody uses it", small.is_idle)
    with connect(small) as client:
        yield client
    until("all is forgotten", small.is_idle)


@pytest.fixture
def real_client(real):
    with connect(real) as client:
        yield client


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    feature = (item.function.__doc__ or "").strip().splitlines()
    assert feature, f"{item.nodeid} does not say which feature it shows"
    key = (item.module.CLIENT, feature[0].rstrip("."))
    passed = report.passed if report.when == "call" else not (report.failed or report.skipped)
    RESULTS[key] = RESULTS.get(key, True) and passed


def pytest_sessionfinish():
    if path := os.environ.get("PP_RESULTS"):
        results = [[client, feature, passed] for (client, feature), passed in RESULTS.items()]
        with open(path, "w", encoding="utf-8") as file:
            json.dump(results, file)
