"""Places for tests of URLs: this process's memory, and a real S3 server on this machine."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

from pytest_negativa.storage.urls import Url
from tests.support.modules import require_modules
from tests.support.sessions import unmeasured_environ

_NUMBERS = itertools.count()
_PROXY = Path(__file__).with_name("s3_proxy.py")


def memory_url() -> Url:
    """A URL in this process's memory that no other test has."""
    return Url(f"memory://test-{next(_NUMBERS)}/folder")


class S3:
    """An S3 server (moto's), and a proxy before it that can spoil requests.

    Attributes:
        environ: how processes reach it.
    """

    def __init__(self, server: str, proxy: str, folder: Path) -> None:
        self._server = server
        self._folder = folder
        self.environ = {
            "AWS_ENDPOINT_URL": proxy,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1",
        }

    def new_bucket(self) -> str:
        """The URL of a bucket that no other test has."""
        name = f"bucket-{next(_NUMBERS)}"
        _request(f"{self._server}/{name}", "PUT")
        return f"s3://{name}"

    def plan_faults(self, *lines: str) -> None:
        """Spoil the next requests; see ``s3_proxy``."""
        # Of an earlier test, whose request will never be answered.
        (self._folder / "held").unlink(missing_ok=True)
        (self._folder / "log").write_text("")
        (self._folder / "faults").write_text("\n".join(lines))

    def wait_until_held(self) -> None:
        """Wait until a request is not answered."""
        _wait_for(lambda: (self._folder / "held").exists())

    def requests(self, method: str) -> list[str]:
        """Path and status of each request since ``plan_faults``."""
        lines = (self._folder / "log").read_text().splitlines()
        return [line.partition(" ")[2] for line in lines if line.startswith(f"{method} ")]

    def unfinished(self, bucket: str) -> list[str]:
        """The names of the objects whose uploads in parts have neither ended nor been given up."""
        answer = _request(f"{self._server}/{bucket.removeprefix('s3://')}?uploads", "GET")
        keys = ElementTree.fromstring(answer).iterfind(".//{*}Key")
        return [key.text or "" for key in keys]

    @contextlib.contextmanager
    def accounts(self) -> Iterator[None]:
        """Let only users with an account in, and there is none."""
        _request(f"{self._server}/moto-api/reset-auth", "POST", b"0")
        try:
            yield
        finally:
            # A number of requests that may pass unchecked.
            _request(f"{self._server}/moto-api/reset-auth", "POST", b"1000000000")


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[S3]:
    """Start server and proxy.

    Args:
        folder: for their files.
    """
    require_modules("moto", "flask", "flask_cors", "s3fs", extra="test-stores")
    # Processes that end by a signal can't write what coverage has measured.
    environ = unmeasured_environ()
    with contextlib.ExitStack() as stack:

        def start(*command: str) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(
                [sys.executable, *command],
                stdout=subprocess.PIPE,
                stderr=stack.enter_context((folder / "stderr").open("ab")),
                env=environ,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        port = _free_port()
        start("-m", "moto.server", "-H", "127.0.0.1", "-p", str(port))
        server = f"http://127.0.0.1:{port}"
        _wait_for(lambda: _answers(f"{server}/moto-api/"))
        proxy = start(os.fspath(_PROXY), str(port), os.fspath(folder))
        assert proxy.stdout is not None
        yield S3(server, f"http://127.0.0.1:{int(proxy.stdout.readline())}", folder)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _answers(url: str) -> bool:
    try:
        _request(url, "GET")
    except urllib.error.URLError:
        return False
    return True


def _request(url: str, method: str, data: bytes | None = None) -> bytes:
    headers = {"Content-Type": "application/octet-stream"}
    request = urllib.request.Request(url, data=data, method=method, headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as answer:
        body: bytes = answer.read()
        return body


def _wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
