"""All HTTP clients share one trust store (rlpipe.system.certificates)."""

from __future__ import annotations

import ssl

import httpx
import pytest

from rlpipe.engines.sglang.admin import Engine
from rlpipe.rollout.client.http import fetch
from rlpipe.system.certificates import certificates

NOWHERE = "http://127.0.0.1:9"


async def test_http_clients_do_not_load_certificates_again(monkeypatch):
    certificates()

    def read(**_):
        raise AssertionError("certificates are read again")

    monkeypatch.setattr(ssl, "create_default_context", read)
    await Engine(NOWHERE).aclose()
    with pytest.raises(httpx.ConnectError):
        fetch("GET", NOWHERE, deadline_s=5)


def test_the_context_verifies_servers():
    context = certificates()
    assert context.verify_mode == ssl.CERT_REQUIRED and context.check_hostname
    assert context.cert_store_stats()["x509_ca"] > 0
