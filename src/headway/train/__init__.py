"""From prompts and a pool to a predictor: evaluation data, training, and how good the result really is."""
