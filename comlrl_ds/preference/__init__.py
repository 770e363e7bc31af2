"""Preference data: tasks to prompts, joint responses to scores, scores to pairs, pairs to files."""
