"""Signed heads: the holder of a private key vouches for the digest of a commit, and so for
everything below it (`chain`).

    branches/<branch>/signatures/%08d.json     of the commit of that iteration

`RLPIPE_SIGNING_KEY` names a file with an ed25519 private key in PEM, as `openssl genpkey -algorithm
ed25519` writes it. A run with it signs each commit right after it is made, and the audit checks
that with the public key (`openssl pkey -pubout`). A commit without a signature (its driver was
killed between the two) is covered by the next one that has one.

The key has to be where the driver is and not in the store. Whoever can only write to the store
cannot sign what they changed; they can remove the newest signatures, and the audit then says that
less is signed.

Not here: when commits are signed (`tasks.checkpoint`). The library `cryptography` is needed only
where a key is used.
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
    """The holder of a key vouches for a commit."""

    branch: str
    iteration: int
    commit: str
    """sha256 of the commit's bytes."""
    public_key: str
    """The 32 bytes of the ed25519 key, in hex."""
    signature: str
    """The 64 bytes, in hex, over `message`."""

    def message(self) -> bytes:
        """What is signed: which commit, and its digest."""
        return f"rlpipe commit {self.branch}/{self.iteration:08d} sha256 {self.commit}".encode()


class SigningKey:
    """A private key from a file."""

    def __init__(self, file: str | os.PathLike[str]) -> None:
        """Raises: ConfigError if there is no ed25519 private key in it, or `cryptography` is not
        installed.
        """
        self._key = _load(
            file, "load_pem_private_key", "Ed25519PrivateKey", KEY_VARIABLE, password=None
        )

    @classmethod
    def of_environment(cls) -> SigningKey | None:
        """The key that the environment names, or None. Raises: ConfigError."""
        file = os.environ.get(KEY_VARIABLE)
        return cls(file) if file else None

    def sign(self, files: Files, branch: str, iteration: int, commit: str) -> None:
        """Sign the digest of a commit; one that is signed already stays so. Raises: StoreError."""
        public_key = self._key.public_key().public_bytes_raw().hex()
        said = Signature(
            branch=branch, iteration=iteration, commit=commit, public_key=public_key, signature=""
        )
        signed = said.model_copy(update={"signature": self._key.sign(said.message()).hex()})
        path = signature_path(branch, iteration)
        with suppress(ObjectConflict):  # with another key
            files.create(path, seal(signed, path))


class PublicKey:
    """A public key from a file."""

    def __init__(self, file: str | os.PathLike[str]) -> None:
        """Raises: ConfigError if there is no ed25519 public key in it, or `cryptography` is not
        installed.
        """
        self._key = _load(file, "load_pem_public_key", "Ed25519PublicKey", "--public-key")
        self._invalid: type[Exception] = importlib.import_module(
            "cryptography.exceptions"
        ).InvalidSignature

    def of(self, signature: Signature) -> bool:
        """True if a signature says that it was made with this key."""
        return signature.public_key == self._key.public_bytes_raw().hex()

    def signed(self, signature: Signature) -> bool:
        """True if a signature was made with this key."""
        try:
            self._key.verify(bytes.fromhex(signature.signature), signature.message())
        except (ValueError, self._invalid):
            return False
        return True


def read_signature(files: Files, path: str) -> Signature:
    """One signature. Raises: ObjectMissing; ObjectCorrupt, also if it is another commit's."""
    found = unseal(Signature, files.read(path), files.url(path))
    if signature_path(found.branch, found.iteration) != path:
        said = f"iteration {found.iteration} of {found.branch}"
        raise ObjectCorrupt(
            "this is another signature",
            where=files.url(path),
            found=said,
            expected="that of its name",
        )
    return found


def signature_path(branch: str, iteration: int) -> str:
    """Where the signature of a commit lives."""
    return f"branches/{branch}/signatures/{iteration:08d}.json"


def _load(
    file: str | os.PathLike[str], loader: str, kind: str, where: str, **arguments: Any
) -> Any:
    """A key of this kind. Raises: ConfigError."""
    try:
        load = getattr(
            importlib.import_module("cryptography.hazmat.primitives.serialization"), loader
        )
        expected = getattr(
            importlib.import_module("cryptography.hazmat.primitives.asymmetric.ed25519"), kind
        )
    except ImportError as error:
        raise ConfigError(
            "signing needs a library", where=where, found=str(error), do="pip install cryptography"
        ) from error
    try:
        key = load(Path(file).read_bytes(), **arguments)
    except (OSError, ValueError, TypeError) as error:  # TypeError: it is encrypted
        raise ConfigError(
            "not a key that can be read",
            where=where,
            found=f"{file}: {error}",
            expected="PEM, ed25519",
        ) from error
    if not isinstance(key, expected):
        raise ConfigError(
            "not a key of this kind",
            where=where,
            found=f"{file}: {type(key).__name__}",
            expected=kind,
        )
    return key
