"""The sandbox service: start it, use it over HTTP and through the library, end it."""

import asyncio
import json
import re
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

from paracle_sandbox import SandboxManager, Settings


def call(url: str, key: str, path: str, body: dict | None = None, method: str = "POST") -> dict:
    data = json.dumps(body or {}).encode() if method == "POST" else None
    headers = {"X-API-Key": key, "Content-Type": "application/json"}
    request = urllib.request.Request(url + path, data, headers, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


async def from_the_library(url: str, key: str) -> None:
    settings = Settings(mode="remote", api_url=url, api_key=key)
    async with SandboxManager(settings=settings) as manager, manager.managed_sandbox() as sandbox:
        print("remote:", (await sandbox.run_code("print('hello from afar')"))["stdout"].strip())


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        service = subprocess.Popen(
            ["env", f"SANDBOX_DATA_DIR={directory}", sys.executable, "-m", "paracle_sandbox",
             "serve", "--port", "0"],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            said = [service.stdout.readline() for _ in range(4)]
            url = re.search(r"http://\S+", said[0])[0]
            key = Path(re.search(r"/.*first-key", said[1])[0]).read_text().strip()

            answer = call(url, key, "/sandbox/ann/execute", {"code": "print(6 * 7)"})
            print(answer["output"].strip(), f"in {answer['execution_time'] * 1000:.0f} ms")

            call(url, key, "/sandbox/ann/file", {"path": "note.txt", "content": "hello"})
            call(url, key, "/sandbox/ann/destroy", method="DELETE")
            answer = call(url, key, "/sandbox/ann/shell", {"command": "cat note.txt"})
            print("files stay:", answer["output"])

            try:
                call(url, "wrong key", "/sandbox/ann/execute", {"code": "print(1)"})
            except urllib.error.HTTPError as error:
                print("refused:", error.code)

            asyncio.run(from_the_library(url, key))
        finally:
            service.terminate()
            service.wait()


main()
