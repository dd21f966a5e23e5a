"""Pictures of what was recorded."""
