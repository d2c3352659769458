"""Checks of a store: records, files, rows, the chain of commits, and unexplained objects.

`verification` checks a run or a whole store, and calls the other modules. `anomalies` reports
unusual values. Both only read. Whether the stored numbers are right is checked by a replay
(`tools.replay`).
"""
