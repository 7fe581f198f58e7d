"""The hub's protocol on loopback: HEAD with the checksums, GET with ranges, and uploads."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

COMMIT = "5" * 40


class Hub:
    """Repositories in memory. `files`: (repository, name) -> content; names that end in .json are no LFS files.

    Who sends `token` may upload. private: the repositories that were made, and whether they are private.
    cut: how many answers end in the middle. damaged: how many have a flipped bit.
    """

    def __init__(self) -> None:
        self.files: dict[tuple[str, str], bytes] = {}
        self.requests: list[tuple[str, str, str | None]] = []  # method, path, range
        self.cut = self.damaged = 0
        self.token = "hf_of_a_test"
        self.private: dict[str, bool] = {}
        self.commits: list[str] = []  # their messages
        self._large: dict[str, bytes] = {}  # uploaded LFS files by sha256
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

    def take(self, request: BaseHTTPRequestHandler) -> None:
        """A request of an upload, in the order in which huggingface_hub makes them."""
        self.requests.append((request.command, request.path, None))
        content = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        status, answer = 200, {}
        if request.command == "PUT":  # of a presigned URL
            self._large[request.path.rpartition("/")[2]] = content
        elif request.headers.get("Authorization") != f"Bearer {self.token}":
            status, answer = 401, {"error": "Invalid credentials in Authorization header"}
        elif request.path == "/api/repos/create":
            wish = json.loads(content)
            name = f"{wish['organization']}/{wish['name']}"
            if name in self.private:
                status, answer = 409, {"error": "You already created this model repo"}
            private = wish.get("private", wish.get("visibility") == "private")
            self.private.setdefault(name, private)
            answer |= {"url": f"{self.url}/{name}"}
        elif request.path == "/api/validate-yaml":
            answer = {"errors": [], "warnings": []}
        elif "/preupload/" in request.path:
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(content)["files"]
            ]
            answer = {"files": files, "commitOid": COMMIT}
        elif request.path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                {**each, "actions": {"upload": {"href": f"{self.url}/large/{each['oid']}"}}}
                for each in json.loads(content)["objects"]
            ]
            answer = {"transfer": "basic", "objects": objects}
        elif "/commit/" in request.path:
            repository = "/".join(request.path.split("/")[3:5])
            for line in map(json.loads, content.splitlines()):
                value = line["value"]
                if line["key"] == "header":
                    self.commits.append(value["summary"])
                elif line["key"] == "lfsFile":
                    self.files[repository, value["path"]] = self._large[value["oid"]]
                else:
                    self.files[repository, value["path"]] = base64.b64decode(value["content"])
            answer = {
                "commitUrl": f"{self.url}/{repository}/commit/{COMMIT}",
                "commitOid": COMMIT,
                "pullRequestUrl": None,
            }
        else:
            status, answer = 404, {"error": "not of this server"}
        body = json.dumps(answer).encode()
        request.send_response(status)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

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
