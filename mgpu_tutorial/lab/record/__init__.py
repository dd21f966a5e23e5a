"""What happened: the trace, the report, memory, lines of source."""
