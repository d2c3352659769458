"""Shared TLS trust store of all HTTP clients in the process."""

from __future__ import annotations

import ssl
from functools import cache

import httpx


@cache
def certificates() -> ssl.SSLContext:
    """Return a context with httpx's certificate authorities and those of this machine.

    httpx's are certifi's, or those of SSL_CERT_FILE and SSL_CERT_DIR.
    """
    # Cached: a context takes 15 to 50 ms. httpx makes one for every client, also for plain HTTP.
    context = httpx.create_ssl_context()
    context.load_default_certs()
    return context
