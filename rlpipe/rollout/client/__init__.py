"""HTTP client of the engines: requests in batches, streaming, the gate for weight pushes."""
