"""Whom HTTPS servers are believed to be, for every HTTP client of the process. Not here: the
clients."""

from __future__ import annotations

import ssl
from functools import cache

import httpx


@cache
def certificates() -> ssl.SSLContext:
    """The authorities of httpx (certifi, or SSL_CERT_FILE, SSL_CERT_DIR) and those of this machine.

    Made once: it takes 15 to 50 ms, which httpx would spend on every client, one that only speaks
    plain HTTP too.
    """
    context = httpx.create_ssl_context()
    context.load_default_certs()
    return context
