"""A container's credentials endpoint, as ECS and EKS have one: every answer is a new pair, good for a few seconds."""

from __future__ import annotations

import datetime
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.s3.proxy import Fault, FaultyProxy
from tests.s3.server import Server

ANY = "GET|HEAD|PUT|POST|DELETE"
SECRET, TOKEN = "VENDEDSECRET", "VENDEDTOKEN"  # what every secret and every token begins with


class Vending:
    """`with Vending(server, proxy, seconds) as vending:`; processes find it by `vending.environment`.

    The proxy refuses whatever is signed with a pair whose time is over, in S3's words.
    """

    def __init__(self, server: Server, proxy: FaultyProxy, seconds: float) -> None:
        self.issued = 0
        self._server, self._proxy, self._seconds = server, proxy, seconds
        self._lock = threading.Lock()
        self._timers: list[threading.Timer] = []
        self.stale = False  # from now on only pairs that are refused

    def __enter__(self) -> Vending:
        vending = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = json.dumps(vending._issue()).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for timer in self._timers:
            timer.cancel()
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"http://127.0.0.1:{self._http.server_port}/role"
        }

    def _issue(self) -> dict[str, str]:
        with self._lock:
            self.issued += 1
            number = self.issued
        key, secret = f"VENDED{number:05d}", f"{SECRET}{number:05d}"
        self._server.add_key(key, secret)
        until = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(
            seconds=self._seconds
        )
        if self.stale:
            self.refuse(key)
        else:
            self._timers.append(threading.Timer(self._seconds, self.refuse, (key,)))
            self._timers[-1].start()
        return {
            "AccessKeyId": key, "SecretAccessKey": secret, "Token": f"{TOKEN}{number:05d}",
            "Expiration": until.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }  # fmt: skip

    def refuse(self, key: str) -> None:
        self._proxy.faults.append(Fault("expired", key="", method=ANY, access_key=key))
