"""A hub for tests: serves directories as models, and counts what is downloaded. It speaks what huggingface_hub asks."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flask import Flask, Response, jsonify, request
from werkzeug.exceptions import NotFound
from werkzeug.serving import make_server


class HubServer:
    """Serves the directories under ``root`` as ``owner/name``; each has one commit."""

    def __init__(self, root: Path) -> None:
        self.downloads: Counter[str] = Counter()
        """Times that each file was sent, by ``owner/name/file``."""
        self.broken: set[str] = set()
        """Files that are refused, by the same names."""
        self._root = root
        app = Flask(__name__)
        app.add_url_rule("/api/models/<path:rest>", view_func=self._api)
        app.add_url_rule("/<owner>/<name>/resolve/<commit>/<path:file>", view_func=self._file)
        self._server = make_server("127.0.0.1", 0, app, threaded=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def serve(self) -> None:
        """Serve until ``close``."""
        self._server.serve_forever()

    def close(self) -> None:
        """End ``serve``."""
        self._server.shutdown()

    def commit_of(self, repo_id: str) -> str:
        """The commit of a model: a hash of its files."""
        digest = hashlib.sha1()
        for file in self._files(repo_id):
            digest.update(file.read_bytes())
        return digest.hexdigest()

    def _files(self, repo_id: str) -> list[Path]:
        folder = self._root / repo_id
        if not folder.is_dir():
            raise NotFound
        return sorted(file for file in folder.rglob("*") if file.is_file())

    def _api(self, rest: str) -> Response:
        owner, name, *what = rest.split("/")
        repo_id = f"{owner}/{name}"
        files = self._files(repo_id)
        names = [str(file.relative_to(self._root / repo_id)) for file in files]
        if what and what[0] == "tree":
            sizes = [file.stat().st_size for file in files]
            entries = [
                {"type": "file", "path": name, "size": size, "oid": _etag(file)}
                for name, size, file in zip(names, sizes, files, strict=True)
            ]
            return jsonify(entries)
        info = {"id": repo_id, "sha": self.commit_of(repo_id), "siblings": [{"rfilename": name} for name in names]}
        return jsonify({**info, "private": False, "gated": False, "disabled": False, "tags": [], "downloads": 0})

    def _file(self, owner: str, name: str, commit: str, file: str) -> Response:
        path = self._root / owner / name / file
        if not path.is_file():
            response = Response(status=404)
            response.headers["X-Error-Code"] = "EntryNotFound"
            return response
        if f"{owner}/{name}/{file}" in self.broken:
            return Response(status=403)
        if request.method == "GET":
            self.downloads[f"{owner}/{name}/{file}"] += 1
        response = Response(path.read_bytes(), mimetype="application/octet-stream")
        response.headers["ETag"] = f'"{_etag(path)}"'
        response.headers["X-Repo-Commit"] = self.commit_of(f"{owner}/{name}")
        response.headers["Accept-Ranges"] = "bytes"
        return response


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@contextmanager
def hub_server(root: Path) -> Iterator[HubServer]:
    """Serve ``root`` until the block ends."""
    server = HubServer(root)
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join()
