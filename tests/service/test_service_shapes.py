"""Every address answers in the specified shape, and in the older ones."""

from __future__ import annotations

import base64
import io
import json
import tarfile
import zipfile
from urllib.parse import quote

import httpx2
import pytest
from service_process import ServiceProcess

from paracle_sandbox.service import schemas

MODELS = [
    name
    for name, found in vars(schemas).items()
    if isinstance(found, type) and "examples" in str(getattr(found, "model_config", ""))
]
OLD_EXECUTION = {"success", "output", "error", "exit_code", "execution_time"}


def at(user: str, rest: str = "") -> str:
    return f"/sandbox/{quote(user, safe='')}{rest}"


@pytest.mark.case("N12")
def test_health_needs_no_key_and_everything_else_does(fake: ServiceProcess) -> None:
    with fake.client(key="wrong") as stranger:
        health = stranger.get("/health").json()
        assert health["status"] == "healthy"
        assert {"docker", "version"} <= set(health)
        assert stranger.get("/ready").json() == {"ready": True}
        for path in ("/info", "/metrics", "/openapi.json", "/sandboxes", "/nowhere", "/docs"):
            assert stranger.get(path).status_code == 401, path
    bare = httpx2.post(f"{fake.url}/sandbox/a/execute", json={"code": "1"})
    assert (bare.status_code, bare.json()["kind"]) == (401, "denied")
    assert bare.json()["error"] == "Invalid API key" and "X-API-Key" in bare.json()["hint"]
    bearer = {"Authorization": f"Bearer {fake.key}"}
    assert httpx2.get(f"{fake.url}/info", headers=bearer).status_code == 200


def test_create_twice_is_the_same_sandbox(client: httpx2.Client, user: str) -> None:
    first = client.post(at(user, "/create"))
    assert first.status_code == 200, first.text
    again = client.post(at(user, "/create"), json={"memory_limit": "256m", "cpu_limit": 0.5})
    assert first.json()["container_id"] == again.json()["container_id"]
    assert {"user_id", "container_id", "status", "created_at", "last_used", "execution_count",
            "memory_usage_mb", "cpu_percent"} <= set(first.json())  # fmt: skip
    assert client.get(at(user, "/status")).json()["status"] == "running"


@pytest.mark.parametrize(
    ("wish", "told"),
    [
        ({"memory_limit": "-1"}, "memory_limit: not an amount of memory: '-1'"),
        (
            {"memory_limit": "64m"},
            "memory_limit in MB: it must be from 128 to 16384",
        ),
        ({"memory_limit": ""}, "memory_limit: "),
        ({"image": "a b"}, "image: not an image name"),
        ({"cpu_limit": 0}, "body.cpu_limit: "),
    ],
)
@pytest.mark.case("N09")
def test_limits_that_cannot_be(client: httpx2.Client, wish: dict[str, object], told: str) -> None:
    answer = client.post("/sandbox/limits/create", json=wish)
    assert (answer.status_code, answer.json()["kind"]) == (422, "bad_input"), answer.text
    assert answer.json()["error"].startswith(told) and "\n" not in answer.json()["error"]


def test_execute(client: httpx2.Client, user: str) -> None:
    good = client.post(at(user, "/execute"), json={"code": "import math; print(math.pi)"}).json()
    assert set(good) >= OLD_EXECUTION | {"result", "stats", "sandbox_id"}
    assert (good["success"], good["exit_code"], good["error"]) == (True, 0, None)
    assert good["output"] == good["result"]["stdout"] == "3.141592653589793\n"
    bad = client.post(at(user, "/execute"), json={"code": "1/0"}).json()
    assert (bad["success"], bad["exit_code"]) == (False, 1)
    assert "ZeroDivisionError" in bad["error"]


def test_a_timeout_is_an_answer_and_the_next_request_works(
    client: httpx2.Client, user: str
) -> None:
    slow = client.post(
        at(user, "/execute"),
        json={"code": "print('so far', flush=True)\nwhile 1: pass", "timeout": 1},
    ).json()
    assert (slow["success"], slow["error_type"], slow["kind"]) == (
        False, "SandboxTimeoutError", "timeout",
    )  # fmt: skip
    assert slow["exit_code"] != 0
    assert "timed out" in slow["error"]
    assert slow["output"] == "so far\n"
    assert client.post(at(user, "/shell"), json={"command": "echo next"}).json()["output"] == (
        "next\n"
    )


