"""Mixed precision: cheaper numbers where they suffice, on one rank and on several."""
