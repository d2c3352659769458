"""Derived tables of a run for SQL queries."""
