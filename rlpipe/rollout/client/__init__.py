"""HTTP client of the router: requests, streaming, the gate and direct routing to engines."""
