"""Manifests: a folder is valid only when whole, and every way of being broken is named."""

import contextlib
import dataclasses
import os
import socket

import pytest

from shared.errors import Forbidden, Unavailable, WeightsError
from shared.run import checkpoint_files
from shared.run import state as states
from shared.run.checkpoint_files import Manifest, ManifestLeaf, Probe
from tests.support.disk import no_more_files


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "checkpoints" / "e000001-s000002"
    (folder / "params" / "d").mkdir(parents=True)
    (folder / "params" / "d" / "0").write_bytes(os.urandom(1000))
    (folder / "params" / "_METADATA").write_bytes(b"{}")
    (folder / "state.json").write_bytes(b"{}")
    manifest = Manifest(
        "run", folder.name, None, 2, "full", "params", checkpoint_files.digest_files(folder, "params"),
        (ManifestLeaf("a.w", (2, 3), "float32"),), {"vocab_size": 8}, Probe((1, 2), (-0.5,)), 0.0,
    )  # fmt: skip
    checkpoint_files.write_manifest(folder, manifest)
    return folder


def test_round_trip(folder):
    manifest = checkpoint_files.read_manifest(folder)
    assert manifest.tree == (ManifestLeaf("a.w", (2, 3), "float32"),)
    assert manifest.probe == Probe((1, 2), (-0.5,))
    checkpoint_files.verify_files(folder, manifest)


def flip(folder):
    path = folder / "params" / "d" / "0"
    data = bytearray(path.read_bytes())
    data[500] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (flip, "digest of params/d/0 differs"),
        (lambda f: os.truncate(f / "params" / "d" / "0", 999), "has 999 bytes, expected 1000"),
        (lambda f: (f / "params" / "d" / "0").unlink(), "params/d/0 is missing"),
        (lambda f: (f / "params" / "extra").touch(), "params/extra is not in the manifest"),
    ],
)
def test_harm_is_named(folder, harm, message):
    harm(folder)
    with pytest.raises(WeightsError, match=message):
        checkpoint_files.verify_files(folder, checkpoint_files.read_manifest(folder))


def test_too_many_open_files_are_no_harm(folder):
    manifest = checkpoint_files.read_manifest(folder)
    with no_more_files():
        with pytest.raises(Unavailable, match="Too many open files"):
            checkpoint_files.verify_files(folder, manifest)
        with pytest.raises(Unavailable, match="Too many open files"):
            checkpoint_files.read_manifest(folder)
    checkpoint_files.verify_files(folder, manifest)


def test_a_state_that_was_removed_is_named(folder):
    (folder / "state.json").unlink()
    with pytest.raises(WeightsError, match=r"state\.json: No such file"):
        states.verify(folder)


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "params/d/0"])
@pytest.mark.parametrize("special", ["fifo", "socket", "folder", "loop"])
def test_what_is_no_file_is_named_and_nobody_waits_for_it(folder, name, special):
    manifest = checkpoint_files.read_manifest(folder)
    sealed = states.initial_state(7).to_json(optimizer_files=[], seal=checkpoint_files.seal(manifest))
    (folder / "state.json").write_bytes(sealed)
    state = checkpoint_files.digest(folder / "state.json")
    checkpoint_files.write_manifest(folder, dataclasses.replace(manifest, state=state))
    (folder / "optimizer").mkdir()
    states.verify(folder)
    (folder / name).unlink()
    put(folder / name, special)
    with pytest.raises((WeightsError, Forbidden)):
        states.verify(folder)


def put(path, special):
    if special == "fifo":
        os.mkfifo(path)
    elif special == "folder":
        path.mkdir()
    elif special == "loop":
        path.symlink_to(path)
    else:
        with socket.socket(socket.AF_UNIX) as one, contextlib.chdir(path.parent):
            one.bind(path.name)


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"schema": 2}', b'{"schema": 1, "version": "x"}'])
def test_a_malformed_manifest_is_refused(folder, data):
    (folder / "manifest.json").write_bytes(data)
    with pytest.raises(WeightsError):
        checkpoint_files.read_manifest(folder)


def test_a_folder_without_manifest_does_not_exist(folder):
    root = folder.parent
    (root / "e000001-s000003" / "params").mkdir(parents=True)
    (root / "tmp-e000001-s000004").mkdir()
    (root / "tmp-e000001-s000004" / "manifest.json").touch()
    assert checkpoint_files.newest(root) == folder
    assert checkpoint_files.newest(root / "none") is None


def test_paths_stay_under_the_root(folder, tmp_path):
    (tmp_path / "link").symlink_to("/")
    for name in ("../..", "/etc/passwd", "link/etc"):
        with pytest.raises(Forbidden):
            checkpoint_files.confined(tmp_path, name)
    manifest = checkpoint_files.read_manifest(folder)
    outside = dataclasses.replace(
        manifest, path="../../..", files=(checkpoint_files.ManifestFile("../../../x", 1, ""),)
    )
    with pytest.raises((WeightsError, Forbidden)):
        checkpoint_files.verify_files(folder, outside)
