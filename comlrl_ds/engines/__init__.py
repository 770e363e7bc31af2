"""Model engines: the only package that knows DeepSpeed. Build, score, step, gather weights, save."""
