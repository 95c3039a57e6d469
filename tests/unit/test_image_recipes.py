"""An image has its recipe, and a build sees only a part of the machine's pip configuration."""

from __future__ import annotations

import configparser
import io
import re
import tarfile
from pathlib import Path

import pytest

from paracle_sandbox import __version__
from paracle_sandbox.backends.native.templates import PACKAGES
from paracle_sandbox.images import package_index
from paracle_sandbox.images.recipe import RECIPES, pack

FOLDER = Path(__file__).resolve().parents[2] / "docker"

LISTING = """\
:env:.disable-pip-version-check='1'
:env:.timeout='7'
:env:.find-links='/srv/wheels https://wheels.example/flat'
global.cert='{cert}'
global.extra-index-url='file:///srv/simple\\nhttps://extra.example/simple'
global.index-url='https://user:pass=word@index.example/simple'
global.timeout='60'
install.index-url='https://install.example/simple'
download.index-url='https://download.example/simple'
"""


WITH_PACKAGES = [variant for variant, recipe in RECIPES.items() if recipe.has_packages]


@pytest.mark.parametrize("variant", WITH_PACKAGES)
def test_an_image_has_the_packages_of_its_template(variant: str) -> None:
    lines = (FOLDER / "packages" / f"{variant}.txt").read_text().splitlines()
    pinned = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w-]+==[\w.]+", line) for line in pinned), "each has one version"
    names = {line.split("==")[0] for line in pinned}
    template = set(PACKAGES["default" if variant == "sandbox" else variant])
    base = set(PACKAGES["default"])
    assert names == (template if variant == "sandbox" else template - base) - {"pip"}


@pytest.mark.parametrize("variant", WITH_PACKAGES)
def test_the_context_holds_what_the_dockerfile_copies(variant: str) -> None:
    recipe = RECIPES[variant]
    with tarfile.open(fileobj=io.BytesIO(pack(recipe.files()))) as tar:
        names = tar.getnames()
    assert recipe.dockerfile in names
    text = (FOLDER / recipe.dockerfile).read_text()
    assert f"packages*/{variant}.txt" in text and f"packages/{variant}.txt" in names


@pytest.mark.parametrize("variant", RECIPES)
def test_a_plain_build_has_the_version_of_the_package(variant: str) -> None:
    last_stage = (FOLDER / RECIPES[variant].dockerfile).read_text().rpartition("\nFROM ")[2]
    assert f"\nARG VERSION={__version__}\n" in last_stage
    assert 'org.opencontainers.image.version="${VERSION}"' in last_stage


def test_the_same_files_make_the_same_context() -> None:
    files = RECIPES["ml"].files()
    assert pack(files) == pack(dict(reversed(files.items())))


def test_a_digest_is_that_of_one_recipe() -> None:
    digests = {recipe.digest() for recipe in RECIPES.values()}
    assert len(digests) == len(RECIPES)
    assert RECIPES["dev"].digest() == RECIPES["dev"].digest()


def _conf(files: dict[str, bytes]) -> dict[str, str]:
    parser = configparser.RawConfigParser()
    parser.read_string(files["pip.conf"].decode())
    return dict(parser["global"])


def test_the_pip_configuration_of_a_build(tmp_path: Path) -> None:
    certificates = tmp_path / "own.pem"
    certificates.write_bytes(b"a certificate")
    listing = LISTING.format(cert=certificates)
    files = package_index.make_files(package_index.read_listing(listing))
    assert files["ca.pem"] == b"a certificate"
    # Options for this machine or for other commands are left out, and the environment wins.
    assert _conf(files) == {
        "timeout": "7",
        "index-url": "https://install.example/simple",
        "extra-index-url": "https://extra.example/simple",
        "find-links": "https://wheels.example/flat",
        "cert": "/build/ca.pem",
    }


def test_a_machine_without_configuration_passes_none() -> None:
    files = package_index.make_files(package_index.read_listing(""))
    assert list(files) == ["pip.conf"] and _conf(files) == {}


def test_an_address_may_hold_any_character() -> None:
    read = package_index.read_listing("global.index-url='https://u:a=b%c@index.example/simple'\n")
    assert (
        _conf(package_index.make_files(read))["index-url"] == "https://u:a=b%c@index.example/simple"
    )


def test_a_certificate_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"gone\.pem"):
        package_index.make_files({"cert": str(tmp_path / "gone.pem")})
