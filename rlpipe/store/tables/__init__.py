"""Tables of a run that are computed from its records, for SQL queries and reports."""