@pytest.mark.parametrize("seconds", [0, 301, -1, 1e9])
@pytest.mark.case("N09")
def test_timeouts_out_of_range(client: httpx2.Client, user: str, seconds: float) -> None:
    for path, body in (("/execute", {"code": "1"}), ("/shell", {"command": "true"})):
        answer = client.post(at(user, path), json={**body, "timeout": seconds})
        assert answer.status_code == 422, answer.text


@pytest.mark.parametrize("name", ["plain.txt", "with space.txt", 'it\'s "quoted".txt', "dir/ü/x"])
def test_file_round_trip(client: httpx2.Client, user: str, name: str) -> None:
    text = "EOF\nheredoc 'x' $HOME `id`\n"
    done = client.post(at(user, "/file"), json={"path": name, "content": text})
    assert done.json()["output"] == f"Written {len(text)} bytes to {name}", done.text
    read = client.get(at(user, "/file"), params={"path": name}).json()
    assert (read["content"], read["encoding"], read["size"]) == (text, "utf-8", len(text))
    assert client.delete(at(user, "/file"), params={"path": name}).status_code == 200
    assert client.get(at(user, "/file"), params={"path": name}).status_code == 404


def test_bytes_travel_as_base64(client: httpx2.Client, user: str) -> None:
    raw = bytes(range(256))
    body = {"path": "raw", "content": base64.b64encode(raw).decode(), "encoding": "base64"}
    assert client.post(at(user, "/file"), json=body).status_code == 200
    read = client.get(at(user, "/file"), params={"path": "raw"}).json()
    assert (read["encoding"], base64.b64decode(read["content"])) == ("base64", raw)
    bad = client.post(at(user, "/file"), json={**body, "content": "%%%"})
    assert bad.status_code == 400


def test_listing_comes_in_pages(client: httpx2.Client, user: str) -> None:
    client.post(at(user, "/shell"), json={"command": "mkdir d; touch d/a d/b c"})
    first = client.get(at(user, "/files"), params={"recursive": True, "limit": 2}).json()
    second = client.get(
        at(user, "/files"), params={"recursive": True, "limit": 2, "offset": first["next_offset"]}
    ).json()
    names = [entry["name"] for entry in first["files"] + second["files"]]
    assert {"a", "b", "c", "d"} <= set(names)
    assert first["total"] == len(names)
    assert second["next_offset"] is None


