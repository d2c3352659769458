"""One set of authorities for every HTTP client (rlpipe.system.certificates)."""

from __future__ import annotations

import ssl

import httpx
import pytest

from rlpipe.engines.sglang.admin import Engine
from rlpipe.rollout.client.http import fetch
from rlpipe.system.certificates import certificates

NOWHERE = "http://127.0.0.1:9"


async def test_who_asks_an_engine_or_a_router_reads_no_certificates_for_it(monkeypatch):
    certificates()

    def read(**_):
        raise AssertionError("certificates are read again")

    monkeypatch.setattr(ssl, "create_default_context", read)
    await Engine(NOWHERE).aclose()
    with pytest.raises(httpx.ConnectError):
        fetch("GET", NOWHERE, deadline_s=5)


def test_servers_have_to_say_who_they_are():
    found = certificates()
    assert found.verify_mode == ssl.CERT_REQUIRED and found.check_hostname
    assert found.cert_store_stats()["x509_ca"] > 0
