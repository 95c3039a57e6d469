"""Data in, program, data out: files travel through the guest, nothing of the host is mounted."""

import asyncio
import csv
import tempfile
from pathlib import Path

from paracle_sandbox import SandboxManager, SandboxPathError

SUMMARISE = """
import csv, json, os
rows = list(csv.DictReader(open("data/sales.csv")))
totals = {}
for row in rows:
    totals[row["city"]] = totals.get(row["city"], 0) + int(row["amount"])
os.makedirs("report")
json.dump(totals, open("report/totals.json", "w"))
"""


async def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        host = Path(name)
        with (host / "sales.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("city", "amount"), ("Oslo", 3), ("Bern", 4), ("Oslo", 5)])

        async with SandboxManager() as manager, manager.managed_sandbox() as sandbox:
            await sandbox.copy_to(host / "sales.csv", "data/")
            await sandbox.run_code(SUMMARISE)
            await sandbox.copy_from("report", host / "report")

            entries = await sandbox.list_files(recursive=True)
            for entry in sorted(entries, key=lambda entry: entry["path"]):
                print(f"{entry['kind']:9} {entry['size']:5} {entry['path']}")
            try:
                await sandbox.read_file("../etc/passwd")
            except SandboxPathError as error:
                print(f"refused: {error}")

        print((host / "report" / "totals.json").read_text())


asyncio.run(main())
