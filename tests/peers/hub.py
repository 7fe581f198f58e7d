"""The hub's protocol on loopback: HEAD with the checksums, GET with ranges; uploads by LFS, and their commit."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

COMMIT = "5" * 40


class Hub:
    """Repositories in memory. `files`: (repository, name) -> content; names that end in .json are no LFS files.

    cut: how many answers end in the middle. damaged: how many have a flipped bit.
    """

    def __init__(self) -> None:
        self.files: dict[tuple[str, str], bytes] = {}
        self.requests: list[tuple[str, str, str | None]] = []  # method, path, range
        self.cut = self.damaged = 0
        self.created: list[dict[str, Any]] = []
        self._large: dict[str, bytes] = {}  # by sha256, until they are committed
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def do_GET(self) -> None:
                hub.answer(self, body=True)

            def do_POST(self) -> None:
                hub.take(self)

            def do_PUT(self) -> None:
                hub.take(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Hub:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler, *, body: bool) -> None:
        """/org/name/resolve/revision/file"""
        asked = request.headers.get("Range")
        self.requests.append((request.command, request.path, asked))
        repository, _, rest = request.path[1:].partition("/resolve/")
        revision, _, name = rest.partition("/")
        content = self.files.get((repository, name))
        if content is None or revision not in ("main", COMMIT):
            request.send_response(404)
            known = any(repository == each for each, _ in self.files)
            missing = "EntryNotFound" if revision in ("main", COMMIT) else "RevisionNotFound"
            request.send_header("X-Error-Code", missing if known else "RepoNotFound")
            request.send_header("X-Repo-Commit", COMMIT)
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        large = not name.endswith(".json")
        git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        begin = int(asked.removeprefix("bytes=").split("-")[0]) if asked else 0
        sent = content[begin:]
        request.send_response(206 if asked else 200)
        if asked:
            request.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        request.send_header("X-Repo-Commit", COMMIT)
        request.send_header("ETag", f'"{git}"')
        if large:
            request.send_header("X-Linked-Etag", f'"{hashlib.sha256(content).hexdigest()}"')
            request.send_header("X-Linked-Size", str(len(content)))
        request.send_header("Content-Length", str(len(sent)))
        request.end_headers()
        if not body:
            return
        if large and self.damaged:
            self.damaged -= 1
            sent = sent[:-9] + bytes([sent[-9] ^ 1]) + sent[-8:]
        if large and self.cut:
            self.cut -= 1
            request.wfile.write(sent[: len(sent) // 2])
            request.close_connection = True
            return
        request.wfile.write(sent)

    def take(self, request: BaseHTTPRequestHandler) -> None:
        """What an upload asks: the repository, how each file is to come, LFS files one by one, the commit."""
        self.requests.append((request.command, request.path, None))
        length, parts = request.headers.get("Content-Length"), []
        if length is not None:
            parts.append(request.rfile.read(int(length)))
        else:  # chunked
            while size := int(request.rfile.readline(), 16):
                parts.append(request.rfile.read(size))
                request.rfile.readline()
            request.rfile.readline()
        body, path = b"".join(parts), request.path
        answer: dict[str, Any] = {}
        if path == "/api/repos/create":
            asked = json.loads(body)
            self.created.append(asked)
            answer = {"url": f"{self.url}/{asked['organization']}/{asked['name']}"}
        elif "/preupload/" in path:
            mode = {True: "regular", False: "lfs"}
            names = [each["path"] for each in json.loads(body)["files"]]
            files = [
                {"path": n, "uploadMode": mode[n.endswith(".json")], "shouldIgnore": False}
                for n in names
            ]
            answer = {"files": files}
        elif path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for each in objects:
                each["actions"] = {"upload": {"href": f"{self.url}/lfs/{each['oid']}"}}
            answer = {"transfer": "basic", "objects": objects}
        elif path.startswith("/lfs/"):
            assert hashlib.sha256(body).hexdigest() == path.removeprefix("/lfs/")
            self._large[path.removeprefix("/lfs/")] = body
        elif "/commit/" in path:
            repository = path.removeprefix("/api/models/").partition("/commit/")[0]
            for each in map(json.loads, body.splitlines()):
                value = each["value"]
                if each["key"] == "lfsFile":
                    self.files[repository, value["path"]] = self._large[value["oid"]]
                elif each["key"] == "file":
                    self.files[repository, value["path"]] = base64.b64decode(value["content"])
            answer = {"commitOid": COMMIT, "commitUrl": f"{self.url}/{repository}/commit/{COMMIT}"}
        content = json.dumps(answer).encode()
        request.send_response(200)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content)
