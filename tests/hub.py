"""A hub on the loopback: what `huggingface_hub` asks of it when a folder is pushed, files kept as they come."""

import base64
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN, USER = "hf_good", "me"


def way(path: str) -> str:
    return "lfs" if path.endswith(".safetensors") else "regular"


class Hub(ThreadingHTTPServer):
    """Knows one user, who may write to his own repositories. files: by repository and path."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.files: dict[str, dict[str, bytes]] = {}
        self.blobs: dict[str, bytes] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/api/whoami-v2" and self._known():
            self._say({"name": USER, "type": "user", "orgs": []})

    def do_PUT(self) -> None:
        self.server.blobs[self.path.rpartition("/")[2]] = self._body()
        self._say({})

    def do_POST(self) -> None:
        body, parts = self._body(), self.path.strip("/").split("/")
        if not self._known():
            return
        if self.path.endswith("/commit/main") and parts[2] == USER:
            self._say(self._committed("/".join(parts[2:4]), body))
        elif self.path.endswith("/objects/batch"):
            self._say({"transfer": "basic", "objects": [self._room(one) for one in json.loads(body)["objects"]]})
        else:
            self._json(json.loads(body))

    def _json(self, asked: dict[str, Any]) -> None:
        if self.path == "/api/repos/create":
            repo = f"{asked.get('organization', USER)}/{asked['name']}"
            if not repo.startswith(f"{USER}/"):
                self._say({"error": f"You don't have the rights to create a model under {repo}"}, 403)
                return
            self.server.files.setdefault(repo, {})
            self._say({"url": f"{self.server.url}/{repo}", "name": repo})
        elif self.path == "/api/validate-yaml":
            self._say({"errors": [], "warnings": []})
        elif self.path.endswith("/preupload/main"):
            files = [
                {"path": one["path"], "uploadMode": way(one["path"]), "shouldIgnore": False} for one in asked["files"]
            ]
            self._say({"files": files})
        else:
            self._say({"error": self.path}, 404)

    def _room(self, one: dict[str, Any]) -> dict[str, Any]:
        return {**one, "actions": {"upload": {"href": f"{self.server.url}/blobs/{one['oid']}"}}}

    def _committed(self, repo: str, body: bytes) -> dict[str, Any]:
        for line in map(json.loads, body.splitlines()):
            value, files = line["value"], self.server.files[repo]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.blobs[value["oid"]]
        return {"success": True, "commitUrl": f"{self.server.url}/{repo}/commit/abc", "commitOid": "abc"}

    def _known(self) -> bool:
        if self.headers.get("authorization") == f"Bearer {TOKEN}":
            return True
        self._say({"error": "Invalid user token."}, 401)
        return False

    def _body(self) -> bytes:
        if self.headers.get("transfer-encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("content-length", 0)))
        found = b""
        while size := int(self.rfile.readline(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def _say(self, answer: dict[str, Any], status: int = 200) -> None:
        said = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)
