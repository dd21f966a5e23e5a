"""What several chapters use: data, models, vision, checkpoints, costs, a slow network."""
