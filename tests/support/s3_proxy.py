"""A proxy in front of an S3 server that spoils some requests, as networks and servers do.

    python s3_proxy.py SERVER_PORT FOLDER

It prints its port. The file ``faults`` in FOLDER has a line for each fault, ``METHOD PART ANSWER``:
the next request of that method, whose path has that part, is answered so. An ANSWER is a status
such as ``503``; ``cut``, which ends the connection after half of what the server answers; or
``hold``, which creates the file ``held`` in FOLDER and never answers. ``log`` in FOLDER gets a
line for each request: method, path and the answer's status.
"""

from __future__ import annotations

import http.client
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SERVER_PORT = int(sys.argv[1])
FOLDER = Path(sys.argv[2])
LOCK = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        if "100-continue" in self.headers.get("Expect", ""):
            self.send_response_only(100)
            self.end_headers()
        body = self.read_body()
        fault = self.next_fault()
        if fault == "hold":
            (FOLDER / "held").touch()
            time.sleep(3600)
        if fault is not None and fault.isdigit():
            self.log(int(fault))
            self.send_response(int(fault))
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        server = http.client.HTTPConnection("127.0.0.1", SERVER_PORT)
        headers = {name: value for name, value in self.headers.items() if name != "Expect"}
        if headers.pop("Transfer-Encoding", None):
            headers["Content-Length"] = str(len(body))
        server.request(self.command, self.path, body, headers)
        done = server.getresponse()
        data = done.read()
        self.log(done.status)
        self.send_response(done.status)
        for name, value in done.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "server", "date"):
                self.send_header(name, value)
        self.end_headers()
        if fault == "cut":
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
            return
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return b"".join(parts)

    def next_fault(self) -> str | None:
        with LOCK:
            path = FOLDER / "faults"
            lines = path.read_text().splitlines() if path.exists() else []
            for line in lines:
                method, part, answer = line.split()
                if method == self.command and part in self.path:
                    lines.remove(line)
                    path.write_text("\n".join(lines))
                    return answer
        return None

    def log(self, status: int) -> None:
        with LOCK, (FOLDER / "log").open("a") as file:
            file.write(f"{self.command} {self.path} {status}\n")

    def log_message(self, format: str, *args: object) -> None:
        pass


if __name__ == "__main__":
    SERVER = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(SERVER.server_address[1], flush=True)
    SERVER.serve_forever()
