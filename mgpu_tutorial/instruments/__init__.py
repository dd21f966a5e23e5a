"""What a reader calls by name: `prove`, which asks whether a parallel job is right."""