@pytest.mark.case("N17")
def test_raw_upload_download_and_ranges(client: httpx2.Client, user: str) -> None:
    size = 3 << 20
    content = bytes(i % 251 for i in range(1000)) * (size // 1000)
    done = client.put(at(user, "/files/raw"), params={"path": "big.bin"}, content=content)
    assert done.status_code == 200, done.text
    whole = client.get(at(user, "/files/raw"), params={"path": "big.bin"})
    assert whole.content == content
    assert whole.headers["content-disposition"].startswith("attachment")
    assert whole.headers["x-content-type-options"] == "nosniff"
    for asked, expected in (
        ("bytes=0-9", content[:10]), ("bytes=100-", content[100:]), ("bytes=-5", content[-5:]),
        ("bytes=10-999999999", content[10:]),
    ):  # fmt: skip
        part = client.get(
            at(user, "/files/raw"), params={"path": "big.bin"}, headers={"Range": asked}
        )
        assert (part.status_code, part.content) == (206, expected), asked
        assert part.headers["content-range"].endswith(f"/{len(content)}")
    for asked in ("bytes=9999999-", "bytes=5-2", "bytes=-0", "bytes=0-1,4-5"):
        part = client.get(
            at(user, "/files/raw"), params={"path": "big.bin"}, headers={"Range": asked}
        )
        assert part.status_code == 416, asked
        assert part.headers["content-range"] == f"bytes */{len(content)}"
        assert part.json()["error_type"] == "OutOfRange"
    other = client.get(
        at(user, "/files/raw"), params={"path": "big.bin"}, headers={"Range": "lines=1-2"}
    )
    assert (other.status_code, other.content == content) == (200, True), "no unit of ours"


def test_head_tells_what_get_would(client: httpx2.Client, user: str) -> None:
    client.put(at(user, "/files/raw"), params={"path": "f"}, content=b"12345")
    for path, params in (
        ("/health", {}),
        ("/ready", {}),
        (at(user, "/files/raw"), {"path": "f"}),
    ):
        head, got = client.head(path, params=params), client.get(path, params=params)
        assert (head.status_code, head.content) == (200, b""), path
        for name in ("content-length", "content-type"):
            assert head.headers[name] == got.headers[name], (path, name)
    assert head.headers["accept-ranges"] == "bytes" and head.headers["content-length"] == "5"
    assert client.head(at(user, "/files/raw"), params={"path": "none"}).status_code == 404


def test_destroy_in_both_shapes_keeps_the_files(client: httpx2.Client, user: str) -> None:
    for address in (at(user, "/destroy"), at(user)):
        client.post(at(user, "/file"), json={"path": "kept.txt", "content": "here"})
        assert client.delete(address).json() == {
            "status": "deleted", "files_preserved": True, "files_kept": True,
        }  # fmt: skip
        assert client.delete(address).json()["status"] == "not_found"
        assert client.get(at(user, "/status")).status_code == 404
        again = client.post(at(user, "/shell"), json={"command": "cat kept.txt"}).json()
        assert again["output"] == "here"
    client.delete(at(user, "/destroy"), params={"erase_files": True})
    assert client.get(at(user, "/files")).json()["files"] == []


def test_stop_and_restart(client: httpx2.Client, user: str) -> None:
    first = client.post(at(user, "/create")).json()["created_at"]
    assert client.post(at(user, "/stop")).json()["status"] == "stopped"
    assert client.get(at(user, "/status")).status_code == 404
    client.post(at(user, "/file"), json={"path": "x", "content": "1"})
    assert client.post(at(user, "/restart")).json()["status"] == "running"
    assert client.get(at(user, "/file"), params={"path": "x"}).json()["content"] == "1"
    assert first


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
def test_unzip(client: httpx2.Client, user: str, kind: str) -> None:
    buffer = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("inside/a.txt", "A")
    else:
        with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
            info = tarfile.TarInfo("inside/a.txt")
            info.size = 1
            tar.addfile(info, io.BytesIO(b"A"))
    client.put(at(user, "/files/raw"), params={"path": f"it.{kind}"}, content=buffer.getvalue())
    done = client.post(at(user, "/unzip"), json={"path": f"it.{kind}", "destination": "out"}).json()
    assert done["success"], done
    assert (
        client.get(at(user, "/file"), params={"path": "out/inside/a.txt"}).json()["content"] == "A"
    )
    missing = client.post(at(user, "/unzip"), json={"path": "nothing.zip"}).json()
    assert not missing["success"] and "not found" in missing["error"]


def test_usage_and_info(client: httpx2.Client, user: str) -> None:
    client.post(at(user, "/file"), json={"path": "x", "content": "12345"})
    usage = client.get(at(user, "/usage")).json()
    assert usage["stats"]["memory_bytes"] > 0
    assert usage["kept_bytes"] == 5
    assert usage["quotas"]["executions_per_minute"] == 100000
    assert client.get("/info").json()["max_containers"] == 300


def test_sandboxes_are_listed_in_pages(client: httpx2.Client, user: str) -> None:
    for number in range(3):
        client.post(at(f"{user}-{number}", "/create"))
    found: list[str] = []
    offset: int | None = 0
    while offset is not None:
        page = client.get("/sandboxes", params={"offset": offset, "limit": 2}).json()
        found += [one["user_id"] for one in page["sandboxes"]]
        offset = page["next_offset"]
    assert {f"{user}-{number}" for number in range(3)} <= set(found)
    assert len(found) == len(set(found)) == page["total"]


def test_background_commands(client: httpx2.Client, user: str) -> None:
    started = client.post(
        at(user, "/commands"), json={"command": "read x; echo got $x", "keep_stdin": True}
    )
    assert started.status_code == 201, started.text
    number = started.json()["command_id"]
    assert started.json()["running"]
    where = at(user, f"/commands/{number}")
    client.post(f"{where}/stdin", json={"data": "it\n", "close": True})
    with client.stream("GET", f"{where}/stream") as events:
        told = [json.loads(line[6:]) for line in events.iter_lines() if line.startswith("data: ")]
    assert told[0]["event"] == "start"
    assert told[-1] == {"event": "result", "success": True, "exit_code": 0, "files_kept": True}
    seen = client.get(where).json()
    assert (seen["running"], seen["exit_code"], seen["stdout"]) == (False, 0, "got it\n")
    assert client.get(at(user, "/commands")).json()["total"] == 1
    client.delete(where)
    assert client.get(where).status_code == 404


def test_a_background_command_is_ended(client: httpx2.Client, user: str) -> None:
    number = client.post(at(user, "/commands"), json={"command": "sleep 300"}).json()["command_id"]
    ended = client.delete(at(user, f"/commands/{number}")).json()
    assert (ended["running"], ended["exit_code"]) == (False, -9)
    number = client.post(at(user, "/commands"), json={"command": "exec sleep 300"}).json()[
        "command_id"
    ]
    client.post(at(user, f"/commands/{number}/signal"), json={"signal": 15})
    with client.stream("GET", at(user, f"/commands/{number}/stream")) as events:
        events.read()
    assert client.get(at(user, f"/commands/{number}")).json()["exit_code"] == -15


def test_what_cannot_reach_a_command_is_told(client: httpx2.Client, user: str) -> None:
    def start(**wish: object) -> str:
        made = client.post(at(user, "/commands"), json={"command": "cat", **wish})
        return at(user, f"/commands/{made.json()['command_id']}")

    def feed(where: str, **wish: object) -> int:
        return client.post(f"{where}/stdin", json=wish).status_code

    closed = start(command="sleep 300")
    assert feed(closed, data="lost\n") == 409
    client.delete(closed)
    fed = start(keep_stdin=True)
    assert [feed(fed, data="1"), feed(fed, data="2", close=True), feed(fed, data="3")] == [
        200, 200, 409,
    ]  # fmt: skip
    with client.stream("GET", f"{fed}/stream") as events:
        events.read()
    assert client.get(fed).json()["stdout"] == "12"
    late = client.post(f"{fed}/signal", json={"signal": 15})
    assert (late.status_code, late.json()["kind"]) == (409, "conflict")


def test_streaming_tells_output_as_it_comes(client: httpx2.Client, user: str) -> None:
    client.post(at(user, "/create"))
    code = "import sys\nprint('one', flush=True)\nsys.stdin.readline()\nprint('two')\n"
    body = {"code": code, "stdin": "\n"}
    with client.stream("POST", at(user, "/stream"), json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [json.loads(x[6:]) for x in answer.iter_lines() if x.startswith("data: ")]
    assert [e["event"] for e in events][:1] + [events[-1]["event"]] == ["start", "result"]
    assert "".join(e["text"] for e in events if e["event"] == "stdout") == "one\ntwo\n"
    with client.stream(
        "POST", at(user, "/stream"), json={"command": "sleep 60", "timeout": 0.5}
    ) as a:
        last = [json.loads(x[6:]) for x in a.iter_lines() if x.startswith("data: ")][-1]
    assert (last["event"], last["kind"]) == ("error", "timeout")


def test_streams_begin_with_the_first_byte(client: httpx2.Client, user: str) -> None:
    """However fast the program is, and however slow we are to look."""
    client.post(at(user, "/create"))
    for number in range(60):
        body = {"command": f"echo {number}"}
        with client.stream("POST", at(user, "/stream"), json=body) as answer:
            events = [json.loads(x[6:]) for x in answer.iter_lines() if x.startswith("data: ")]
        assert "".join(e.get("text", "") for e in events) == f"{number}\n", events


@pytest.mark.case("N14")
def test_the_same_idempotency_key_runs_once(client: httpx2.Client, user: str) -> None:
    body = {"command": "echo run >> log; wc -l < log"}
    headers = {"Idempotency-Key": f"{user}-1"}
    answers = [client.post(at(user, "/shell"), json=body, headers=headers) for _ in range(3)]
    assert {answer.json()["output"].strip() for answer in answers} == {"1"}
    assert answers[0].json() == answers[1].json()
    other = client.post(at(user, "/shell"), json={"command": "true"}, headers=headers)
    assert other.status_code == 422
    fresh = client.post(at(user, "/shell"), json=body, headers={"Idempotency-Key": f"{user}-2"})
    assert fresh.json()["output"].strip() == "2"


def test_metrics_count(client: httpx2.Client, user: str) -> None:
    client.post(at(user, "/execute"), json={"code": "print(1)"})
    client.post(at(user, "/execute"), json={"code": "raise SystemExit(3)"})
    text = client.get("/metrics").text
    assert 'paracle_executions_total{kind="python",outcome="ok"}' in text
    assert 'paracle_executions_total{kind="python",outcome="failed"}' in text
    assert 'paracle_sandbox_creations_total{outcome="ok"}' in text
    assert "paracle_execution_seconds_bucket" in text
    assert "paracle_live_sandboxes" in text
    assert "paracle_audit_failures 0.0" in text
    assert user not in text, "no text of a user becomes a label"


def test_directories_and_what_is_there(client: httpx2.Client, user: str) -> None:
    def ask(what: str, path: str) -> httpx2.Response:
        return client.get(at(user, f"/{what}"), params={"path": path})

    assert ask("exists", "a").json() == {"path": "a", "exists": False}
    assert ask("stat", "a").status_code == 404
    assert client.post(at(user, "/mkdir"), json={"path": "a/b"}).json()["output"] == "Made a/b"
    assert ask("exists", "a/b").json()["exists"]
    found = ask("stat", "a/b").json()
    assert (found["kind"], found["is_dir"], found["name"]) == ("directory", True, "b")
    wish = {"path": "a/b", "parents": False}
    again = client.post(at(user, "/mkdir"), json=wish)
    assert (again.status_code, again.json()["error_type"]) == (409, "SandboxFileExistsError")
    assert again.json()["details"]["filename"] == "a/b"
    for what in ("exists", "stat"):
        assert ask(what, "/etc").status_code == 400


def test_openapi_describes_every_route_with_examples(client: httpx2.Client) -> None:
    schema = client.get("/openapi.json").json()
    paths = schema["paths"]
    for path, method in (
        ("create", "post"), ("execute", "post"), ("shell", "post"), ("file", "get"),
        ("file", "post"), ("file", "delete"), ("pip/install", "post"), ("destroy", "delete"),
        ("status", "get"), ("stop", "post"), ("restart", "post"), ("files", "get"),
        ("unzip", "post"), ("pip/list", "get"), ("stat", "get"), ("exists", "get"),
        ("mkdir", "post"),
    ):  # fmt: skip
        operation = paths[f"/sandbox/{{user_id}}/{path}"][method]
        assert operation["description"], path
        assert {"401", "404", "422", "429"} <= set(operation["responses"]), path
    without = [n for n, s in schema["components"]["schemas"].items() if not s.get("examples")]
    assert not without


@pytest.mark.parametrize("name", MODELS)
def test_examples_are_what_they_show(name: str) -> None:
    model = getattr(schemas, name)
    for one in model.model_config["json_schema_extra"]["examples"]:
        assert model.model_validate(one)


def test_openapi_tells_what_the_routes_do_not(client: httpx2.Client) -> None:
    schema = client.get("/openapi.json").json()
    assert client.get("/openapi.json").json() == schema, "told twice, it is the same"
    assert schema["security"] == [{"key": []}, {"bearer": []}]
    assert schema["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    paths = schema["paths"]
    for path in ("/health", "/ready"):
        assert paths[path]["get"]["security"] == [], path
    upload = paths["/sandbox/{user_id}/files/raw"]["put"]["requestBody"]
    assert upload["content"]["application/octet-stream"]["schema"]["format"] == "binary"
    for path, operations in paths.items():
        for method, operation in operations.items():
            named = {one["name"] for one in operation.get("parameters", [])}
            twice = method == "post" and not path.endswith("/stream")
            assert ("Idempotency-Key" in named) == twice, (method, path)
            assert ("X-Sandbox-User" in named) == path.startswith("/v1/"), (method, path)
    program = schema["components"]["schemas"]["RunRequest"]["anyOf"]
    assert [one["required"] for one in program] == [["code"], ["command"]]


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/keys", "GET, POST"),
        ("/sandbox/u/file", "DELETE, GET, POST"),
        ("/sandbox/u", "DELETE"),
        ("/v1/sandboxes", "GET, POST"),
    ],
)
def test_allow_names_every_method(client: httpx2.Client, path: str, methods: str) -> None:
    for method in ("OPTIONS", "PATCH"):
        answer = client.request(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, methods), answer.text
