"""What W&B's own client asks of W&B's servers, answered on this machine: enough of the HTTP interface for a whole online run.

It takes any key. An artifact is answered as one that is there already, as the table in it arrives as a file of the run too.
"""

import gzip
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class KeptRun:
    """What the servers would know of a run."""

    started: dict  # the arguments of its first mutation
    history: list[dict] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    exit_code: int | None = None

    @property
    def config(self) -> dict:
        return {key: of["value"] for key, of in json.loads(self.started["config"]).items()}

    @property
    def summary(self) -> dict:
        return json.loads(self.files["wandb-summary.json"])


class WandbServer(ThreadingHTTPServer):
    """`with WandbServer() as server`: listens at server.url, and keeps what arrives in server.runs, by the id of the run."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.runs: dict[str, KeptRun] = {}
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def __exit__(self, *_) -> None:
        self.shutdown()
        self.server_close()

    def answer(self, query: str, given: dict) -> dict:
        """To a query or a mutation of GraphQL."""
        if "upsertBucket(" in query:
            run = self.runs.setdefault(given["name"], KeptRun(given))
            project = {"id": "p", "name": run.started["project"], "entity": {"id": "e", "name": "me"}}
            named = {"id": given["name"], "name": given["name"], "displayName": run.started["displayName"], "config": "{}"}
            return {"upsertBucket": {"bucket": named | {"historyLineCount": 0, "project": project}, "inserted": True}}
        if "createRunFiles(" in query:
            files = [{"name": name, "uploadUrl": f"{self.url}/upload/{given['run']}/{name}"} for name in given["files"]]
            return {"createRunFiles": {"runID": given["run"], "uploadHeaders": [], "files": files}}
        if "createArtifact(" in query:
            there = {"id": "a", "state": "COMMITTED", "artifactSequence": {"id": "s", "latestArtifact": {"id": "a"}}}
            return {"createArtifact": {"artifact": there}}
        if "query Viewer" in query:
            someone = {"id": "u", "entity": "me", "username": "me", "email": "me@example.org", "flags": "{}"}
            return {"viewer": someone | {"teams": {"edges": []}}}
        if "query ArtifactType(" in query:
            return {"project": {"artifact": None}}
        return {}  # W&B does without, or fails aloud


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body, answer = self._body(), {}
        if self.path == "/graphql":
            asked = json.loads(body)
            answer = {"data": self.server.answer(asked["query"], asked.get("variables") or {})}
        elif self.path.endswith("/file_stream"):
            sent, run = json.loads(body), self.server.runs[self.path.split("/")[-2]]
            run.history += map(json.loads, sent.get("files", {}).get("wandb-history.jsonl", {}).get("content", []))
            run.exit_code = sent.get("exitcode", run.exit_code)
        self._reply(answer)

    def do_PUT(self) -> None:
        _, _, run, name = self.path.split("/", 3)
        self.server.runs[run].files[name] = self._body()
        self._reply({})

    def _body(self) -> bytes:
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        return gzip.decompress(raw) if self.headers.get("Content-Encoding") == "gzip" else raw

    def _reply(self, answer: dict) -> None:
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_) -> None: ...
