"""The requests to a Prefect server that a person makes with a button: start, retry, cancel, look.

Not with Prefect's client, which retries for minutes: a soak continues while the server is down.
"""

from __future__ import annotations

import json
import urllib.request
from typing import Any

TIMEOUT_S = 10.0
FINAL = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


class PrefectApi:
    """Requests to one server. Methods raise OSError if it refuses or does not answer."""

    def __init__(self, url: str) -> None:
        self._url = url

    def run_deployment(self, deployment: str, parameters: dict[str, Any]) -> str:
        """Start a flow run of `flow/deployment` and return its id."""
        found = self._request("GET", f"/deployments/name/{deployment}")
        return self._request(
            "POST", f"/deployments/{found['id']}/create_flow_run", {"parameters": parameters}
        )["id"]

    def state(self, flow_run: str) -> tuple[str, str]:
        """Return the type and name of a flow run's state."""
        state = self._request("GET", f"/flow_runs/{flow_run}")["state"]
        return state["type"], state["name"]

    def retry(self, flow_run: str) -> None:
        """Retry a flow run, as the Retry button does."""
        self._set(flow_run, "SCHEDULED", "AwaitingRetry")

    def cancel(self, flow_run: str) -> None:
        """Cancel a flow run, as the Cancel button does."""
        self._set(flow_run, "CANCELLING", "Cancelling")

    def newest(self, limit: int = 10) -> list[dict[str, Any]]:
        """Return the flow runs that started last, with their states."""
        runs = self._request(
            "POST", "/flow_runs/filter", {"sort": "START_TIME_DESC", "limit": limit}
        )
        return [
            {
                key: run.get(key)
                for key in ("name", "state_name", "start_time", "end_time", "run_count")
            }
            for run in runs
        ]

    def _set(self, flow_run: str, kind: str, name: str) -> None:
        self._request(
            "POST",
            f"/flow_runs/{flow_run}/set_state",
            {"state": {"type": kind, "name": name}, "force": True},
        )

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._url + path, data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return json.load(answer)
