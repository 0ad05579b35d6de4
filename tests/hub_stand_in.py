"""A stand-in for the Hub on loopback: what huggingface_hub needs of its HTTP interface to fill and read repositories.

Repositories live in memory. A commit is applied whole: a push that stops before it leaves the repository as it was.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".bin", ".png")  # go through LFS


@dataclass
class Repository:
    """The files of the last commit, and how many there were."""

    files: dict[str, bytes] = field(default_factory=dict)
    commits: int = 0
    private: bool = False

    @property
    def sha(self) -> str:
        return hashlib.sha1(str(self.commits).encode()).hexdigest()


@dataclass
class Hub:
    """What a test sees of the server."""

    endpoint: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    uploads: dict[str, bytes] = field(default_factory=dict)  # LFS objects by their hash
    requests: list[str] = field(default_factory=list)
    failing: str = ""  # a regular expression: requests that it finds are answered with an error


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        self.hub.requests.append(f"{self.command} {self.path}")

    def answer(self, status: int, body: bytes | dict[str, Any] | list[Any] = b"", **headers: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(content)), **names}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def handle_request(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        if self.hub.failing and re.search(self.hub.failing, f"{self.command} {path}"):
            self.answer(400, {"error": "the stand-in was told to fail"})
            return
        for method, pattern, action in ROUTES:
            found = re.fullmatch(pattern, path)
            if found and self.command in method:
                action(self, body, *found.groups())
                return
        self.answer(404, {"error": f"no route {self.command} {path}"})

    do_GET = do_HEAD = do_POST = do_PUT = handle_request  # noqa: N815  # the names http.server looks for

    # -- actions --

    def create(self, body: bytes) -> None:
        wanted = json.loads(body)
        name = "/".join(filter(None, [wanted.get("organization") or "me", wanted["name"].rpartition("/")[2]]))
        status = 409 if name in self.hub.repositories else 200
        self.hub.repositories.setdefault(name, Repository(private=wanted.get("visibility") == "private"))
        self.answer(status, {"url": f"{self.hub.endpoint}/{name}", "name": name, "id": name})

    def describe(self, body: bytes, name: str, *rest: str) -> None:
        repository = self.hub.repositories.get(name)
        if repository is None:
            self.answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
            return
        siblings = [{"rfilename": path} for path in repository.files]
        said = {"sha": repository.sha, "siblings": siblings, "private": repository.private}
        self.answer(200, {"id": name, "modelId": name, **said})

    def tree(self, body: bytes, name: str, *rest: str) -> None:
        files = self.hub.repositories[name].files
        self.answer(200, [{"type": "file", "path": p, "size": len(x), "oid": _sha(x)} for p, x in files.items()])

    def preupload(self, body: bytes, name: str) -> None:
        files = [
            {"path": f["path"], "uploadMode": "lfs" if f["path"].endswith(LARGE) else "regular", "shouldIgnore": False}
            for f in json.loads(body)["files"]
        ]
        self.answer(200, {"files": files})

    def batch(self, body: bytes, name: str) -> None:
        objects = [
            {**item, "actions": {"upload": {"href": f"{self.hub.endpoint}/lfs/{item['oid']}"}}}
            for item in json.loads(body)["objects"]
        ]
        self.answer(200, {"transfer": "basic", "objects": objects})

    def store(self, body: bytes, oid: str) -> None:
        self.hub.uploads[oid] = body
        self.answer(200 if _sha(body) == oid else 400)

    def commit(self, body: bytes, name: str) -> None:
        repository = self.hub.repositories[name]
        files = dict(repository.files)
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.uploads[value["oid"]]
            elif line["key"] == "deletedFile":
                files.pop(value["path"], None)
        repository.files, repository.commits = files, repository.commits + 1
        url = f"{self.hub.endpoint}/{name}/commit/{repository.sha}"
        self.answer(200, {"success": True, "commitOid": repository.sha, "commitUrl": url, "hookOutput": ""})

    def resolve(self, body: bytes, name: str, revision: str, path: str) -> None:
        repository = self.hub.repositories.get(name)
        if repository is None:
            self.answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        elif path not in repository.files:
            self.answer(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound", X_Repo_Commit=repository.sha)
        else:
            content = repository.files[path]
            etag = f'"{_sha(content)}"'
            self.answer(200, content, X_Repo_Commit=repository.sha, ETag=etag, Content_Type="application/octet-stream")

    def agree(self, body: bytes) -> None:
        self.answer(200, {"errors": [], "warnings": []})


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


REPOSITORY = r"([\w.-]+/[\w.-]+)"
ROUTES: list[tuple[str, str, Any]] = [
    ("POST", r"/api/repos/create", Handler.create),
    ("POST", r"/api/validate-yaml", Handler.agree),
    ("GET", rf"/api/models/{REPOSITORY}/tree/([^/]+).*", Handler.tree),
    ("GET", rf"/api/models/{REPOSITORY}(?:/revision/([^/]+))?", Handler.describe),
    ("POST", rf"/api/models/{REPOSITORY}/preupload/[^/]+", Handler.preupload),
    ("POST", rf"/api/models/{REPOSITORY}/commit/[^/]+", Handler.commit),
    ("POST", rf"/{REPOSITORY}\.git/info/lfs/objects/batch", Handler.batch),
    ("PUT", r"/lfs/(\w+)", Handler.store),
    ("GET HEAD", rf"/{REPOSITORY}/resolve/([^/]+)/(.+)", Handler.resolve),
]


@contextmanager
def hub_stand_in() -> Iterator[Hub]:
    """Serve an empty Hub while the block runs; `HF_ENDPOINT` of a client is its `endpoint`."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": hub}))
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
