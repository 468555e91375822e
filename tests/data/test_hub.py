"""`hf://` inputs, against a local server that answers the hub's API for one dataset."""

import http.server
import json
import os
import subprocess
import sys
import threading
import urllib.parse

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from depthjax.data import load_tokenizer, open_shards

REPO = "HuggingFaceFW/fineweb-edu"
FOLDER = "sample/100BT"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.BaseHTTPRequestHandler):
    """Repository, tree and file requests for the files in `server.root`."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        api, resolve = f"/api/datasets/{REPO}", f"/datasets/{REPO}/resolve/main/"
        if path.startswith(resolve):
            self.send_range((self.server.root / path.removeprefix(resolve)).read_bytes())
        elif path.startswith(f"{api}/tree/main"):
            self.send_json(self.entries(path.removeprefix(f"{api}/tree/main").strip("/")))
        elif path in (api, f"{api}/revision/main"):
            self.send_json({"_id": "0", "id": REPO, "sha": COMMIT, "siblings": [], "tags": []})
        else:
            self.send_json({"error": "not found"}, 404)

    def do_POST(self):
        size = int(self.headers["Content-Length"])
        asked = urllib.parse.parse_qs(self.rfile.read(size).decode())
        if "json" in self.headers.get("Content-Type", ""):
            raise AssertionError("the hub client changed the encoding of paths-info")
        root = self.server.root
        self.send_json([self.entry(root / p) for p in asked["paths"] if (root / p).exists()])

    def entries(self, folder):
        return [self.entry(path) for path in sorted((self.server.root / folder).rglob("*"))]

    def entry(self, path):
        kind = "directory" if path.is_dir() else "file"
        name = path.relative_to(self.server.root).as_posix()
        return {"type": kind, "path": name, "oid": "0" * 40, "size": path.stat().st_size}

    def send_json(self, value, status=200):
        data = json.dumps(value).encode()
        self.send_response(status)
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def send_range(self, data):
        start, _, end = self.headers["Range"].removeprefix("bytes=").partition("-")
        part = data[int(start) : int(end or len(data) - 1) + 1]
        self.server.sent += len(part)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{int(start) + len(part) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)


@pytest.fixture
def hub(tmp_path):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads, server.root, server.sent = True, tmp_path / "hub", 0
    (server.root / FOLDER).mkdir(parents=True)
    thread = threading.Thread(target=server.serve_forever, args=[0.01])
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def run_python(code, hub, tmp_path):
    """Run `code` in a process whose hub is the local server, as HF_ENDPOINT is read at import."""
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_prepare_streams_parquet_from_the_hub_and_holds_out_depthbench_s_file(hub, tmp_path):
    texts = {f"000_0000{i}": [f"Document {j} of file {i}." for j in range(40)] for i in range(2)}
    texts["013_00008"] = ["Held out by name."] * 3
    for name, rows in texts.items():
        table = pyarrow.table({"id": [str(i) for i in range(len(rows))], "text": rows})
        pyarrow.parquet.write_table(table, hub.root / FOLDER / f"{name}.parquet")
    out = tmp_path / "out"
    code = (
        "from depthjax.data import prepare\n"
        f"prepare('hf://datasets/{REPO}/{FOLDER}', {str(out)!r}, tokenizer='bpe8k')"
    )
    run_python(code, hub, tmp_path)
    shards, tokenizer = open_shards(out), load_tokenizer("bpe8k")
    for split, names in [(shards.train, list(texts)[:2]), (shards.heldout, ["013_00008"])]:
        expected = tokenizer.encode_documents([text for name in names for text in texts[name]])
        assert np.array_equal(np.concatenate(expected), np.concatenate(list(split.documents())))


def test_skipped_row_groups_of_a_hub_file_are_not_downloaded(hub, tmp_path):
    rng = np.random.default_rng(0)
    rows = ["".join(map(chr, rng.integers(0x4E00, 0x9FFF, 1000))) for _ in range(8000)]
    path = hub.root / FOLDER / "big.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": rows}), path, row_group_size=100)
    code = (
        "from depthjax.data import find_sources, read_documents\n"
        f"[source] = find_sources('hf://datasets/{REPO}/{FOLDER}/big.parquet')\n"
        "print(len(list(read_documents(source, skip=7900))), next(read_documents(source))[:9])"
    )
    assert run_python(code, hub, tmp_path).split() == ["100", rows[0][:9]]
    assert hub.sent < path.stat().st_size * 0.8


def test_a_missing_dataset_is_named(hub, tmp_path):
    code = (
        "from depthjax.data import find_sources\n"
        "from depthjax.errors import InputError\n"
        "try:\n    find_sources('hf://datasets/nobody/nothing')\n"
        "except InputError as error:\n    print(error)"
    )
    printed = run_python(code, hub, tmp_path)
    assert "hf://datasets/nobody/nothing: no such file or directory" in printed
