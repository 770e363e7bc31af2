"""Trainers: the loops, readable top to bottom."""
