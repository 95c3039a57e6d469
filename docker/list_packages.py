"""Writes what is installed in this image to packages.json beside this file.

Run it again as root, with the image's name, after you have installed more into an image of yours.
"""

import json
import os
import platform
import subprocess
import sys
from importlib.metadata import distributions


def python_packages():
    found = {(d.metadata["Name"], d.version) for d in distributions()}
    return [{"kind": "python", "name": n, "version": v} for n, v in sorted(found)]


def debian_packages():
    query = ["dpkg-query", "--show", "--showformat", "${Package}\t${Version}\n"]
    lines = subprocess.run(query, stdout=subprocess.PIPE, check=True).stdout.decode().splitlines()
    pairs = sorted(line.split("\t") for line in lines)
    return [{"kind": "debian", "name": n, "version": v} for n, v in pairs]


image = {
    "image": sys.argv[1],
    "python": platform.python_version(),
    "packages": [*python_packages(), *debian_packages()],
}
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "packages.json"), "w") as file:
    json.dump(image, file, indent=1)
