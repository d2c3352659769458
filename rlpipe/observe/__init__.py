"""Observability of a run: metrics and their sinks, terminal progress, trace, summary and pages.

Nothing here imports Prefect. `sinks.Sinks` writes metrics, `progress.Progress` draws the terminal,
`trace.traced` records stage times. `run_history.RunHistory` is the input of `summary`, `overview`,
`run_report` and `pictures`.
"""
