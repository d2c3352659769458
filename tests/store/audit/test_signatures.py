"""Signed heads (rlpipe.store.signatures) and their audit with a public key."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from rlpipe.errors import ConfigError
from rlpipe.store.audit.verification import check_store
from rlpipe.store.objects.files import Files
from rlpipe.store.signatures import PublicKey, SigningKey, signature_path
from rlpipe.types import Stage
from tests.store.audit.chained import head, texts
from tests.store.audit.forging import Forger


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    """Files of a private and a public key."""
    private = Ed25519PrivateKey.generate()
    data = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    public = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    for name, pem in (("private.pem", data), ("public.pem", public)):
        (tmp_path / name).write_bytes(pem)
    return tmp_path / "private.pem", tmp_path / "public.pem"


def test_a_signed_commit_replaces_a_held_digest(
    root: Path,
    keys: tuple[Path, Path],
    tool: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
):
    verify = ("verify", "--run", "run", "--public-key", str(keys[1]))
    assert tool(*verify) == 1
    assert "no commit of the history is signed with this key" in capsys.readouterr().out
    files = Files(root)
    held = head(Files(root), 2)
    for _ in range(2):
        SigningKey(keys[0]).sign(files, "run", 2, held)
    assert tool(*verify) == 0
    assert f"run/00000002 has the digest {held}: it proves 3 commits" in capsys.readouterr().out
    forger = Forger(root)
    forger.edit_table(1, Stage.REWARD, lambda rows: rows[0].update(reward=0.0))
    forger.save(rechain=True)
    assert tool(*verify) == 1
    assert held in capsys.readouterr().out
    path = signature_path("run", 2)
    forger = Forger(root)
    forger.records[path]["commit"] = head(Files(root), 2)
    forger.save(rechain=True)
    assert tool(*verify) == 1
    assert "the signature is invalid" in capsys.readouterr().out


def test_an_unusable_key_is_named(
    tmp_path: Path,
    keys: tuple[Path, Path],
    tool: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
):
    assert SigningKey.of_environment() is None
    for file in (tmp_path / "nothing", keys[1], tmp_path):
        monkeypatch.setenv("RLPIPE_SIGNING_KEY", str(file))
        with pytest.raises(ConfigError, match="RLPIPE_SIGNING_KEY"):
            SigningKey.of_environment()
    assert tool("verify", "--run", "run", "--public-key", str(keys[0])) == 2
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.serialization", None)
    with pytest.raises(ConfigError, match="pip install cryptography"):
        SigningKey(keys[0])


def test_a_signature_under_another_name_is_named(root: Path, keys: tuple[Path, Path]):
    files = Files(root)
    SigningKey(keys[0]).sign(files, "run", 2, head(files, 2))
    files.create(signature_path("run", 1), files.read(signature_path("run", 2)))
    report = check_store(files, "run", signed_by=PublicKey(keys[1]))
    assert ["the signature belongs to another commit" in one for one in texts(report)] == [True]
