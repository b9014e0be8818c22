"""Servers as the tests see them: by their address. `run` starts those that all tests share."""

import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import httpx

DATA = Path(__file__).resolve().parent.parent / "data"
TINY = DATA / "tiny"
# How long anything may take that is waited for: much, as tests share few cores.
PATIENCE = 120
# What the small server answers for a second or more: tokens that end an answer are kept out.
LONG = {
    "model": "llama-33",
    "messages": [{"role": "user", "content": "run"}],
    "max_tokens": 200,
    "logit_bias": {"0": -100, "2": -100},
}


def until(what, is_so):
    """Waits for a condition, and gives what it gave."""
    end = time.monotonic() + PATIENCE
    while not (found := is_so()):
        assert time.monotonic() < end, what
        time.sleep(0.02)
    return found


class Server:
    """One that runs."""

    def __init__(self, url, key=None):
        self.url = url
        self.v1 = f"{url}/v1"
        self.key = key
        self.headers = {"authorization": f"Bearer {key}"} if key else {}

    def get(self, path):
        return httpx.get(f"{self.url}{path}", headers=self.headers, timeout=PATIENCE)

    @property
    def model(self):
        return self.get("/v1/models").json()["data"][0]["id"]

    def pipeline(self):
        return self.get("/v1/pipeline").json()

    def requests(self):
        return self.pipeline()["requests"]

    def is_idle(self):
        """Whether nobody waits, nothing runs, and no page is held."""
        pipeline = self.pipeline()
        requests = pipeline["requests"]
        return requests["open"] == requests["running"] == requests["waiting"] == pipeline["kv_pages"]["held"] == 0

    def metric(self, name):
        """A number of /metrics, by its name with labels; 0 where it was never counted."""
        for line in self.get("/metrics").text.splitlines():
            if line.startswith(f"pp_run_{name} "):
                return float(line.rsplit(" ", 1)[1])
        return 0.0


@contextlib.contextmanager
def started(*options):
    """`pp-run serve` with a toy model and these options, and its process."""
    command = [os.environ["PP_RUN"], "serve", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            line = process.stdout.readline()
            address = re.search(r"http://127\.0\.0\.1:\d+", line)
            assert address, f"{command}: {line!r}"
            server = Server(address[0])
            until("it is ready", lambda: server.get("/ready").status_code == 200)
            yield server, process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
