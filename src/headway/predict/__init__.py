"""From a prompt to what each model is worth on it: tokens, task type, quality, output length and cost."""
