"""Signed heads: a signature over the digest of a commit, and so over everything below it.

    branches/<branch>/signatures/%08d.json     of the commit of that iteration

`RLPIPE_SIGNING_KEY` names a file with an ed25519 private key in PEM format, as `openssl genpkey
-algorithm ed25519` writes it. A run with a key signs each commit right after it is recorded. The
audit checks the signatures with the public key (`openssl pkey -pubout`). If a driver is killed
between a commit and its signature, the next signature covers that commit.

Keep the key on the driver's machine and outside the store. A person who can only write to the store
cannot sign changed records. Such a person can remove the newest signatures, and the audit then
reports fewer signed commits.

Entry points: `SigningKey`, `PublicKey`, `read_signature`.
"""

from __future__ import annotations

import importlib
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlpipe.errors import ConfigError, ObjectConflict, ObjectCorrupt
from rlpipe.store.objects.files import Files
from rlpipe.store.records import seal, unseal
from rlpipe.types import VersionedRecord

SIGNATURE_NAME = re.compile(r"branches/([^/]+)/signatures/([0-9]{8})\.json")
KEY_VARIABLE = "RLPIPE_SIGNING_KEY"


class Signature(VersionedRecord):
    """A signature of a commit."""

    branch: str
    iteration: int
    commit: str
    """sha256 of the commit's bytes."""
    public_key: str
    """The 32 bytes of the ed25519 key, in hex."""
    signature: str
    """The 64 bytes of the signature of `message`, in hex."""

    def message(self) -> bytes:
        """Return the signed bytes: the name of the commit and its digest."""
        return f"rlpipe commit {self.branch}/{self.iteration:08d} sha256 {self.commit}".encode()


class SigningKey:
    """A private key from a file."""

    def __init__(self, file: str | os.PathLike[str]) -> None:
        """Load the key.

        Raises: ConfigError if the file is not an ed25519 private key, or `cryptography` is not
        installed.
        """
        self._key = _load(
            file, "load_pem_private_key", "Ed25519PrivateKey", KEY_VARIABLE, password=None
        )

    @classmethod
    def of_environment(cls) -> SigningKey | None:
        """Return the key that the environment names, or None. Raises: ConfigError."""
        file = os.environ.get(KEY_VARIABLE)
        return cls(file) if file else None

    def sign(self, files: Files, branch: str, iteration: int, commit: str) -> None:
        """Sign the digest of a commit. An existing signature stays. Raises: StoreError."""
        public_key = self._key.public_key().public_bytes_raw().hex()
        unsigned = Signature(
            branch=branch, iteration=iteration, commit=commit, public_key=public_key, signature=""
        )
        signature = self._key.sign(unsigned.message()).hex()
        signed = unsigned.model_copy(update={"signature": signature})
        # ed25519 is deterministic: the same key gives the same bytes, so a retry is no conflict.
        path = signature_path(branch, iteration)
        with suppress(ObjectConflict):  # signed with another key
            files.create(path, seal(signed, path))


class PublicKey:
    """A public key from a file."""

    def __init__(self, file: str | os.PathLike[str]) -> None:
        """Load the key.

        Raises: ConfigError if the file is not an ed25519 public key, or `cryptography` is not
        installed.
        """
        self._key = _load(file, "load_pem_public_key", "Ed25519PublicKey", "--public-key")
        self._invalid: type[Exception] = importlib.import_module(
            "cryptography.exceptions"
        ).InvalidSignature

    def of(self, signature: Signature) -> bool:
        """True if a signature names this key. Does not verify the signature."""
        return signature.public_key == self._key.public_bytes_raw().hex()

    def signed(self, signature: Signature) -> bool:
        """True if a signature was made with this key."""
        try:
            self._key.verify(bytes.fromhex(signature.signature), signature.message())
        except (ValueError, self._invalid):
            return False
        return True


def read_signature(files: Files, path: str) -> Signature:
    """Return the signature at a path.

    Raises: ObjectMissing; ObjectCorrupt, also if the record belongs to another commit.
    """
    signature = unseal(Signature, files.read(path), files.url(path))
    if signature_path(signature.branch, signature.iteration) != path:
        raise ObjectCorrupt(
            "the signature belongs to another commit",
            where=files.url(path),
            found=f"iteration {signature.iteration} of {signature.branch}",
            expected="the commit of its name",
        )
    return signature


def signature_path(branch: str, iteration: int) -> str:
    """Return the path of a commit's signature."""
    return f"branches/{branch}/signatures/{iteration:08d}.json"


def _load(
    file: str | os.PathLike[str], loader: str, kind: str, where: str, **arguments: Any
) -> Any:
    """Load a key with a function of `cryptography`. Raises: ConfigError."""
    # Imported by name: most installations do not sign, and need no `cryptography`.
    try:
        load = getattr(
            importlib.import_module("cryptography.hazmat.primitives.serialization"), loader
        )
        expected = getattr(
            importlib.import_module("cryptography.hazmat.primitives.asymmetric.ed25519"), kind
        )
    except ImportError as error:
        raise ConfigError(
            "signing needs the library cryptography",
            where=where,
            found=str(error),
            do="pip install cryptography",
        ) from error
    try:
        key = load(Path(file).read_bytes(), **arguments)
    except (OSError, ValueError, TypeError) as error:  # TypeError: the key has a password
        raise ConfigError(
            "not a readable key",
            where=where,
            found=f"{file}: {error}",
            expected="PEM format, ed25519",
        ) from error
    if not isinstance(key, expected):
        raise ConfigError(
            "another kind of key",
            where=where,
            found=f"{file}: {type(key).__name__}",
            expected=kind,
        )
    return key
