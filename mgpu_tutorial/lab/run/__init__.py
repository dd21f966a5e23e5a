"""From `launch()` to the processes of the ranks, and back."""
