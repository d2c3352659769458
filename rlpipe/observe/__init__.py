"""What a person sees of a run: metrics and their sinks, terminal progress, the summary and the
report page. No Prefect here."""
