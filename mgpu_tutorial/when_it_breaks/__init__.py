"""When it breaks: find the fault of a job with the engineers' tools."""
